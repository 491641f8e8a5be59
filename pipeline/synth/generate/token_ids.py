"""From what a server sent to the token ids that it generated, or a reason why they are not known.

ids      given by the server: the reply is exact
text     encoded again after its prompt, as a server reads both: accepted only if nothing
         contradicts that these are the generated ids

remote:other_prompt     the server read other tokens than it was sent
remote:not_text         the text does not survive decoding and encoding
remote:not_aligned      encoded with its prompt, it changes the prompt's ids
remote:other_count      it has another number of tokens than the server counted
remote:no_stop_token    ended by itself, but by which of several tokens is not known
remote:past_stop        went on behind a stop token
remote:too_long         longer than asked for
remote:other_vocabulary a token id that the target does not have
remote:empty            nothing was generated
"""

from __future__ import annotations

from pipeline.decoder.request import Request
from pipeline.synth.generate.backend import Reply
from pipeline.synth.generate.servers import ServerReply
from pipeline.target.template import ChatTemplate

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
        ids = self._given(request, sent) if exact else self._encoded(request, sent)
        if isinstance(ids, str):
            return Reply(request.request_id, rejected=f"remote:{ids}")
        problem = self._problem(request, ids)
        if problem:
            return Reply(request.request_id, rejected=f"remote:{problem}")
        stopped = ids[-1] in request.stop_ids
        return Reply(request.request_id, ids, "stop" if stopped else "length", exact=exact)

    def _given(self, request: Request, sent: ServerReply) -> tuple[int, ...] | str:
        """The server's ids, with the token that ended the reply."""
        ids = sent.token_ids
        assert ids is not None
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
        text = template.text(prompt, special=True) + sent.text
        whole = tuple(template.encode(text))
        if _REPLACEMENT in sent.text or template.text(whole, special=True) != text:
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
