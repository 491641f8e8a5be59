"""Speed and memory of the trainer on this machine, as one JSON line.

python -m bench.train [--threads N] [--runs N] [--longest TOKENS]

The head is that of a 135M target: H 576, 9 query and 3 key/value heads, MLP 1,536, draft vocabulary
8,192, TTT 7, bfloat16. States and weights are random, 72 % of the tokens are supervised and all of
those are in the draft vocabulary. Every memory figure is the peak of a process of its own, torch
and the target's embedding included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import ROOT, interleaved, matmul_rate, publish, rounded
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.eagle3.init import random_init
from pipeline.train.data.batches import TrainBatch
from pipeline.train.ttt.model import Objective, TttModel
from tests.train.dense import dense_loss

VOCABULARY, DRAFT, STEPS, DECAY = 49152, 8192, 7, 0.8
SUPERVISED = 0.72
#: Each as (tokens of a row, documents in it)
ROW, DENSE_ROW = (512, 2), (2048, 4)
CURVE = (2048, 4096, 8192, 16384, 32768)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads"
    )
    parser.add_argument("--runs", type=int, default=7, help="interleaved runs behind every median")
    parser.add_argument(
        "--longest", type=int, default=CURVE[-1], help="last sequence length of the memory curve"
    )
    parser.add_argument("--out", type=Path, help="folder of the JSON file, default runs/bench")
    parser.add_argument(
        "--peak", nargs=3, metavar=("KIND", "TOKENS", "DOCUMENTS"), help=argparse.SUPPRESS
    )  # the child's side of `_peak`
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        kind, tokens, documents = options.peak
        _run_for_peak(kind, int(tokens), int(documents))
        return
    figures: dict[str, Any] = {}
    groups = (
        lambda: speed(options.runs),
        lambda: against_dense(options.runs),
        lambda: memory(options.longest),
    )
    for group in groups:
        measured = group()
        for name, value in measured.items():
            print(f"{name:28s} {value}", flush=True)
        figures |= measured
    publish("train", figures, device=torch.device("cpu"), folder=options.out)


def speed(runs: int) -> dict[str, float]:
    """Whole optimiser steps through DeepSpeed, rows of 512 tokens."""
    step, batch, parameters = optimiser_step(*ROW)
    by_wall = {"step": lambda: _timed(step, time.perf_counter)}
    by_cpu = {"step": lambda: _timed(step, time.process_time)}
    wall = interleaved(by_wall, runs=runs, warm_up=3)["step"]
    busy = interleaved(by_cpu, runs=runs)["step"]
    rate = matmul_rate(torch.device("cpu"), size=2048)
    floor = 6 * parameters * STEPS * batch.tokens / rate  # seconds
    return rounded(
        {
            "tokens_per_second": batch.tokens / wall,
            "tokens_per_cpu_second": batch.tokens / busy,
            "matmul_gflops": rate / 1e9,
            "floor_tokens_per_second": batch.tokens / floor,
            "floor_share": floor / wall,
            "peak_rss_gb": _peak("step", *ROW),
        }
    )


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


def memory(longest: int) -> dict[str, Any]:
    """Peak memory of one sequence of each length."""
    lengths = [tokens for tokens in CURVE if tokens <= longest]
    return {"peak_gb_by_tokens": {str(n): round(_peak("ours", n, 1), 3) for n in lengths}}


def optimiser_step(tokens: int, documents: int) -> tuple[Callable[[], None], TrainBatch, int]:
    """One step of the trainer, its batch, and the head's parameters."""
    from pipeline.config import TrainSection
    from pipeline.train.trainer import Trainer

    model, batch = random_model(tokens // documents), random_batch(tokens, documents)
    trainer = Trainer(model, TrainSection(dtype="bfloat16"), torch.device("cpu"))

    def step() -> None:
        for _ in trainer.step([batch], 1e-4):
            pass

    return step, batch, model.head.count_parameters()


def forward_backward(kind: str, tokens: int, documents: int) -> Callable[[], None]:
    """Loss and gradients of the same head, by the trainer ("ours") or by the dense reference."""
    model = random_model(tokens // documents).to(torch.bfloat16)
    batch = random_batch(tokens, documents)

    def by_dense_mask() -> Tensor:
        rows = model.target_output_rows
        return dense_loss(model.head, model.embedding, rows, batch, steps=STEPS, decay=DECAY)

    def run() -> None:
        model.zero_grad()
        torch.autograd.backward(model(batch).loss if kind == "ours" else by_dense_mask())

    return run


def random_model(longest: int) -> TttModel:
    """The head with random weights, and a random target."""
    shape = HeadShape(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192,
    )
    head = Eagle3Head(shape)
    random_init(head, 0)
    head.set_vocabulary(torch.arange(DRAFT))
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCABULARY, 576, generator=generator, dtype=torch.bfloat16)
    objective = Objective(STEPS, DECAY)
    return TttModel(head, embedding, embedding, objective, max_length=longest, dtype=torch.bfloat16)


def random_batch(tokens: int, documents: int) -> TrainBatch:
    """Documents of equal length, each with a prompt in front."""
    length = tokens // documents
    supervised = torch.arange(length) >= round((1 - SUPERVISED) * length)
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
        states(tokens, 3 * 576),
        labels,
        depths,
        states(len(labels), 576) / 10,
    )


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
    # Not ru_maxrss: a child starts with its parent's there.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024 / 1e9)


if __name__ == "__main__":
    main()
