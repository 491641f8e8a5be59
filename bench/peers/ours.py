"""This package's optimiser step, through DeepSpeed: fp32 weights and sums, products in the type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers.turns import serve
from bench.train import ROW, optimiser_step


def make(dtype: torch.dtype) -> Callable[[], None]:
    """The step."""
    step, _ = optimiser_step(*ROW, dtype=str(dtype).removeprefix("torch."))
    return step


if __name__ == "__main__":
    serve(make)
