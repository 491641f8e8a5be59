"""What the machine can do, and what a round's pieces take at that (Williams et al. 2009):

    floor = max(bytes / bandwidth, operations / flops)

where weights are read once whatever the batch is, in the form in which the backend stores them, and
the context's keys and values once a row. Norms, biases, embedding rows and activations are small in
comparison and left out. The pieces are those of `pipeline.tuning.cost`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from pipeline.config import TreeSection
from pipeline.decoder.drafter import Drafter, DraftWork
from pipeline.decoder.model import DecoderModel


@dataclass(frozen=True)
class Roofline:
    """A machine, and the batch that it decodes."""

    bandwidth: float  # bytes/s
    flops: float  # FLOP/s, a multiply-add being two
    rows: int
    context: int  # entries of each row

    def seconds(
        self,
        matrices: Sequence[tuple[int, int]],  # (parameters, tokens a row that pass through them)
        tokens: int,  # read, a row
        *,
        entry: int,  # numbers in the keys and values of one token
        queries: int,  # numbers in its queries
        stored: float,  # bytes of a parameter
        dtype: torch.dtype,  # of keys and values
    ) -> float:
        """The floor of one forward."""
        # The context's entries are read, the new ones written; queries meet keys, then weights
        # values.
        cache = self.rows * (self.context + tokens) * entry
        weights = sum(parameters for parameters, _ in matrices)
        read = stored * weights + dtype.itemsize * cache
        products = sum(2 * parameters * count for parameters, count in matrices)
        attention = 4 * tokens * self.context * queries
        operations = self.rows * (products + attention)
        return max(read / self.bandwidth, operations / self.flops)


def s_max(
    tau: float, t_ar: float, t_verify: float, t_draft: float, t_extend: float, steps: int
) -> float:
    """The speedup of τ tokens a round when every piece runs at its floor and nothing else does."""
    return tau * t_ar / (t_verify + (steps - 1) * t_draft + t_extend)


def best_speedup(
    model: DecoderModel, drafter: Drafter, shape: TreeSection, tau: float, roofline: Roofline
) -> float | None:
    """S_max of trees of this shape; None for a drafter whose floor is not known."""
    if (work := drafter.work(shape)) is None:
        return None
    return s_max(
        tau,
        floor_seconds(model, 1, roofline),
        floor_seconds(model, shape.nodes, roofline),
        draft_floor_seconds(work, roofline),
        extend_floor_seconds(work, roofline),
        shape.steps,
    )


def floor_seconds(model: DecoderModel, tokens: int, roofline: Roofline) -> float:
    """T_AR or T_verify: a forward of `tokens` tokens a row, with logits of all of them."""
    size, layers = model.head_dim, len(model.layers)
    lm_head: int = model.vocabulary * model.config.hidden_size
    matrices = [(layers * layer_parameters(model) + lm_head, tokens)]
    entry, queries = 2 * layers * model.kv_heads * size, layers * model.num_heads * size
    return roofline.seconds(
        matrices,
        tokens,
        entry=entry,
        queries=queries,
        stored=_stored_bytes(model),
        dtype=model.dtype,
    )


def model_bytes(model: DecoderModel) -> float:
    """What a forward reads of the target's weights: every matrix once, a tied lm_head included."""
    lm_head: int = model.vocabulary * model.config.hidden_size
    return _stored_bytes(model) * (len(model.layers) * layer_parameters(model) + lm_head)


def layer_parameters(model: DecoderModel) -> int:
    """Of the matrices of one of the target's layers."""
    config, size = model.config, model.head_dim
    # q and o, k and v
    attention = config.hidden_size * size * (2 * model.num_heads + 2 * model.kv_heads)
    return int(attention + 3 * config.hidden_size * config.intermediate_size)


def _stored_bytes(model: DecoderModel) -> float:
    """Of a parameter, as the backend has packed it: bf16 weights stay so under fp32 arithmetic."""
    layer = model.layers[0]
    packed = layer.qkv, layer.output, layer.gate_up, layer.down
    held: int = sum(weight.data.nbytes for weight in packed)
    return held / layer_parameters(model)


def draft_floor_seconds(work: DraftWork, roofline: Roofline) -> float:
    """T_draft: one step."""
    return _head_seconds(work, work.step, work.beams, roofline)


def extend_floor_seconds(work: DraftWork, roofline: Roofline) -> float:
    """T_extend: what a round has accepted."""
    return _head_seconds(work, work.extension, work.accepted, roofline)


def _head_seconds(
    work: DraftWork, matrices: Sequence[tuple[int, int]], tokens: int, roofline: Roofline
) -> float:
    return roofline.seconds(
        matrices,
        tokens,
        entry=work.entry,
        queries=work.queries,
        stored=work.dtype.itemsize,
        dtype=work.dtype,
    )


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
