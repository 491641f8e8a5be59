"""The routes, and what is refused at the door."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pipeline import __version__
from pipeline.config import OWNER, ServeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.request import Request as EngineRequest
from pipeline.errors import TemplateError
from pipeline.server.metrics import ServerMetrics, missing
from pipeline.server.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse_body,
    stop_ids_of,
)
from pipeline.server.replies import JSON, Answer, Exchange, ReplyStyle, as_json, refusal
from pipeline.server.text import TextPieces
from pipeline.server.worker import EngineWorker, Job, wake
from pipeline.target.template import ChatTemplate

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request


class ServerApp:
    """OpenAI's API over one engine."""

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        section: ServeSection,
        *,
        model: str,
        key: str | None = None,
        drafting: Mapping[str, Any] | None = None,
    ) -> None:
        """`model` is what clients call it, `key` what they must send, and `drafting` what
        /v1/models says of it. Raises MissingPackage."""
        self._drafts = engine.drafter is not None
        self.metrics = ServerMetrics(model, drafts=self._drafts)
        self.worker = EngineWorker(engine, self.metrics, max_waiting=section.max_waiting)
        self.engine, self._template, self._section = engine, template, section
        self._model, self._key = model, key.encode() if key else None
        self._drafting = dict(drafting or {})

    def routes(self) -> Starlette:
        """The application. Raises MissingPackage."""
        try:
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError:
            raise missing("starlette") from None
        return Starlette(
            routes=[
                Route("/health", self._answering(self._health), methods=["GET"]),
                Route("/metrics", self._answering(self._show_metrics), methods=["GET"]),
                Route("/v1/models", self._answering(self._models), methods=["GET"]),
                Route("/v1/completions", self._answering(self._complete), methods=["POST"]),
                Route("/v1/chat/completions", self._answering(self._chat), methods=["POST"]),
            ],
            exception_handlers={404: self._no_such_page, 405: self._no_such_page},
        )

    def _answering(
        self, handler: Callable[[Request], Awaitable[Answer]]
    ) -> Callable[[Request], Awaitable[Answer]]:
        """A route with its key, its errors and its count."""

        async def answer(request: Request) -> Answer:
            try:
                if request.url.path.startswith("/v1"):
                    self._check_key(request)
                reply = await handler(request)
            except ApiError as error:
                reply = refusal(error)
            status = getattr(reply, "status_code", 200)
            self.metrics.count_answer(request.url.path, request.method, status)
            return reply

        return answer

    def _check_key(self, request: Request) -> None:
        """Raises ApiError (401). Takes the same time however much of the key is right."""
        sent = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._key is not None and not hmac.compare_digest(sent, self._key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _no_such_page(self, request: Request, error: Exception) -> Any:
        status = int(getattr(error, "status_code", 404))
        self.metrics.count_answer("other", request.method, status)
        what = f"{request.method} is nothing that can be asked here; docs/serving.md lists what is"
        return refusal(ApiError(status, what))

    async def _health(self, request: Request) -> Answer:
        self.worker.check()
        return as_json({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Answer:
        from starlette.responses import Response

        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(), headers={"content-type": kind})

    async def _models(self, request: Request) -> Answer:
        max_length = self.engine.model.max_length
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": OWNER}
        model |= {"version": __version__, "max_model_len": max_length, **self._drafting}
        return as_json({"object": "list", "data": [model]})

    async def _complete(self, request: Request) -> Answer:
        body = parse_body(CompletionBody, await self._read(request))
        prompts = await asyncio.to_thread(self._encode, body)
        return await self._generate(request, body, prompts, body.max_tokens)

    async def _chat(self, request: Request) -> Answer:
        body = parse_body(ChatBody, await self._read(request))
        prompt = await asyncio.to_thread(self._render, body)
        return await self._generate(request, body, [prompt], body.limit)

    async def _read(self, request: Request) -> bytes:
        """The body. Raises ApiError: 408, 413, 415, 503."""
        from starlette.requests import ClientDisconnect

        self.worker.check()
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise ApiError(415, f"the body must be sent as content-type {JSON}")
        most, body = self._section.max_body_bytes, bytearray()
        problem = f"the body is larger than {most} bytes"
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise ApiError(413, problem, code="body_too_large")
        try:
            async with asyncio.timeout(self._section.stall_seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise ApiError(413, problem, code="body_too_large")
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None
        except ClientDisconnect:
            raise ApiError(499, "the client has gone") from None
        return bytes(body)

    def _encode(self, body: CompletionBody) -> list[tuple[int, ...]]:
        special = body.add_special_tokens
        return [
            tuple(self._template.encode(prompt, add_special=special))
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompt
        ]

    def _render(self, body: ChatBody) -> tuple[int, ...]:
        template, kwargs = self._template, body.chat_template_kwargs
        try:
            if kwargs:
                template = template.varied(kwargs=kwargs, where="request")
            messages = [{"role": each.role, "content": each.text} for each in body.messages]
            return tuple(template.conversation(messages))
        except TemplateError as error:
            raise ApiError(400, error.problem, param="messages") from None

    async def _generate(
        self,
        request: Request,
        body: GenerationBody,
        prompts: Sequence[tuple[int, ...]],
        limit: int | None,
    ) -> Answer:
        if body.model is not None and body.model != self._model:
            problem = f"there is no such model here, only {self._model}"
            raise ApiError(404, problem, code="model_not_found", param="model")
        changed = asyncio.Event()
        arrived = wake(asyncio.get_running_loop(), changed)
        jobs = [
            Job(each, self._pieces(body), arrived)
            for each in self._engine_requests(body, prompts, limit)
        ]
        style = ReplyStyle(
            chat=isinstance(body, ChatBody),
            model=self._model,
            drafts=self._drafts,
            with_ids=body.return_token_ids,
            with_usage=body.stream_options.include_usage,
        )
        self.worker.submit(jobs)
        exchange = Exchange(self.worker, jobs, changed, style, self._section.stall_seconds)
        if body.stream:
            return exchange.stream
        return await exchange.whole(request)

    def _engine_requests(
        self, body: GenerationBody, prompts: Iterable[tuple[int, ...]], limit: int | None
    ) -> list[EngineRequest]:
        """The engine's requests. Raises ApiError (400) for one that it could never run."""
        max_length, vocabulary = self.engine.model.max_length, self.engine.model.vocabulary
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        requests = []
        for ids in prompts:
            new = max(max_length - len(ids), 1) if limit is None else limit
            if len(ids) + new > max_length:
                problem = (
                    f"this model's context holds {max_length} tokens; the prompt has {len(ids)} "
                    f"and {new} were asked for"
                )
                raise ApiError(400, problem, code="context_length_exceeded", param="prompt")
            request = EngineRequest(
                uuid4().hex,
                ids,
                new,
                stop_ids_of(body, self._template.stop_ids),
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=min(max(body.top_k, 0), vocabulary),
                seed=seed,
            )
            if (wrong := self.engine.problem(request)) is not None:
                raise ApiError(400, wrong.what)
            requests.append(request)
        return requests

    def _pieces(self, body: GenerationBody) -> TextPieces:
        special, template = not body.skip_special_tokens, self._template
        text = partial(template.text, special=special)
        return TextPieces(text, body.stop, template.is_byte)
