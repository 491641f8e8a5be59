"""States from the engine that serves the target: its arithmetic, its kernels, its sharding.

    this process                                       vLLM, a server or in this process
    token ids of a sample, max_tokens 1  ── HTTP ──►   prefill; states lie beside keys and values
    what the reply says                  ◄────────     vllm_connector.py: DIRECTORY/NAME.safetensors
    read, checked, deleted               ◄─ /dev/shm ─

vLLM's layer k is our output index k - 1, so it is asked for each of the contract's plus one, and
for its last, whose output is normed here, by transformers' own module and the target's weights:

    ours      capture_layers 1, 14, 26   final state
    vLLM's                   2, 15, 27   L = 30, before the norm

Nothing is believed. Every file must name the ids that were sent, and these layers. Before a process
commits its first shard, transformers computes a piece of one sample, with as many of the target's
layers as memory allows: each state must be nearer to its own layer than to any other one. And every
reply is scored with the final states (target/referee.py), and a sample of every shard computed
again alone, as with local capture.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipeline.config import EngineSection, RunConfig
from pipeline.config.credentials import key_headers, without_key
from pipeline.console import long_step, notice
from pipeline.decoder.kv import free_bytes
from pipeline.documents import (
    BrokenDocument,
    check_header,
    check_url,
    fetch_reply,
    name_in,
    parse_json,
    rows_in,
)
from pipeline.errors import (
    DataError,
    EndpointError,
    EndpointsUnavailable,
    MissingPackage,
    TargetError,
    brief,
)
from pipeline.features.plan import layers_in_vllm, speculative_config, transfer_config
from pipeline.records import Arithmetic, digest
from pipeline.store.stage_run import process_namespace
from pipeline.target.architecture import decoder_of, model_class
from pipeline.target.forward import (
    Alternatives,
    Draw,
    LoadedTarget,
    layer_outputs,
    layers_of,
    noise_gain,
    register_packed_attention,
)
from pipeline.target.open import Target

if TYPE_CHECKING:
    import httpx

_WHERE = "features.engine"
#: As in vllm_connector.py, which cannot be imported where vLLM is not.
_KEY = "eagle3_states"
#: Statuses after which the same is asked again.
_BUSY = frozenset({429, 500, 502, 503, 504})
_BACKOFF_SECONDS, _MOST_BACKOFF = 0.5, 30.0
_CONNECT_SECONDS = 10.0
#: Seconds for which states are waited for that a server says it is writing.
_WRITING_SECONDS = 60.0
_GLANCE_SECONDS = 0.002
#: Tokens of the sample that transformers computes too.
_COMPARED = 256
#: Of the free memory, that the target may take for that.
_MEMORY_SHARE = 0.5
#: What noise is assumed to do (`forward.noise_gain`) to a target that is too large to measure it.
_ASSUMED_GAIN = 10.0


class _StatesFile(NamedTuple):
    """What one file holds."""

    states: Tensor  # [T, L + 1, H], low to high, the last one before the norm
    facts: dict[str, str]


class Transport(Protocol):
    """The way to an engine."""

    def ask(self, documents: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """Have the states of each document written under its name.

        Raises EndpointError, EndpointsUnavailable.
        """

    @property
    def directory(self) -> Path:
        """Where they are written."""


class EngineStates:
    """A `StatesSource`: the target is not in this process."""

    def __init__(self, target: Target, transport: Transport) -> None:
        """Asks for the states of a few tokens. Raises EndpointError, EndpointsUnavailable."""
        self.contract, self._target, self._transport = target.contract, target, transport
        self._layers = asked_layers(target)
        self._gain, self._compared = _ASSUMED_GAIN, False
        self._norm: nn.Module | None = None
        (first,) = self._take([list(range(min(4, self.contract.vocab_size)))])
        self._dtype, facts = first.states.dtype, first.facts
        self.server = name_in(facts.get("server")) or "vllm"

    @property
    def arithmetic(self) -> Arithmetic:
        """Of the engine, which batches with whatever else it is asked."""
        return Arithmetic(
            dtype=str(self._dtype).removeprefix("torch."),
            kernels=self.server,
            device="server",
            processor="",
            threads=0,
            repeatable="no",
        )

    def together(self, documents: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """All at once, or as many as `concurrency` says."""
        captured = [self._split(taken) for taken in self._take(documents)]
        if not self._compared:
            whole = [n for n, each in enumerate(documents) if len(each) <= _COMPARED]
            number = max(whole, key=lambda n: len(documents[n]), default=0)  # with its last token
            self._compare(documents[number], *captured[number])
            self._compared = True
        return captured

    def with_alternatives(
        self, documents: Sequence[Sequence[int]], draw: Draw
    ) -> list[tuple[Tensor, Tensor, Alternatives]]:
        """An engine computes what it is sent: `features.alternatives` is refused with it."""
        raise NotImplementedError

    def alone(self, document: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A request while there is no other one of ours."""
        return self._split(self._take([document])[0])

    def noise_gain(self, document: Sequence[int], final: Tensor) -> float:
        """Of this target, as transformers has measured it once, or an assumption."""
        return self._gain

    def _split(self, taken: _StatesFile) -> tuple[Tensor, Tensor]:
        """aux [T, L · H], final [T, H]."""
        states = taken.states
        if self._norm is None:
            self._norm = last_norm(self._target, states.dtype)
        return states[:, :-1].flatten(1), self._norm(states[:, -1])

    def _take(self, documents: Sequence[Sequence[int]]) -> list[_StatesFile]:
        names = [uuid.uuid4().hex for _ in documents]
        try:
            self._transport.ask(documents, names)
            self._wait_for(names)
            return [self._read(*pair) for pair in zip(documents, names, strict=True)]
        finally:
            for name in names:
                for ending in (".safetensors", ".part"):
                    (self._transport.directory / (name + ending)).unlink(missing_ok=True)

    def _wait_for(self, names: Sequence[str]) -> None:
        """Until all files are there: an engine replies before it writes. Raises EndpointError."""
        directory, end = self._transport.directory, time.monotonic() + _WRITING_SECONDS
        for name in names:
            while not (directory / f"{name}.safetensors").exists():
                if time.monotonic() > end:
                    problem = f"the server has written states that do not come to {directory}"
                    fix = "give both the same directory: features.engine.directory here, and "
                    fix += "kv_connector_extra_config.directory there"
                    raise EndpointError(problem, where=_WHERE, fix=fix)
                time.sleep(_GLANCE_SECONDS)

    def _read(self, document: Sequence[int], name: str) -> _StatesFile:
        from safetensors import SafetensorError, safe_open

        path = self._transport.directory / f"{name}.safetensors"
        try:
            check_header(path)
            with safe_open(path, framework="pt") as file:
                facts = dict(file.metadata() or {})
                states, ids = file.get_tensor("states"), file.get_tensor("token_ids").tolist()
        except (OSError, ValueError, SafetensorError) as error:
            raise _wrong(f"gives states that cannot be read: {brief(error)}") from error
        layers = ",".join(map(str, self._layers))
        if facts.get("layers") != layers:
            problem = f"hands out layers {name_in(facts.get('layers')) or 'it does not name'}, "
            raise _wrong(f"{problem}and the target's contract needs {layers} (in vLLM's numbers)")
        if ids != list(document):
            raise _wrong("gives the states of other token ids than it was sent")
        shape = (len(document), len(self._layers), self.contract.hidden_size)
        if tuple(states.shape) != shape or not states.is_floating_point():
            has = f"{list(states.shape)} of {states.dtype}"
            raise _wrong(f"gives states of shape {has} for {len(document)} tokens")
        return _StatesFile(states, facts)

    def _compare(self, document: Sequence[int], aux: Tensor, final: Tensor) -> None:
        """Hold the states of a piece of `document` against transformers' own.

        Raises DataError where one is not of its layer.
        """
        reference = self._load_reference()
        if reference is None:
            return
        piece = list(document[:_COMPARED])
        outputs, last = layer_outputs(reference, piece)  # [layers, T, H], [T, H]
        *states, final = layers_of(aux[: len(piece)], final[: len(piece)])
        for layer, each in zip(self.contract.capture_layers, states, strict=True):
            if layer < len(outputs):
                _require_layer(layer, each, outputs)
        if len(outputs) < self._layers[-1]:
            return
        _require_near("the final state", _apart(final, last[None])[0])
        self._gain = noise_gain(reference, piece, last)

    def _load_reference(self) -> LoadedTarget | None:
        """The target, or its first layers where it is too large; None where transformers cannot."""
        target = self._target
        lowest = self.contract.capture_layers[0] + 2  # its neighbour above too
        size = self.contract.parameters * target.dtype.itemsize
        free = free_bytes(target.device)
        layers = None if free is None or size <= _MEMORY_SHARE * free else lowest
        try:
            with long_step("features", "transformers' own states of one sample"):
                reference = target.load(attention=register_packed_attention(), layers=layers)
        except (TargetError, ImportError, RuntimeError, ValueError) as error:
            said = f"transformers cannot compute this target here ({brief(error)})"
            notice("features", f"{said}: its layers are not compared, its replies are scored")
            return None
        if layers is not None:
            notice("features", f"the first {layers} layers are held against transformers' own")
        return reference


#: Relative distance of a token's state from transformers' own, above which it is another's.
_FAR = 0.5
_FIX = (
    "check what the server runs: another model or revision, layers counted otherwise, or a version "
    "of vLLM that hands out something else"
)


def _require_layer(layer: int, states: Tensor, outputs: Tensor) -> None:
    """Raise DataError where states [T, H] are not those of `layer` among outputs [layers, T, H]."""
    apart = _apart(states, outputs)  # [layers, T]
    medians = apart.median(dim=1).values
    nearest = int(medians.argmin())
    if nearest != layer:
        problem = f"what it calls output {layer} is {float(medians[layer]):.2g} from that layer's, "
        problem += f"and {float(medians[nearest]):.2g} from that of layer {nearest}"
        raise DataError(f"{problem}, as transformers computes them", where=_WHERE, fix=_FIX)
    _require_near(f"output {layer}", apart[layer])


def _require_near(name: str, apart: Tensor) -> None:
    """Raise DataError where one token of apart [T] is another's."""
    token = int(apart.argmax())
    if not float(apart[token]) < _FAR:
        problem = f"token {token} of {len(apart)} is {float(apart[token]):.2g} from transformers' "
        raise DataError(f"what it calls {name} of {problem}own", where=_WHERE, fix=_FIX)


def _apart(states: Tensor, references: Tensor) -> Tensor:
    """[N, T]: relative distance of states [T, H] from each of references [N, T, H]."""
    references = references.float()
    distance = (references - states.to(references.device).float()).norm(dim=2)
    apart: Tensor = distance / references.norm(dim=2).clamp_min(1e-30)
    return apart


def asked_layers(target: Target) -> list[int]:
    """In vLLM's numbers, low to high: the contract's, and the last one."""
    count = target.config.get_text_config().num_hidden_layers
    return layers_in_vllm(target.contract.capture_layers, count)


def last_norm(target: Target, dtype: torch.dtype) -> nn.Module:
    """The norm before lm_head, as transformers has it, with the target's weight."""
    where = f"target.source={target.section.source}"
    with torch.device("meta"):
        model = model_class(target.config, where).from_config(target.config)
    norm: nn.Module = decoder_of(model).norm.to_empty(device="cpu")
    norm.load_state_dict(target.weights.last_norm())
    return norm.to(dtype).eval().requires_grad_(False)


def _wrong(problem: str) -> EndpointError:
    fix = "start the server as docs/capture.md says; `eagle3 features … --plan` prints the command"
    return EndpointError(problem, where=_WHERE, fix=fix)


class Servers:
    """vLLM servers that run somewhere; a `Transport`."""

    def __init__(self, section: EngineSection) -> None:
        self._section, self._turn = section, 0
        self._model = section.model
        self._urls = [url.rstrip("/") for url in section.endpoints]
        self.directory = Path(section.directory)

    def ask(self, documents: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """See `Transport`."""
        try:
            asyncio.run(self._ask_all(documents, names))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _ask_all(self, documents: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        import httpx

        section = self._section
        for url in self._urls:
            check_url(url, f"{_WHERE}.endpoints")
        slots = asyncio.Semaphore(section.concurrency)
        async with (
            httpx.AsyncClient(
                headers=key_headers(section.api_key_env, where=f"{_WHERE}.api_key_env"),
                timeout=httpx.Timeout(section.timeout_seconds, connect=_CONNECT_SECONDS),
            ) as http,
            asyncio.TaskGroup() as tasks,
        ):
            if self._model is None:
                self._model = await self._retried(lambda url: self._only_model(http, url))

            async def ask(document: Sequence[int], name: str) -> None:
                async with slots:
                    await self._retried(lambda url: self._ask(http, url, document, name))

            for document, name in zip(documents, names, strict=True):
                tasks.create_task(ask(document, name))

    async def _retried(self, request: Callable[[str], Awaitable[Any]]) -> Any:
        """What `request` gives, of the endpoints in turn, until one answers.

        Raises EndpointsUnavailable after the section's `outage_seconds`.
        """
        import httpx

        end, delay = time.monotonic() + self._section.outage_seconds, _BACKOFF_SECONDS
        while True:
            self._turn += 1
            url = self._urls[self._turn % len(self._urls)]
            try:
                return await request(url)
            except (httpx.HTTPError, TimeoutError, BrokenDocument, _Busy) as error:
                if time.monotonic() > end:
                    problem = f"no server has given states for {self._section.outage_seconds:g} s"
                    problem = f"{problem}: {url}: {brief(error)}"
                    fix = "start the servers and run the same command: committed shards are kept"
                    raise EndpointsUnavailable(problem, where=_WHERE, fix=fix) from None
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MOST_BACKOFF)

    async def _ask(
        self, http: httpx.AsyncClient, url: str, document: Sequence[int], name: str
    ) -> None:
        body = {
            "model": self._model,
            "prompt": list(document),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {_KEY: name},
        }
        answer = await self._page(http, "POST", f"{url}/completions", json=body)
        said = answer.get("kv_transfer_params")
        said = said if isinstance(said, dict) else {}
        if said.get(_KEY) != name:
            reason = name_in(said.get("problem")) or "it does not run with our connector"
            raise _wrong(f"{url} hands out no states: {reason}")

    async def _only_model(self, http: httpx.AsyncClient, url: str) -> str:
        rows = rows_in(await self._page(http, "GET", f"{url}/models"))
        names = [name for row in rows if (name := name_in(row.get("id")))]
        if len(names) != 1:
            problem = f"{url} lists {len(names)} models"
            fix = "set features.engine.model to the name under which it knows the target"
            raise EndpointError(problem, where=_WHERE, fix=fix)
        return names[0]

    async def _page(
        self, http: httpx.AsyncClient, method: str, url: str, **options: Any
    ) -> dict[str, Any]:
        """A JSON object. Raises _Busy, EndpointError for a refusal, and as `fetch_reply`."""
        seconds = self._section.timeout_seconds
        reply = await fetch_reply(http, method, url, seconds=seconds, **options)
        if reply.status_code in _BUSY:
            raise _Busy(f"HTTP {reply.status_code}")
        if reply.status_code != 200:
            words = " ".join(without_key(reply.text, http.headers).split())[:200]
            problem = f"{url} says HTTP {reply.status_code}: {words}"
            fix = "check features.engine, and that --max-model-len holds the samples and a token"
            raise EndpointError(problem, where=_WHERE, fix=fix)
        try:
            body = parse_json(reply.content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise _Busy("no JSON object")
        return body


class _Busy(Exception):
    """To be asked again."""


class InProcess:
    """vllm.LLM, in this process; a `Transport`."""

    def __init__(self, config: RunConfig, target: Target) -> None:
        """Raises MissingPackage, and what vLLM raises for its options."""
        try:
            from vllm import LLM
        except ImportError as error:
            problem = f"vLLM cannot be imported ({brief(error)})"
            fix = "install it beside this package, or set features.engine.endpoints to servers"
            raise MissingPackage(problem, where="features.backend=vllm", fix=fix) from None
        section = config.features.engine
        # Containers and nodes may share what is above it, and number their processes alike.
        here = digest(process_namespace())[:12]
        shared = Path(f"{section.directory}-{here}")
        self.directory = shared.with_name(f"{shared.name}-{os.getpid()}")
        atexit.register(shutil.rmtree, self.directory, ignore_errors=True)
        _remove_those_of_dead_processes(shared)
        options: dict[str, Any] = {
            "model": str(target.directory),
            "dtype": str(target.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "speculative_config": speculative_config(asked_layers(target)),
            "kv_transfer_config": transfer_config(str(self.directory)),
        }
        with long_step("features", "starting vLLM"):
            self._llm = LLM(**options | dict(section.options))

    def ask(self, documents: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """See `Transport`."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": list(document)} for document in documents],
            [
                SamplingParams(
                    max_tokens=1,
                    temperature=0,
                    detokenize=False,
                    extra_args={"kv_transfer_params": {_KEY: name}},
                )
                for name in names
            ],
            use_tqdm=False,
        )
        for output, name in zip(outputs, names, strict=True):
            said = output.kv_transfer_params or {}
            if said.get(_KEY) != name:
                raise _wrong(f"vLLM hands out no states: {said.get('problem', 'no reason given')}")


def _remove_those_of_dead_processes(directory: Path) -> None:
    """What processes have left in memory that were killed where this one can see it."""
    for left in directory.parent.glob(f"{directory.name}-*"):
        process = left.name.removeprefix(f"{directory.name}-")
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            with suppress(OSError):
                shutil.rmtree(left)


def open_engine(config: RunConfig, target: Target) -> EngineStates:
    """What computes the states of `target` by the section's engine.

    Raises EndpointError, EndpointsUnavailable, MissingPackage.
    """
    section = config.features.engine
    transport: Transport = Servers(section) if section.endpoints else InProcess(config, target)
    return EngineStates(target, transport)
