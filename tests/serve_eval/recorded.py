"""Servers that answer as SGLang and vLLM do, with what the decoder's rounds did for each prompt.

Shapes of answers, from the servers' sources:

    SGLang  python/sglang/srt/entrypoints/http_server.py (/generate, /server_info, /model_info) and
            managers/tokenizer_manager.py (meta_info); an event has all text and output_ids so far
    vLLM    vllm/entrypoints/openai (events of /v1/completions, usage in one of its own) and
            vllm/v1/spec_decode/metrics.py (counters, one for each position and engine)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.config import TreeSection
from pipeline.reports import GoldenFigure, GoldenPrompt, RoundCounters

MODEL = "org/target"


@dataclass
class Faults:
    """What is wrong with a server; by default nothing."""

    busy: int = 0  # so many requests get 429 first
    broken: frozenset[str] = frozenset()  # prompts whose stream ends with an error
    cut: frozenset[str] = frozenset()  # prompts whose stream ends without its end
    no_head: bool = False  # drafts and accepts nothing
    one_more_round: frozenset[str] = (
        frozenset()
    )  # prompts whose reply takes one, with no draft kept
    max_model_len: int = 4096  # that vLLM reports
    by_request: bool = False  # vLLM reports each request's rounds in its reply
    limit: int = 4096  # tokens of a vLLM's reply
    parts_at: int = 4096  # the token from which on a reply is another
    plain: bool = False  # knows nothing of speculation
    other_tokens: bool = False  # decodes something else
    noise: float | None = 0.0  # nats, on the leads of a reply that it scores; None: it scores none
    more_prompt_tokens: int = 0  # of its chat template
    others: int = 0  # tokens that it generates for others meanwhile
    old_names: bool = False
    no_histogram: bool = False
    ids: bool = True


@dataclass
class RecordedServer:
    """What both kinds share."""

    golden: GoldenFigure
    faults: Faults = field(default_factory=Faults)
    asked: list[dict[str, Any]] = field(default_factory=list)
    server: Any = None  # uvicorn's, for one that dies
    die_after: int | None = None

    def reply(self, ids: list[int]) -> tuple[GoldenPrompt, list[int], RoundCounters]:
        each = next(each for each in self.golden.prompts if list(each.prompt_ids) == ids)
        reply, counters = list(each.reply_ids), self.counters_of(each)
        if self.faults.other_tokens:
            reply = [reply[0], *(token ^ 1 for token in reply[1:])]
        if each.id in self.faults.one_more_round:
            counters = _with_one_more(counters)
        if self.faults.no_head:
            rounds, depth = len(reply) - 1, len(counters.proposed)
            counters = RoundCounters(
                rounds=rounds,
                tokens=rounds,
                drafted=rounds * (counters.drafted // counters.rounds),
                accepted_lengths=(rounds,),
                proposed=(rounds,) * depth,
            )
        return each, reply, counters

    def scored(self, ids: list[int]) -> list[dict[int, float]]:
        """Log-probabilities of a golden reply's tokens but the last, each with the likeliest other
        one's; the report has by how much they differ."""
        (each,) = (
            each for each in self.golden.prompts if [*each.prompt_ids, *each.reply_ids[:-1]] == ids
        )
        assert self.faults.noise is not None
        signs = 1, -1, -1, 1
        return [
            {token: -0.5, token ^ 1: -0.5 - gap - signs[place % 4] * self.faults.noise}
            for place, (token, gap) in enumerate(
                zip(each.reply_ids[:-1], each.runner_up_gaps, strict=False)
            )
        ]

    def counters_of(self, prompt: GoldenPrompt) -> RoundCounters:
        """With the shape that it drafts."""
        return prompt.counters

    def until(
        self, prompt: GoldenPrompt, reply: list[int], counters: RoundCounters, limit: int
    ) -> tuple[list[int], RoundCounters]:
        """Of a reply that a limit may end, and that may part."""
        if limit < len(reply):
            reply, counters = reply[:limit], self._counters_until(prompt, limit)
        at = self.faults.parts_at
        return [*reply[:at], *(token ^ 1 for token in reply[at:])], counters

    def _counters_until(self, prompt: GoldenPrompt, tokens: int) -> RoundCounters:
        accepted_at = prompt.accepted_at[self.shape.label]
        taken, position = list[int](), 0
        while position < tokens - 1:
            taken.append(accepted_at[position])
            position += taken[-1] + 1
        counters = RoundCounters(
            rounds=len(taken),
            tokens=tokens - 1,
            drafted=(self.shape.nodes - 1) * len(taken),
            accepted_lengths=tuple(taken.count(each) for each in range(max(taken, default=0) + 1)),
            proposed=(len(taken),) * self.shape.steps,
        )
        return _with_one_more(counters) if prompt.id in self.faults.one_more_round else counters

    @property
    def shape(self) -> TreeSection:
        """That it drafts: the report's tree."""
        return self.golden.tree

    async def refusal(self) -> Response | None:
        if self.faults.busy:
            self.faults.busy -= 1
            busy = {"error": {"message": "too many requests", "code": 429}}
            return JSONResponse(busy, 429, headers={"Retry-After": "0"})
        if self.die_after is not None and len(self.asked) > self.die_after:
            self.server.force_exit = self.server.should_exit = True
            await asyncio.Event().wait()  # it looks every tenth of a second; nothing is said until
        return None

    async def chat(self, request: Request) -> Response:
        """The template is the golden prompts' own: an answer counts tokens of the prompt whose text
        it is, which the test gives in the order of asking."""
        body = await request.json()
        tokens = self.template[body["messages"][-1]["content"]] + self.faults.more_prompt_tokens
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}}
        return JSONResponse({"object": "chat.completion", "choices": [choice], "usage": usage})

    template: dict[str, int] = field(default_factory=dict)  # text → tokens


def _with_one_more(counters: RoundCounters) -> RoundCounters:
    """A round that accepts nothing."""
    none, *more = counters.accepted_lengths
    return counters.model_copy(
        update={
            "rounds": counters.rounds + 1,
            "drafted": counters.drafted + len(counters.proposed),
            "accepted_lengths": (none + 1, *more),
            "proposed": tuple(count + 1 for count in counters.proposed),
        }
    )


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _pieces(reply: list[int], counters: RoundCounters) -> list[list[int]]:
    """Prefill's token, then as many at a time as rounds make on average."""
    step = max(1, round(counters.acceptance_length))
    return [reply[:1], *(reply[at : at + step] for at in range(1, len(reply), step))]


class RecordedSglang(RecordedServer):
    """`python -m sglang.launch_server --speculative-algorithm EAGLE3 …`."""

    def app(self) -> Starlette:
        info = "/get_server_info" if self.faults.old_names else "/server_info"
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route(info, self.info),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "sglang", "root": MODEL}
        return JSONResponse({"object": "list", "data": [card]})

    async def info(self, request: Request) -> Response:
        tree = self.golden.tree
        speculative = {
            "speculative_algorithm": None if self.faults.plain else "EAGLE3",
            "speculative_draft_model_path": "/heads/one",
            "speculative_num_steps": tree.steps,
            "speculative_eagle_topk": tree.top_k,
            "speculative_num_draft_tokens": tree.nodes,
        }
        states = [{"last_gen_throughput": 100.0, "avg_spec_accept_length": 1.5}]
        secret = {"api_key": "sk-secret", "model_path": MODEL, "tp_size": 1, "version": "0.5.6"}
        return JSONResponse(speculative | secret | {"internal_states": states})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if (refusal := await self.refusal()) is not None:
            return refusal
        self.asked.append(body)
        assert body["sampling_params"]["temperature"] == 0
        if body.get("return_logprob"):
            return self._score(body)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        golden, reply, counters = self.reply(body["input_ids"])
        limit = body["sampling_params"]["max_new_tokens"]
        reply, counters = self.until(golden, reply, counters, limit)
        made = 0
        for piece in _pieces(reply, counters):
            made += len(piece)
            meta: dict[str, Any] = {
                "id": "a",
                "prompt_tokens": len(golden.prompt_ids),
                "completion_tokens": made,
                "cached_tokens": 0,
                "finish_reason": None,
            }
            if made == len(reply):
                meta["finish_reason"] = {"type": "length", "length": made}
                meta |= {} if self.faults.plain else self._meta_info(made, counters)
            elif made > 1 and golden.id in self.faults.broken:
                yield _sse({"error": {"message": "out of memory", "type": "x", "code": 500}})
                yield b"data: [DONE]\n\n"
                return
            elif made > 1 and golden.id in self.faults.cut:
                return
            ids = {"output_ids": reply[:made]} if self.faults.ids else {}
            yield _sse({"text": "x" * made, **ids, "meta_info": meta})
            await asyncio.sleep(0.002)
        yield b"data: [DONE]\n\n"

    def _score(self, body: dict[str, Any]) -> Response:
        """Of the tokens from `logprob_start_len` on, the first of them with nothing before it."""
        if self.faults.noise is None:
            return JSONResponse({"error": {"message": "no logprobs"}}, 400)
        rows = self.scored(body["input_ids"])
        first, *left = body["input_ids"][body["logprob_start_len"] :]
        own = [
            [None, first, None],
            *([row[token], token, None] for row, token in zip(rows, left, strict=True)),
        ]
        top = [[[nats, token, None] for token, nats in row.items()] for row in rows]
        meta = {"input_token_logprobs": own, "input_top_logprobs": [None, *top]}
        return JSONResponse({"text": "x", "output_ids": [1], "meta_info": meta})

    def _meta_info(self, made: int, counters: RoundCounters) -> dict[str, Any]:
        old, kept = self.faults.old_names, counters.accepted_tokens
        # A list as long as the longest that any round accepted, without its end of zeros.
        lengths = {} if self.faults.no_histogram else list(counters.accepted_lengths)
        histogram = "spec_accept_histogram" if old else "spec_correct_drafts_histogram"
        return {
            "spec_verify_ct": counters.rounds,
            "spec_accept_length": made / counters.rounds,
            "spec_accept_rate": kept / counters.drafted,
            ("spec_accept_token_num" if old else "spec_num_correct_drafts"): kept,
            ("spec_draft_token_num" if old else "spec_num_proposed_drafts"): counters.drafted,
            **({histogram: lengths} if lengths else {}),
        }


@dataclass
class RecordedVllm(RecordedServer):
    """`vllm serve … --speculative-config '{"method": "eagle3", …}'`."""

    drafts: int = 3
    done: list[tuple[int, RoundCounters]] = field(default_factory=list)
    counting: list[asyncio.Task[None]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    @property
    def shape(self) -> TreeSection:
        """A chain, which is all that it drafts."""
        return TreeSection.chain(self.drafts)

    def counters_of(self, prompt: GoldenPrompt) -> RoundCounters:
        """With it."""
        return prompt.shapes[self.shape.label]

    async def models(self, request: Request) -> Response:
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL}
        data = [
            card | {"parent": None, "max_model_len": self.faults.max_model_len, "permission": []}
        ]
        return JSONResponse({"object": "list", "data": data})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.11.0"})

    async def metrics(self, request: Request) -> Response:
        total = RoundCounters.total([each for _, each in self.done])
        labels = f'engine="0",model_name="{MODEL}"'
        generated = 1000.0 + sum(tokens for tokens, _ in self.done)
        lines = [
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{{{labels}}} {generated}",
            f"vllm:generation_tokens_created{{{labels}}} 1.7e+09",
            'vllm:generation_tokens_total{engine="0",model_name="other"} 7.0',
        ]
        if not self.faults.plain:
            name, (drafts, *_) = "vllm:spec_decode_num", (*total.proposed, 0)
            lines += [
                f"{name}_drafts_total{{{labels}}} {500.0 + drafts}",
                f"{name}_draft_tokens_total{{{labels}}} {1500.0 + total.drafted}",
                f"{name}_accepted_tokens_total{{{labels}}} {9.0 + total.accepted_tokens}",
            ]
            for place in range(self.drafts):
                kept = (*total.accepted, *[0] * 9)[place] + (9.0 if place == 0 else 0.0)
                where = f'engine="0",model_name="{MODEL}",position="{place}"'
                lines.append(f"{name}_accepted_tokens_per_pos_total{{{where}}} {kept}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if (refusal := await self.refusal()) is not None:
            return refusal
        self.asked.append(body)
        assert body["temperature"] == 0
        if "prompt_logprobs" in body:
            return self._score(body)
        assert body["stream_options"] == {"include_usage": True}
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        golden, reply, counters = self.reply(body["prompt"])
        limit = min(self.faults.limit, body["max_tokens"])
        reply, counters = self.until(golden, reply, counters, limit)
        head = {"id": "cmpl-a", "object": "text_completion", "created": 1, "model": MODEL}
        made = 0
        for piece in _pieces(reply, counters):
            made += len(piece)
            ended = "length" if made == len(reply) else None
            choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": ended}
            choice |= {"token_ids": piece} if self.faults.ids else {}
            yield _sse(head | {"choices": [choice], "usage": None})
            if made > 1 and golden.id in self.faults.broken:
                yield _sse({"error": {"message": "EngineCore died", "type": "x", "code": 500}})
                yield b"data: [DONE]\n\n"
                return
            await asyncio.sleep(0.002)
        asked = len(golden.prompt_ids)
        usage = {"prompt_tokens": asked, "total_tokens": asked + made, "completion_tokens": made}
        self.counting.append(asyncio.create_task(self._count(made, counters)))
        reported = {"metrics": {"speculative_decoding": self._speculative_decoding(counters)}}
        reported = reported if self.faults.by_request else {}
        yield _sse(head | {"choices": [], "usage": usage} | reported)
        yield b"data: [DONE]\n\n"

    def _score(self, body: dict[str, Any]) -> Response:
        """Of all tokens, of the first there is nothing to say."""
        if self.faults.noise is None:
            return JSONResponse({"error": {"message": "no logprobs"}}, 400)
        rows = [
            {str(token): {"logprob": nats, "rank": 1} for token, nats in row.items()}
            for row in self.scored(body["prompt"])
        ]
        others = len(body["prompt"]) - len(rows) - 1
        before = [None, *[{"7": {"logprob": -3.0, "rank": 9}}] * others]
        choice = {"index": 0, "text": "x", "logprobs": None, "prompt_logprobs": [*before, *rows]}
        return JSONResponse({"object": "text_completion", "choices": [choice]})

    def _speculative_decoding(self, counters: RoundCounters) -> dict[str, Any]:
        return {
            "acceptance_histogram": list(counters.accepted_lengths),
            "num_spec_steps": counters.rounds,
            "num_accepted_draft_tokens": counters.accepted_tokens,
            "num_draft_tokens": counters.drafted,
            "num_spec_tokens": self.drafts,
        }

    async def _count(self, made: int, counters: RoundCounters) -> None:
        await asyncio.sleep(0.03)  # its counters follow the tokens
        self.done.append((made + self.faults.others, counters))
