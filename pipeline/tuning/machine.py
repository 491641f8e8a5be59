"""What the machine can do at this moment: bytes it reads and operations it does in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def read_bandwidth(device: torch.device, *, megabytes: int = 512, runs: int = 9) -> float:
    """Bytes per second of a sequential read (CPU) or of a copy, both directions counted (CUDA).

    On a CPU it is that of the faster reader: a sum keeps one stream a thread in flight, a product
    of a matrix and a vector reads several rows at once, which most machines need for their all.
    """
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    matrix, vector = source.view(-1, 2048), torch.ones(2048, device=device)
    readers: list[Callable[[], object]] = [source.sum, lambda: matrix @ vector]
    moved = source.numel() * 4
    if device.type == "cuda":
        target = torch.empty_like(source)
        readers, moved = [lambda: target.copy_(source)], 2 * moved
    taken: list[list[float]] = [
        [_seconds(read, device) for read in readers] for _ in range(1 + runs)
    ]
    return max(moved / float(median(seconds)) for seconds in zip(*taken[1:], strict=True))


def matmul_rate(device: torch.device, *, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of a square product."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(5):
            left @ right

    taken: list[float] = [_seconds(multiply, device) for _ in range(6)]
    return 10.0 * size**3 / float(median(taken[1:]))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
