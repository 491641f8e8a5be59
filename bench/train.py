"""Speed and memory of the trainer on this machine, as one JSON line.

python -m bench.train [--threads N] [--runs N] [--max-tokens N] [--only speed,dense,memory]
                      [--level avx2]

The head is that of a 135M target: H 576, 9 query and 3 key/value heads, MLP 1,536, draft vocabulary
8,192, TTT 7. It is trained in what `train.dtype: auto` is here; speed is measured in bf16 and in
fp32, in turns. States and weights are random, 72 % of the tokens are supervised and all of those
are in the draft vocabulary. Every memory figure is the peak of a process of its own, torch and the
target's embedding included.

`--level` limits torch and its libraries to a lower level of vector instructions; the figures are
named after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.levels import measure_at
from bench.peers.turns import DECAY, DRAFT, HIDDEN, LAYER, STEPS, VOCABULARY
from bench.report import ROOT, contested, interleaved, peak_gigabytes, publish, rounded
from pipeline.config.isa import machine_levels
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.init import random_init
from pipeline.heads.unrolled import Objective
from pipeline.learning.batches import TrainBatch
from pipeline.target.arithmetic import resolve_dtype
from pipeline.tuning.cost import matmul_rate
from tests.train.dense import dense_loss

SUPERVISED = 0.72
#: Each as (tokens of a row, documents in it)
ROW, DENSE_ROW = (512, 2), (2048, 4)
CURVE = (2048, 4096, 8192, 16384, 32768)
#: Tokens of a long sample's last part, after its past.
PART = 2048
TYPES = ("bfloat16", "float32")
GROUPS = ("speed", "dense", "memory")
CPU = torch.device("cpu")


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.peak:
        kind, tokens, documents = options.peak
        _run_for_peak(kind, int(tokens), int(documents))
        return
    if options.level:
        arguments = ["--threads", str(options.threads), "--runs", str(options.runs)]
        arguments += ["--max-tokens", str(options.max_tokens), "--only", ",".join(options.only)]
        measured = measure_at(options.level, "bench.train", arguments)
        figures = {f"{options.level}.{name}": value for name, value in measured.items()}
    else:
        figures = _figures(options)
    if options.here:
        options.here.write_text(json.dumps(figures), encoding="utf-8")
    else:
        device = torch.device("cpu")
        publish("train", figures, device=device, folder=options.out, merge=True)


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option, cores = parser.add_argument, len(os.sched_getaffinity(0))
    option("--threads", type=int, default=cores, help="CPU threads")
    option("--runs", type=int, default=7, help="interleaved runs of which the median counts")
    option("--max-tokens", type=int, default=CURVE[-1], help="end of the memory curve")
    option("--only", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    option("--level", choices=machine_levels(), help="measure as on a machine of this level")
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    option("--here", type=Path, help=argparse.SUPPRESS)  # the child's side of `measure_at`
    # The child's side of `_peak`.
    option("--peak", nargs=3, metavar=("KIND", "TOKENS", "DOCUMENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    if unknown := set(options.only) - set(GROUPS):
        parser.error(f"--only {', '.join(unknown)}: it takes {', '.join(GROUPS)}")
    return options


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    groups: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": partial(speed, options.runs),
        "dense": partial(against_dense, options.runs),
        "memory": partial(memory, options.max_tokens),
    }
    figures: dict[str, Any] = {}
    for name in options.only:
        measured = groups[name]()
        for figure, value in measured.items():
            print(f"{figure:28s} {value}", flush=True)
        figures |= measured
    return figures


def speed(runs: int) -> dict[str, Any]:
    """Whole optimiser steps through DeepSpeed, rows of 512 tokens."""
    steps = {dtype: optimiser_step(*ROW, dtype=dtype) for dtype in TYPES}
    for first, _ in steps.values():  # kernels compile, and memory is touched for the first time
        first()
    tokens, auto = ROW[0], str(resolve_dtype("auto", CPU)).removeprefix("torch.")
    rivals: dict[str, Callable[[], float]] = {
        dtype: partial(_rate, step, tokens, time.perf_counter) for dtype, (step, _) in steps.items()
    }
    step, operations = steps[auto]
    rates = contested(rivals, {}, runs=runs)
    busy = interleaved({auto: partial(_rate, step, tokens, time.process_time)}, runs=runs)[auto]
    rate = matmul_rate(CPU, size=2048, dtype=resolve_dtype("auto", CPU))
    floor = tokens * rate / operations  # tokens per second
    figures = {
        "tokens_per_second": rates[auto],
        "tokens_per_second_bf16": rates["bfloat16"],
        "tokens_per_second_fp32": rates["float32"],
        "auto_over_bf16": rates[auto] / rates["bfloat16"],
        "tokens_per_cpu_second": busy,
        "matmul_gflops": rate / 1e9,
        "floor_tokens_per_second": floor,
        "floor_share": rates[auto] / floor,
        "peak_rss_gb": _peak("step", *ROW),
    }
    return {"dtype": auto, **rounded(figures)}


def against_dense(runs: int) -> dict[str, float]:
    """Forward and backward at 2,048 tokens a batch, against one dense mask and every logit.

    Ratios above 1 are in our favour.
    """
    ours, dense = (forward_backward(kind, *DENSE_ROW) for kind in ("ours", "dense"))
    cases = {
        "ours": lambda: _timed(ours, time.perf_counter),
        "dense": lambda: _timed(dense, time.perf_counter),
    }
    seconds = interleaved(cases, runs=max(3, runs // 2))
    peaks = {kind: _peak(kind, *DENSE_ROW) for kind in ("ours", "dense")}
    return rounded(
        {
            "vs_dense": seconds["dense"] / seconds["ours"],
            "memory_vs_dense": peaks["ours"] / peaks["dense"],
            "peak_gb_2048": peaks["ours"],
            "dense_peak_gb_2048": peaks["dense"],
        }
    )


def memory(max_tokens: int) -> dict[str, Any]:
    """Peak memory of one sequence of each length: whole, and its last part after its past."""
    lengths = [tokens for tokens in CURVE if tokens <= max_tokens]
    return {
        name: {str(tokens): round(_peak(kind, tokens, 1), 3) for tokens in lengths}
        for name, kind in (("peak_gb_by_tokens", "ours"), ("peak_gb_in_parts", "part"))
    }


def optimiser_step(
    tokens: int, documents: int, *, dtype: str = "auto"
) -> tuple[Callable[[], None], float]:
    """One step of the trainer, and the FLOPs of its products with weights."""
    from pipeline.config import TrainSection
    from pipeline.train.trainer import Trainer

    model, batch = random_model(tokens // documents, dtype), random_batch(tokens, documents)
    section = TrainSection.model_validate({"dtype": dtype})
    trainer = Trainer(model, section, CPU)

    def step() -> None:
        trainer.step([batch], 1e-4)

    return step, operations(model.head, tokens, len(batch.labels))


def operations(head: Eagle3Head, tokens: int, labels: int) -> float:
    """6 a parameter and token that passes it, forward and backward: all tokens pass `fc` and the
    keys and values of the first step, those that predict a label pass everything else."""
    attention = head.midlayer.self_attn
    everyone = sum(each.weight.numel() for each in (head.fc, attention.k_proj, attention.v_proj))
    whole = head.count_parameters()
    first = everyone * tokens + (whole - everyone) * labels
    return 6.0 * (first + (STEPS - 1) * (whole - head.fc.weight.numel()) * labels)


def forward_backward(kind: str, tokens: int, documents: int) -> Callable[[], None]:
    """Loss and gradients of the same head, by the trainer ("ours", "part") or by the dense
    reference.
    """
    dtype = resolve_dtype("auto", CPU)
    model = random_model(tokens // documents, "auto").to(dtype)
    past = max(0, tokens - PART) if kind == "part" else 0
    batch = random_batch(tokens, documents, past).to(CPU, dtype)

    def by_dense_mask() -> Tensor:
        rows = model.target_output_rows
        return dense_loss(model.head, model.embedding, rows, batch, steps=STEPS, decay=DECAY)

    def run() -> None:
        model.zero_grad()
        torch.autograd.backward(by_dense_mask() if kind == "dense" else model(batch).loss)

    return run


def random_model(max_length: int, dtype: str) -> TttModel:
    """The head with random weights, and a random target."""
    compute = resolve_dtype(dtype, CPU)
    shape = HeadShape(
        **LAYER,
        draft_vocab_size=DRAFT,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    head = Eagle3Head(shape)
    random_init(head, 0)
    head.set_vocabulary(torch.arange(DRAFT))
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.bfloat16)
    objective = Objective(STEPS, DECAY)
    return TttModel(head, embedding, embedding, objective, max_length=max_length, dtype=compute)


def random_batch(tokens: int, documents: int, past: int = 0) -> TrainBatch:
    """Documents of equal length, each with a past and a prompt in front."""
    length = tokens // documents
    supervised = torch.arange(length) >= past + round((1 - SUPERVISED) * (length - past))
    depths = supervised.nonzero().flatten().repeat(documents)
    labels = supervised.repeat(documents).nonzero().flatten()
    generator = torch.Generator().manual_seed(2)

    def states(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.bfloat16)

    token_ids = torch.randint(0, DRAFT, (tokens,), generator=generator)
    return TrainBatch(
        tuple(map(str, range(documents))),
        (length,) * documents,
        token_ids,
        states(tokens, 3 * HIDDEN),
        labels,
        depths,
        states(len(labels), HIDDEN) / 10,
        pasts=(past,) * documents,
    )


def _rate(case: Callable[[], None], tokens: int, clock: Callable[[], float]) -> float:
    """Tokens per second of a case."""
    return tokens / _timed(case, clock)


def _timed(case: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    case()
    return clock() - started


def _peak(kind: str, tokens: int, documents: int) -> float:
    """Gigabytes that a process of its own reached."""
    case = f"--threads {torch.get_num_threads()} --peak {kind} {tokens} {documents}"
    command = [sys.executable, "-m", "bench.train", *case.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _run_for_peak(kind: str, tokens: int, documents: int) -> None:
    if kind == "step":
        run, *_ = optimiser_step(tokens, documents)
    else:
        run = forward_backward(kind, tokens, documents)
    for _ in range(2 if tokens <= DENSE_ROW[0] else 1):
        run()
    print(peak_gigabytes())


if __name__ == "__main__":
    main()
