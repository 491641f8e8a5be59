"""What a round of the CPU benchmark is made of, and how well the cost model foretells a speedup.

Everything here is a ratio of two times, and a machine that others use as well is never the same for
two seconds. So whatever is compared takes turns in the smallest pieces that there are: single
rounds of every engine, single pieces of a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench.decode_cpu import CPU, NEW_TOKENS, TREE, Bench, complete
from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.tuning.cost import CostMeter, measure_costs, trimmed_mean
from pipeline.tuning.roofline import (
    Roofline,
    best_speedup,
    floor_seconds,
    matmul_rate,
    read_bandwidth,
)

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
#: Behind how many tokens the pieces stand.
_CONTEXT = 128


def pieces(bench: Bench, runs: int) -> dict[str, Any]:
    """What a round is made of, at batch 1 behind 128 tokens."""
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
    piece of a round once. Of rounds as of pieces the trimmed mean counts, over all turns. η
    compares with a machine that reads and multiplies at the measured rates and does nothing else,
    plain decoding included.
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
    """Seconds and tokens of single rounds, for ever, over the same reply again and again.

    Left out are the emission of prefill, that of the round launched along with it, and a reply's
    last round, whose tokens may be cut off.
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
    """(begun, seconds) of each call that T_verify, T_draft and T_extend are made of.

    What is called inside of another is a part of it.
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
