"""What a server is sent, and the exact token ids of its reply.

    vllm     POST …/v1/completions   prompt ids in, `token_ids` and `prompt_token_ids` out
    openai   POST …/v1/completions   only fields of the OpenAI API; text out
    sglang   POST …/generate         `input_ids` in, `output_ids` out

Sampling parameters are always spelled out: a server's own defaults, taken from the model's
generation_config.json, would otherwise fill the gaps. Ids that the server returns are exact. Text
is encoded again after its prompt, and accepted only if nothing contradicts that these are the
generated ids:

    remote:other_prompt      the server read other tokens than it was sent
    remote:not_text          the text does not survive decoding and encoding
    remote:not_aligned       encoded with its prompt, it changes the prompt's ids
    remote:other_count       it has another number of tokens than the server counted
    remote:no_stop_token     stopped, but at which of several stop tokens is not known
    remote:past_stop         continued after a stop token
    remote:too_long          longer than max_new_tokens
    remote:other_vocabulary  a token id that the target does not have
    remote:empty             nothing was generated
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config import GeneratorSection
from pipeline.decoder.request import Request
from pipeline.synth.generate.backend import Reply
from pipeline.target.template import ChatTemplate

Body = TypeVar("Body", bound=BaseModel)


class Unreadable(Exception):
    """JSON that is not what the server's API promises."""


@dataclass(frozen=True)
class ServerReply:
    """What a server sent, before anything in it is believed."""

    text: str
    finish_reason: Literal["stop", "length"]
    token_ids: tuple[int, ...] | None = None  # generated ones, when the server gives them
    stop_id: int | None = None  # the token that ended the reply, when the server names it
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ServerApi(Protocol):
    """The API of one kind of server."""

    path: str  # behind an endpoint's base URL

    def can_send(self, request: Request) -> bool:
        """Whether the server would read exactly the request's prompt ids."""

    def payload(self, request: Request) -> dict[str, Any]:
        """The JSON body of a request."""

    def read(self, body: Any) -> ServerReply:
        """The JSON that came back. Raises Unreadable."""


def pick_api(section: GeneratorSection, template: ChatTemplate, *, model: str) -> ServerApi:
    """The API of the servers that the section names, which know the target as `model`."""
    if section.backend == "sglang":
        return SglangApi()
    as_text = template if section.prompt == "text" else None
    extended = section.backend == "vllm"
    return CompletionsApi(model, extended=extended, as_text=as_text)


class CompletionsApi:
    """OpenAI's completions API; `extended` by vLLM's fields. `as_text` sends prompts as text."""

    path = "/completions"

    def __init__(self, model: str, *, extended: bool, as_text: ChatTemplate | None) -> None:
        self._model, self._extended, self._as_text = model, extended, as_text

    def can_send(self, request: Request) -> bool:
        if self._as_text is None:
            return True
        text = self._as_text.text(request.prompt_ids, special=True)
        return tuple(self._as_text.encode(text)) == request.prompt_ids

    def payload(self, request: Request) -> dict[str, Any]:
        assert self._extended or not request.top_k, "the configuration refuses top_k here"
        prompt: str | list[int] = list(request.prompt_ids)
        if self._as_text is not None:
            prompt = self._as_text.text(request.prompt_ids, special=True)
        payload: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
        }
        if self._extended:
            payload |= _extensions(request)
            payload |= {"return_token_ids": True, "add_special_tokens": False}
        return payload

    def read(self, body: Any) -> ServerReply:
        completions = _parse(_Completions, body)
        if len(completions.choices) != 1:
            raise Unreadable(f"{len(completions.choices)} choices")
        choice, usage = completions.choices[0], completions.usage or _Usage()
        return ServerReply(
            text=choice.text,
            finish_reason=choice.finish_reason,
            token_ids=_ids(choice.token_ids),
            stop_id=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
            prompt_ids=_ids(choice.prompt_token_ids),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )


class SglangApi:
    """SGLang's own API."""

    path = "/generate"

    def can_send(self, request: Request) -> bool:
        return True

    def payload(self, request: Request) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            **_extensions(request),
        }
        if request.temperature > 0:  # old versions do not know it, and greedy decoding needs none
            sampling["sampling_seed"] = request.seed
        return {"input_ids": list(request.prompt_ids), "sampling_params": sampling, "stream": False}

    def read(self, body: Any) -> ServerReply:
        generated = _parse(_Generated, body)
        meta = generated.meta_info
        matched = meta.finish_reason.matched
        return ServerReply(
            text=generated.text,
            finish_reason=meta.finish_reason.type,
            token_ids=_ids(generated.output_ids),
            stop_id=matched if isinstance(matched, int) else None,
            prompt_tokens=meta.prompt_tokens,
            completion_tokens=meta.completion_tokens,
        )


def _extensions(request: Request) -> dict[str, Any]:
    """Parameters that vLLM and SGLang know beside OpenAI's."""
    return {
        "top_k": request.top_k or -1,  # -1 is "no limit" in every version of both
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(request.stop_ids),
        "skip_special_tokens": False,  # the text keeps them, for when ids are missing
    }


class _Sent(BaseModel):
    """Base of what servers send: no text is a number, and no number true."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)


class _Choice(_Sent):
    text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Usage(_Sent):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completions(_Sent):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Finish(_Sent):
    type: Literal["stop", "length"]
    matched: int | str | list[int] | None = None


class _Meta(_Sent):
    finish_reason: _Finish
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Generated(_Sent):
    text: str = ""
    output_ids: list[int] | None = None
    meta_info: _Meta


def _parse(model: type[Body], body: Any) -> Body:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise Unreadable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _ids(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


_REPLACEMENT = "\ufffd"  # stands for bytes that are no text: half a character, cut at the limit


class TokenIdReader:
    """Reads the replies that servers of one target send."""

    def __init__(self, template: ChatTemplate, *, vocabulary: int) -> None:
        self._template, self._vocabulary = template, vocabulary

    def reply(self, request: Request, sent: ServerReply) -> Reply:
        """The reply, or its rejection."""
        if not _read_our_prompt(request, sent):
            return Reply(request.request_id, rejected="remote:other_prompt")
        exact = sent.token_ids is not None
        ids = self._server_ids(request, sent) if exact else self._encoded(request, sent)
        if isinstance(ids, str):
            return Reply(request.request_id, rejected=f"remote:{ids}")
        problem = self._problem(request, ids)
        if problem:
            return Reply(request.request_id, rejected=f"remote:{problem}")
        stopped = ids[-1] in request.stop_ids
        return Reply(request.request_id, ids, "stop" if stopped else "length", exact=exact)

    def _server_ids(self, request: Request, sent: ServerReply) -> tuple[int, ...] | str:
        """The server's ids, with the token that ended the reply."""
        ids = sent.token_ids
        assert ids is not None
        # Servers differ in whether they list, and count, the token that ended the reply.
        if sent.completion_tokens not in (None, len(ids), len(ids) + 1):
            return "other_count"
        if sent.finish_reason == "length" or (ids and ids[-1] in request.stop_ids):
            return ids
        if sent.stop_id in request.stop_ids:  # it names the stop token, but leaves it out
            return (*ids, sent.stop_id)
        if sent.completion_tokens == len(ids) + 1 and len(request.stop_ids) == 1:
            return (*ids, *request.stop_ids)
        return "no_stop_token"

    def _encoded(self, request: Request, sent: ServerReply) -> tuple[int, ...] | str:
        """The text as ids, with the token that ended the reply."""
        prompt, template = request.prompt_ids, self._template
        if len(sent.text) > request.max_new_tokens * template.longest_token:
            return "too_long"
        text = template.text(prompt, special=True) + sent.text
        marked = template.marked_text(prompt)
        if marked is None or _REPLACEMENT in sent.text:
            return "not_text"
        whole = tuple(template.encode_marked(marked + sent.text))
        if template.text(whole, special=True) != text:
            return "not_text"
        if whole[: len(prompt)] != prompt:
            return "not_aligned"
        ids = whole[len(prompt) :]
        if sent.finish_reason == "stop" and not (ids and ids[-1] in request.stop_ids):
            stop = sent.stop_id if sent.stop_id in request.stop_ids else self._usual_stop(request)
            if stop is None:
                return "no_stop_token"
            ids = (*ids, stop)
        # Servers differ in whether they count the stop token.
        counts = {len(ids), len(ids) - 1} if sent.finish_reason == "stop" else {len(ids)}
        return ids if sent.completion_tokens in {None, *counts} else "other_count"

    def _usual_stop(self, request: Request) -> int | None:
        """The only stop token there is, or the one that the template writes behind a reply."""
        return request.stop_ids[0] if len(request.stop_ids) == 1 else self._template.end_of_turn

    def _problem(self, request: Request, ids: tuple[int, ...]) -> str | None:
        if not ids:
            return "empty"
        if len(ids) > request.max_new_tokens:
            return "too_long"
        if any(not 0 <= id < self._vocabulary for id in ids):
            return "other_vocabulary"
        return "past_stop" if any(id in request.stop_ids for id in ids[:-1]) else None


def _read_our_prompt(request: Request, sent: ServerReply) -> bool:
    if sent.prompt_ids is not None:
        return sent.prompt_ids == request.prompt_ids
    return sent.prompt_tokens in (None, len(request.prompt_ids))
