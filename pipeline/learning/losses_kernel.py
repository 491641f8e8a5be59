"""The comparison of losses.py as two kernels, for CUDA: each row of logits by one program.

    normaliser   label          log Σ exp of its teacher logits, for all steps
    compare      label × step   1  log Σ exp of the head's logits
                                2  ce_tv: Σ q sign(q - p)
                                3  p, q and their divergence; the gradient overwrites the logits

A row is passed over in blocks, and stays in the cache between the passes: 64 KB in bfloat16 for a
draft vocabulary of 32,000. The programs of one label's steps are neighbours, for they read the same
teacher. Sums are in float32.

Shapes: K steps, c labels of a chunk, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pipeline.config.train import TV_SHARE, Loss
from pipeline.decoder.ops.triton.launch import Block, Pointer, Scalar, Table, jit, start_kernel

#: Logits of one block, sixteen a thread. Not fewer for short rows: where threads are left over,
#: several read the same logit, and one may do so when it is a gradient already.
_BLOCK, _WARPS = 4096, 8


#: A logit without probability; unlike that of -inf, its logarithm times zero is zero.
_NONE = tl.constexpr(-1e30)


_TV_SHARE = tl.constexpr(TV_SHARE)


def compare_in_place(
    logits: Tensor,
    teacher_logits: Tensor,
    scales: Tensor,
    draft_ids: Tensor,
    loss: Loss,
    overlaps: Tensor | None = None,
    *,
    start: Callable[..., None] = start_kernel,
) -> tuple[Tensor, Tensor]:
    """Scaled sum of the divergences, and hits [K]; gradients overwrite the logits [K, c, Vd].

    teacher_logits [c, Vd], scales [K, c] float32, draft_ids [K, c], overlaps [K, c] to overwrite.
    """
    steps, labels, size = logits.shape
    assert logits.is_contiguous() and teacher_logits.is_contiguous()
    normaliser = scales.new_empty(labels)
    start(
        normaliser_kernel, (labels,), (teacher_logits, normaliser), _WARPS, 1,
        SIZE=size, BLOCK=_BLOCK,
    )  # fmt: skip
    divergences, hits = scales.new_empty(steps, labels), draft_ids.new_empty(steps, labels)
    shared = divergences if overlaps is None else torch.empty_like(divergences)
    read = teacher_logits, normaliser, scales.contiguous(), draft_ids.contiguous()
    written = divergences, hits, shared
    start(
        compare_kernel, (steps * labels,), (logits, *read, *written, steps, labels),
        _WARPS, 1, SIZE=size, BLOCK=_BLOCK, LOSS=loss, OVERLAPS=overlaps is not None,
    )  # fmt: skip
    if overlaps is not None:
        overlaps.copy_(shared)
    return divergences.sum(), hits.sum(1)


@jit
def normaliser_kernel(
    logits: Pointer, normaliser: Pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """log Σ exp of one row of [c, SIZE]; grid [c]."""
    row = tl.program_id(0).to(tl.int64)
    peak, mass = _peak_and_mass(logits + row * SIZE, SIZE, BLOCK)
    tl.store(normaliser + row, peak + tl.log(mass))


@jit
def compare_kernel(
    logits: Pointer,
    teacher_logits: Pointer,
    normaliser: Pointer,
    scales: Table,
    draft_ids: Table,
    divergences: Pointer,
    hits: Pointer,
    overlaps: Pointer,
    steps: Scalar,
    labels: Scalar,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOSS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One row of logits [K, c, SIZE] becomes its gradient; grid [c·K], a label's steps together."""
    label = tl.program_id(0) // steps
    row = tl.program_id(0) % steps * labels + label
    logits += row.to(tl.int64) * SIZE
    teacher_logits += label.to(tl.int64) * SIZE
    scale, teacher_normaliser = tl.load(scales + row), tl.load(normaliser + label)
    peak, mass = _peak_and_mass(logits, SIZE, BLOCK)
    head_normaliser = peak + tl.log(mass)
    first = tl.full((), SIZE, tl.int32)  # of the largest logits
    divergence = tl.zeros((), tl.float32)  # what losses.py says of the loss
    overlap, leaning = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    if LOSS == "ce_tv":
        for begin in range(0, SIZE, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            log_q = _log_of(logits, column, SIZE, head_normaliser)
            q, p = tl.exp(log_q), tl.exp(_log_of(teacher_logits, column, SIZE, teacher_normaliser))
            leaning += tl.sum(q * _sign(q - p), axis=0)
    for begin in range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < SIZE
        z = tl.load(logits + column, mask=inside, other=_NONE).to(tl.float32)
        log_q = z - head_normaliser
        log_p = _log_of(teacher_logits, column, SIZE, teacher_normaliser)
        q, p = tl.exp(log_q), tl.exp(log_p)
        first = tl.minimum(first, tl.min(tl.where(z == peak, column, SIZE), axis=0))
        lost = p * (log_p - log_q if LOSS == "kl" else -log_q)
        slope = q - p
        if LOSS == "ce_tv":
            lost = (1 - _TV_SHARE) * lost + _TV_SHARE / 2 * tl.abs(slope)
            slope = (1 - _TV_SHARE) * slope + _TV_SHARE / 2 * q * (_sign(slope) - leaning)
        divergence += tl.sum(lost, axis=0)
        if OVERLAPS:
            overlap += tl.sum(tl.minimum(q, p), axis=0)
        slope *= scale
        tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=inside)
    tl.store(divergences + row, scale * divergence)
    if OVERLAPS:
        tl.store(overlaps + row, overlap)
    tl.store(hits + row, (first == tl.load(draft_ids + row)).to(tl.int64))


@jit
def _log_of(row: Pointer, column: Block, SIZE: tl.constexpr, normaliser: Scalar) -> Block:
    """Log-probabilities of some columns of a row; `_NONE` or less where there are none."""
    logit = tl.load(row + column, mask=column < SIZE, other=_NONE).to(tl.float32)
    return tl.maximum(logit, _NONE) - normaliser


@jit
def _sign(x: Block) -> Block:
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@jit
def _peak_and_mass(row: Pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> tuple[Block, Block]:
    """The largest logit x of a row and Σ exp(logit - x), in one pass.

    (Milakov & Gimelshein 2018, arXiv:1805.02867.)
    """
    # Not of -inf, which a whole block of logits may be: their difference would be no number.
    peak, mass = tl.full((), _NONE, tl.float32), tl.zeros((), tl.float32)
    for begin in range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < SIZE, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        mass = mass * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), axis=0)
        peak = higher
    return peak, mass
