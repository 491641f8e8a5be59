"""The least-squares start at the hidden sizes of large targets, on states that are made up.

python -m bench.start [--hidden 1024,2048,4096] [--per-regressor 8,30] [--threads N] [--out FOLDER]

States have channels of very different sizes, as residual streams have, and the teacher's final
state is by LINEAR a linear function of rank RANK of aux states and next token and noise for the
rest. So a regression from endless rows explains LINEAR of held-out rows, and what one from few rows
explains less is what they lack. Each case is a process of its own, whose peak memory, torch
included, is reported. The MLP is as wide as the hidden size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.report import ROOT, peak_gigabytes, publish, rounded
from pipeline.heads.eagle3.init import solve_least_squares
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import random_init
from pipeline.learning.batches import TrainBatch
from pipeline.tuning.cost import matmul_rate

#: Share of the final state's variance that is linear in what the head reads.
LINEAR, RANK = 0.6, 64
_TOKENS, _VOCABULARY = 2048, 4096
CPU = torch.device("cpu")


class SimulatedBatches:
    """Batches of one document each, the same each time they are gone through."""

    def __init__(self, hidden_size: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._size, self._count = hidden_size, -(-rows // (_TOKENS - 2))
        self._scales = torch.arange(1, 3 * hidden_size + 1).float().rsqrt()  # [3H]
        self._read = torch.randn(4 * hidden_size, RANK, generator=generator)
        self._write = torch.randn(RANK, hidden_size, generator=generator) / RANK**0.5
        # Of a sum over aux channels of those sizes and H channels of 1.
        self._spread = float((self._scales.square().sum() + hidden_size).sqrt())
        self.embedding = torch.randn(_VOCABULARY, hidden_size, generator=generator)

    def __iter__(self) -> Iterator[TrainBatch]:
        for number in range(self._count):
            yield self._batch(number)

    def _batch(self, number: int) -> TrainBatch:
        generator = torch.Generator().manual_seed(1 + number)
        tokens = torch.randint(_VOCABULARY, (_TOKENS,), generator=generator)
        aux = torch.randn(_TOKENS, 3 * self._size, generator=generator) * self._scales
        labels = torch.arange(2, _TOKENS)  # [S]: predicted from aux of j-2 and token j-1
        noise = torch.randn(len(labels), self._size, generator=generator)
        seen = torch.cat((aux[labels - 2], _normed(self.embedding[tokens[labels - 1]])), dim=-1)
        linear = (seen @ self._read / self._spread) @ self._write  # [S, H], variance 1
        final = LINEAR**0.5 * linear + (1 - LINEAR) ** 0.5 * noise
        name = (str(number),)
        return TrainBatch(name, (_TOKENS,), tokens, aux, labels, labels, final, number=number)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.here:
        print(json.dumps(_case(*options.here)))
        return
    figures = {
        f"hidden_{hidden}": {
            f"rows_per_regressor_{each}": _in_own_process(hidden, each, options.threads)
            for each in options.per_regressor
        }
        for hidden in options.hidden
    }
    figures = {"linear": LINEAR, "threads": options.threads} | figures
    publish("start", rounded(figures, 3), device=CPU, folder=options.out, merge=True)


def _case(hidden: int, per_regressor: int) -> dict[str, Any]:
    """Rows, seconds, gigabytes, and the share of held-out variance that is explained."""
    heads = hidden // 128
    shape = HeadShape(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=128,
        vocab_size=_VOCABULARY,
        draft_vocab_size=_VOCABULARY,
        rms_norm_eps=1e-6,
        max_position_embeddings=_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    head = Eagle3Head(shape)
    random_init(head, 0)
    head.norm.weight.data.fill_(1.0)
    batches, started = SimulatedBatches(hidden, per_regressor * 4 * hidden), time.perf_counter()
    fit = solve_least_squares(head, batches.embedding, batches)
    return {
        "rows": fit.rows,
        "held_out": fit.held_out,
        "strength": fit.strength,
        "explained_held_out": fit.explained,
        "seconds": time.perf_counter() - started,
        "peak_gb": peak_gigabytes(),
        "matmul_gflops": matmul_rate(CPU, size=2048, dtype=torch.float32) / 1e9,
    }


def _in_own_process(hidden: int, per_regressor: int, threads: int) -> dict[str, Any]:
    case = f"--threads {threads} --here {hidden} {per_regressor}"
    command = [sys.executable, "-m", "bench.start", *case.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"H {hidden}, {per_regressor} rows a regressor: {figures}", file=sys.stderr)
    return figures


def _normed(rows: Tensor) -> Tensor:
    return rows * rows.square().mean(-1, keepdim=True).rsqrt()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--hidden", type=_numbers, default=[1024, 2048], help="hidden sizes, by commas")
    option("--per-regressor", type=_numbers, default=[8, 30], help="rows for each, by commas")
    option("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    option("--here", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
