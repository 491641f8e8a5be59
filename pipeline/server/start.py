"""`eagle3 serve`: load what `eval` would measure, listen, and end when told to.

SIGTERM ─▶ new requests get 503 ─▶ running ones end, or grace_seconds are over ─▶ exit code 0
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from signal import SIGINT, SIGTERM
from types import FrameType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pipeline import __version__
from pipeline.config import OWNER, BatchTrees, RunConfig, ServeSection, prepare_process, tree_labels
from pipeline.config.credentials import is_this_machine
from pipeline.console import long_step, notice
from pipeline.decoder.engine import Engine
from pipeline.decoder.leading import FollowingEngine, LeadingEngine, engine_among
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.decoder.request import Request as EngineRequest
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError, TargetError
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import WEIGHTS
from pipeline.heads.registry import open_head
from pipeline.reports import REPORT
from pipeline.server.connections import timed_connection
from pipeline.server.metrics import ServerMetrics, missing
from pipeline.server.protocol import (
    CROWDED,
    ApiError,
    ChatBody,
    CompletionBody,
    GenerationBody,
    check_framing,
    check_hosts,
    openapi_document,
    parse_body,
    stop_ids_of,
)
from pipeline.server.replies import JSON, Answer, Exchange, ReplyStyle, as_json, refusal
from pipeline.server.text import TextPieces
from pipeline.server.worker import EngineWorker, Job, wake
from pipeline.store.manifest import (
    find_manifest,
    head_location,
    read_report,
    stage_location,
    vouched_head,
)
from pipeline.target.open import Target, open_target
from pipeline.target.parallel import Group, joined, require_several
from pipeline.target.template import ChatTemplate

if TYPE_CHECKING:
    import socket

    import uvicorn
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

#: A page.
Handler = Callable[["Request"], Awaitable[Answer]]

#: Once the replies are made: how long slow readers may take to fetch what is left of them.
_FETCH_SECONDS = 5
#: Bytes of a body in a second, after its first `idle_seconds`.
_SLOWEST = 10_000
#: It is answered however many connections there are.
_HEALTH = "/health"


def serve(config: RunConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, MissingPackage, TargetError, HeadError."""
    section, key = config.serve, check_address(config.serve)
    with joined(section.parallel, config.target, stage="serve") as group:
        if group.rank > 0:
            _follow(config, group)
            return
        with _listen(section) as listening:
            prepare_process(config.run)
            app = make_app(config, key, group)
            server = make_server(app, section)
            host, port = listening.getsockname()[:2]
            notice("serve", f"listening at http://{host}:{port}/v1", port=port)
            run_server(server, app, [listening], section.grace_seconds)
            if isinstance(app.engine, LeadingEngine):
                app.engine.close()
    notice("serve", "ended")


def _follow(config: RunConfig, group: Group) -> None:
    """What all processes of a group do but rank 0: decode what it decodes."""
    prepare_process(config.run)
    expected, (trees, settings) = group.broadcast(None), _trees(config)
    target = open_target(config.target, expected=expected, where="rank 0", decoded=True)
    engine = _engine(config, target, _head(config, target), trees, settings, group)
    assert isinstance(engine, FollowingEngine)
    with _handling_signals(lambda number, frame: None):  # rank 0 says when it is over
        engine.follow()


def check_address(section: ServeSection) -> str | None:
    """The key that clients must send. Raises ConfigError for a port that is open to everybody."""
    key = os.environ.get(section.api_key_env) if section.api_key_env else None
    if section.api_key_env and not key:
        raise ConfigError(
            f"the environment variable {section.api_key_env} is not set",
            where="serve.api_key_env",
            fix="set it to the key that clients must send",
        )
    if key is None and not section.allow_anonymous and not is_this_machine(section.host):
        raise ConfigError(
            f"{section.host} can be reached from other machines, and no key is asked for",
            where="serve.host",
            fix="set serve.api_key_env, or serve.allow_anonymous=true where everybody may use it",
        )
    return key


def make_app(config: RunConfig, key: str | None, group: Group | None = None) -> ServerApp:
    """Target, drafter and tree of `eval`, and the routes over them."""
    group, section, (trees, settings) = group or Group(), config.serve, _trees(config)
    target = open_target(config.target, decoded=True)
    group.broadcast(target.contract)
    engine = _engine(config, target, _head(config, target), trees, settings, group)
    template = target.template(system_prompt=config.eval.system_prompt)
    if config.eval.chat_template_kwargs:
        template = template.varied(kwargs=config.eval.chat_template_kwargs, where="eval")
    name = section.model or config.target.source
    drafting = _drafting_metadata(config, target, trees) if trees else {}
    return ServerApp(engine, template, section, model=name, key=key, drafting=drafting)


def _engine(
    config: RunConfig,
    target: Target,
    head: DraftingHead | None,
    trees: BatchTrees,
    settings: Mapping[str, int],
    group: Group,
) -> Engine:
    """This process's. Raises ConfigError."""
    section = config.serve
    require_several(group, section.parallel, stage="serve")
    positions = head.shape.max_position_embeddings if head else target.positions
    max_length = min(positions, target.positions or positions)
    if section.max_length is not None and section.max_length > max_length:
        problem = f"target and head were made for {max_length} tokens"
        fix = "lower it, or leave it out"
        raise ConfigError(problem, where="serve.max_length", fix=fix)
    with long_step("serve", "loading the target"), group.all_or_raise():
        model = DecoderModel.load(
            target.directory,
            target.contract.capture_layers,
            device=target.device,
            dtype=target.dtype,
            max_length=section.max_length or max_length,
            group=TensorGroup.of(group),
        )
        factory = load_drafter(config.eval.drafter, model, target, head) if trees else None
        drafter = factory.variant(settings)(trees) if factory else None
    return engine_among(group, model, drafter=drafter, slots=section.slots)


def _drafting_metadata(config: RunConfig, target: Target, trees: BatchTrees) -> dict[str, Any]:
    """Drafter and batch 1's tree under SGLang's names, where other batches have others those too;
    and the run's golden τ, where it is of this head with this tree."""
    tree = trees[1]
    assert tree is not None, "a batch of one is drafted for, or none is"
    metadata: dict[str, Any] = {
        "speculative_algorithm": config.eval.drafter.name,
        "speculative_num_steps": tree.steps,
        "speculative_eagle_topk": tree.top_k,
        "speculative_num_draft_tokens": tree.nodes,
    }
    if len(trees) > 1:
        metadata["speculative_trees"] = tree_labels(trees)
    if find_manifest(config.run.uri, "eval") is None:
        return metadata
    golden = read_report(config.run.uri).golden
    head = (
        head_location(config.run.uri, config.eval.head).sha256(WEIGHTS)
        if config.eval.drafter.needs_head
        else ""
    )
    contract = target.contract
    if (
        golden is None
        or config.eval.drafter.lookup is not None  # golden rounds are without one
        or golden.target_fingerprint not in (contract.fingerprint, contract.sampled_fingerprint)
        or (head, config.eval.drafter.name) != (golden.head_fingerprint, golden.drafter)
        or golden.tree != tree
    ):
        return metadata
    fields = golden.model_dump(exclude={"prompts", "stop_ids"})
    return metadata | {"golden": fields | {"prompts": len(golden.prompts)}}


def _trees(config: RunConfig) -> tuple[BatchTrees, Mapping[str, int]]:
    """Trees by batch size, and what was chosen with them: for `tree: auto` those of the run's
    report.

    None for `serve.plain`, and where eval saw that plain decoding is faster.
    """
    section = config.eval
    if config.serve.plain:
        return {}, {}
    if section.tree != "auto":
        return {1: section.tree}, {}
    location = stage_location(config.run.uri, "eval")
    where, fix = location.where(REPORT), "run `eagle3 eval` with tree: auto first, or name a tree"
    if find_manifest(config.run.uri, "eval") is None:
        problem = "tree: auto is what eval has picked, and it has not finished in this run"
        raise ConfigError(problem, where="eval.tree", fix=fix)
    report = read_report(config.run.uri)
    choice = report.settings.tree_auto
    drafter = section.drafter.name, section.drafter.lookup is None
    if choice is None or drafter != (report.drafter.name, report.drafter.lookup is None):
        beside = "a" if report.drafter.lookup is not None else "no"
        problem = f"this report is of drafter {report.drafter.name} with {beside} lookup, "
        problem += "or of a tree that was named"
        raise ConfigError(problem, where=where, fix=fix)
    if report.decoding == "plain":
        notice("serve", f"tree: auto, as in {where}: plain decoding")
        return {}, choice.settings
    trees = {int(rows): tree for rows, tree in choice.by_batch.items()}
    trees[1] = report.settings.tree
    for rows, label in tree_labels(trees).items():
        notice("serve", f"tree: auto, as in {where}: from batch {rows} {label}")
    return trees, choice.settings


def make_server(app: ServerApp, section: ServeSection) -> uvicorn.Server:
    """Raises MissingPackage."""
    try:
        import uvicorn

        connection = timed_connection()
    except ImportError:
        raise missing("uvicorn") from None
    settings = uvicorn.Config(
        app.routes(),
        log_config=None,
        access_log=False,  # no address and no prompt is written anywhere
        lifespan="off",
        http=connection,
        loop="asyncio",
        ws="none",
        server_header=False,
        proxy_headers=False,  # nobody's address is used
        limit_concurrency=section.max_connections,
        timeout_keep_alive=section.idle_seconds,
        timeout_graceful_shutdown=_FETCH_SECONDS,
    )
    return uvicorn.Server(settings)


def run_server(
    server: uvicorn.Server, app: ServerApp, listening: Sequence[socket.socket], grace: float
) -> None:
    """Serve until a signal, or until `server.should_exit` is set; then all requests have ended.

    Rounds run on the thread that calls, which should be the one that has loaded the model, and
    connections on one of their own: OpenMP gives each thread that computes a team, and where teams
    have more threads than there are cores, none waits awake for its next piece of work.
    """
    first_signal, second_signal = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        draining = asyncio.create_task(_drain(server, app, first_signal, second_signal, grace))
        try:
            await server.serve(sockets=list(listening))
        finally:
            draining.cancel()
            with suppress(asyncio.CancelledError):
                await draining
            app.worker.stop()

    with asyncio.Runner() as runner, ThreadPoolExecutor(1, "connections") as pool:
        loop = runner.get_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            signalled = second_signal if app.worker.closing else first_signal
            app.worker.close()
            loop.call_soon_threadsafe(signalled.set)

        with _handling_signals(on_signal):
            connections = pool.submit(runner.run, run())
            app.worker.run()
            connections.result()


@contextmanager
def _handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGTERM and SIGINT; Python lets none but the main thread take them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (SIGTERM, SIGINT)}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


async def _drain(
    server: uvicorn.Server,
    app: ServerApp,
    first_signal: asyncio.Event,
    second_signal: asyncio.Event,
    grace: float,
) -> None:
    """After a first signal, let the requests that are here end, within limits or until a second
    one, and then the server."""
    await first_signal.wait()
    notice("serve", f"ending: {app.worker.open_jobs} requests go on for at most {grace:g} seconds")
    with suppress(TimeoutError):
        async with asyncio.timeout(grace):
            while app.worker.open_jobs and not second_signal.is_set():
                await asyncio.sleep(0.02)
    await asyncio.to_thread(app.worker.stop)  # what is left ends with an error
    server.should_exit = True


def _listen(section: ServeSection) -> socket.socket:
    """A socket that is bound: a port in use is said before a model is loaded. It listens later."""
    import socket

    listening = socket.socket(socket.AF_INET6 if ":" in section.host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel, too, gives up on who reads nothing
        stalled_ms = int(1000 * section.stall_seconds)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stalled_ms)
    try:
        listening.bind((section.host, section.port))
        return listening
    except OSError as error:
        listening.close()
        problem = f"cannot listen at {section.host}:{section.port}: {error}"
        fix = "choose another serve.port or serve.host"
        raise ConfigError(problem, where="serve.port", fix=fix) from None


def _head(config: RunConfig, target: Target) -> DraftingHead | None:
    """`eval.head`, or the run's own; None for a drafter without, and for plain decoding."""
    if config.serve.plain or not config.eval.drafter.needs_head:
        return None
    return open_head(vouched_head(config.run.uri, config.eval.head), expected=target.contract)[0]


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

    def routes(self) -> Answer:
        """The application. Raises MissingPackage."""
        try:
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError:
            raise missing("starlette") from None

        def route(path: str, handler: Handler, method: str = "GET") -> Route:
            return Route(path, self._answering(path, handler), methods=[method])

        pages = Starlette(
            routes=[
                route(_HEALTH, self._health),
                route("/metrics", self._show_metrics),
                route("/openapi.json", self._describe),
                route("/v1/models", self._models),
                route("/v1/models/{model:path}", self._one_model),
                route("/v1/completions", self._complete, "POST"),
                route("/v1/chat/completions", self._chat, "POST"),
            ],
            exception_handlers={404: self._no_such_page, 405: self._no_such_page},
        )
        pages.router.redirect_slashes = False  # the address would be built from the header Host

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                self._admit(scope)
            except ApiError as error:
                self.metrics.count_answer("other", scope["method"], error.status)
                await refusal(error)(scope, receive, send)
            else:
                await pages(scope, receive, send)

        return answer

    def _admit(self, scope: Scope) -> None:
        """Raises ApiError for what no page is to see: 400, 403, 503."""
        check_framing(scope["headers"])
        if self._key is None:
            local = str((scope.get("server") or [""])[0])
            check_hosts(scope["headers"], {local, self._section.host, *self._section.allowed_hosts})
        if scope.get("state", {}).get(CROWDED) and scope["path"] != _HEALTH:
            problem = "too many connections; try again later"
            raise ApiError(
                503, problem, kind="server_error", code="too_many_connections", retry_after=1
            )

    def _answering(self, path: str, handler: Handler) -> Handler:
        """A route with its key, its errors and its count. What it is does not depend on an address,
        which a client writes."""

        async def answer(request: Request) -> Answer:
            try:
                if path.startswith("/v1"):
                    self._check_key(request)
                reply = await handler(request)
            except ApiError as error:
                reply = refusal(error)
            status = getattr(reply, "status_code", 200)
            self.metrics.count_answer(path, request.method, status)
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

    async def _describe(self, request: Request) -> Answer:
        return as_json(openapi_document(__version__))

    async def _models(self, request: Request) -> Answer:
        return as_json({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Answer:
        self._check_model(request.path_params["model"])
        return as_json(self._card())

    def _card(self) -> dict[str, Any]:
        max_length = self.engine.model.max_length
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": OWNER}
        model |= {"version": __version__, "max_model_len": max_length, **self._drafting}
        return model

    def _check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for another model's name."""
        if name is not None and name != self._model:
            problem = f"there is no such model here, only {self._model}"
            raise ApiError(404, problem, code="model_not_found", param="model")

    async def _complete(self, request: Request) -> Answer:
        body = await asyncio.to_thread(parse_body, CompletionBody, await self._read(request))
        self.worker.check(len(body.prompt))
        prompts = await asyncio.to_thread(self._encode, body)
        return await self._generate(request, body, prompts, body.max_tokens)

    async def _chat(self, request: Request) -> Answer:
        body = await asyncio.to_thread(parse_body, ChatBody, await self._read(request))
        self.worker.check(1)
        prompt = await asyncio.to_thread(self._render, body)
        return await self._generate(request, body, [prompt], body.limit)

    async def _read(self, request: Request) -> bytes:
        """The body. Raises ApiError: 408, 413, 415, 503."""
        from starlette.requests import ClientDisconnect

        self.worker.check()
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise ApiError(415, f"the body must be sent as content-type {JSON}")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError(415, "the body must be sent without content-encoding")
        most, body = self._section.max_body_bytes, bytearray()
        problem = f"the body is larger than {most} bytes"
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise ApiError(413, problem, code="body_too_large")
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(start + self._body_seconds(0)) as limit:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise ApiError(413, problem, code="body_too_large")
                    limit.reschedule(start + self._body_seconds(len(body)))
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None
        except ClientDisconnect:
            raise ApiError(499, "the client has gone") from None
        return bytes(body)

    def _body_seconds(self, received: int) -> float:
        """How long a body may take of which so many bytes are here."""
        slowest = self._section.idle_seconds + received / _SLOWEST
        return min(slowest, self._section.stall_seconds)

    def _encode(self, body: CompletionBody) -> list[tuple[int, ...]]:
        """Raises ApiError for a text that no prompt can be, before it is tokenised."""
        special, prompts = body.add_special_tokens, []
        for prompt in body.prompt:
            ids = prompt
            if isinstance(prompt, str):
                self._check_length(len(prompt), "prompt")
                ids = tuple(self._template.encode(prompt, add_special=special))
            self._check_context(len(ids), 1)
            prompts.append(ids)
        return prompts

    def _render(self, body: ChatBody) -> tuple[int, ...]:
        """Raises ApiError for texts that no prompt can be, before they are rendered."""
        template, kwargs = self._template, body.chat_template_kwargs
        # No template writes less than a token for a message.
        self._check_context(len(body.messages), 1, "messages")
        self._check_length(body.characters, "messages")
        try:
            if kwargs:
                template = template.varied(kwargs=kwargs, where="request")
            messages = [{"role": each.role, "content": each.text} for each in body.messages]
            return tuple(template.conversation(messages))
        except TargetError as error:  # of texts that it cannot render, or not in its time
            raise ApiError(400, error.problem, param="messages") from None

    async def _generate(
        self,
        request: Request,
        body: GenerationBody,
        prompts: Sequence[tuple[int, ...]],
        limit: int | None,
    ) -> Answer:
        self._check_model(body.model)
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
        # The engine's are not negative, OpenAI's any of 64 bits.
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed % 2**63
        requests = []
        stop_ids = stop_ids_of(body, self._template.stop_ids, vocabulary)
        for ids in prompts:
            new = max(max_length - len(ids), 1) if limit is None else limit
            self._check_context(len(ids), new)
            request = EngineRequest(
                uuid4().hex,
                ids,
                new,
                stop_ids,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=min(max(body.top_k, 0), vocabulary),
                seed=seed,
            )
            if (wrong := self.engine.problem(request)) is not None:
                raise ApiError(400, wrong.what)
            requests.append(request)
        return requests

    def _check_length(self, characters: int, param: str) -> None:
        """Raises ApiError (400) for a text of more characters than any prompt's tokens have."""
        max_length = self.engine.model.max_length
        most = max_length * self._template.longest_token
        if characters > most:
            problem = (
                f"this model's context holds {max_length} tokens, which are {most} characters at "
                f"most; the text has {characters}"
            )
            raise ApiError(400, problem, code="context_length_exceeded", param=param)

    def _check_context(self, prompt: int, new: int, param: str = "prompt") -> None:
        """Raises ApiError (400) where so many tokens do not fit."""
        max_length = self.engine.model.max_length
        if prompt + new > max_length:
            problem = (
                f"this model's context holds {max_length} tokens; the prompt has {prompt} "
                f"and {new} were asked for"
            )
            raise ApiError(400, problem, code="context_length_exceeded", param=param)

    def _pieces(self, body: GenerationBody) -> TextPieces:
        special, template = not body.skip_special_tokens, self._template
        text = partial(template.text, special=special)
        return TextPieces(text, body.stop, template.is_byte)
