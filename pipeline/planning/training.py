"""Memory of one training process, by ZeRO stage, as DeepSpeed holds it for torch's AdamW.

Muon holds one moment of a matrix where AdamW holds two: the figures are then an upper bound.
"""

from __future__ import annotations

from pipeline.config import TrainSection
from pipeline.config.train import ACCEPTANCE_LOSSES
from pipeline.heads.registry import solves_least_squares
from pipeline.planning.heads import BlockHeadSize, HeadSize
from pipeline.planning.targets import TargetShape
from pipeline.records import ZeroMemory, ZeroStage

ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1)
#: Numbers in DeepSpeed's reduce bucket.
_BUCKET = 500_000_000
#: Logits held at one time on CUDA; learning/losses.py.
CHUNK_LOGITS = 128 << 20
#: Strengths of a ridge, and numbers that they are compared by at most; learning/least_squares.py.
RIDGE_STRENGTHS, RIDGE_COMPARED = 5, 1024


def zero_memory(
    section: TrainSection,
    head: HeadSize,
    target: TargetShape,
    *,
    stage: ZeroStage,
    ranks: int,
    bf16: bool,
) -> ZeroMemory:
    """Of one of `ranks` processes.

    Weights, gradients and two moments of 4 bytes; in bf16 a copy of the weights and its gradients
    of 2 as well. ZeRO 1 splits the moments, and with them a second copy of the weights of 4 bytes
    and, while the optimiser steps, one of the gradients. The first process may average: 4 more.
    """
    count, width = head.parameters, 2 if bf16 else 4
    copy = 2 if bf16 else 0
    share, averages = count / ranks, 4 * count if section.ema_decay else 0
    rows = target.vocabulary if section.loss in ACCEPTANCE_LOSSES else head.draft_vocabulary
    return ZeroMemory(
        stage=stage,
        weights=count * (4 + copy),
        gradients=count * (4 + copy),
        optimiser=averages + (round(share * 12) if stage else count * 8),
        stepping=round(share * 4) if stage else 0,
        buffers=min(count, _BUCKET) * 4 if stage else 0,
        frozen=(target.vocabulary + rows) * head.hidden * width,
        activations=activation_bytes(section, head, width=width),
    )


def activation_bytes(section: TrainSection, head: HeadSize, *, width: int) -> int:
    """Of a micro-batch, as if every token were supervised, until its backward pass is done.

    Each token and step keeps: the layer's two inputs, their norms side by side (2H), queries, keys,
    values and what attention gives, the residual behind it and its norm, gate, up and their
    product, the output; step k also its chain of k keys and values side by side. With activation
    checkpointing one step of these, of the others the two inputs, the output, and the keys and
    values. The loss keeps three of H a token and step, a chunk of logits, and lm_head's gradient in
    float32. The backward pass holds a step's gradients, again in float32.
    """
    if isinstance(head, BlockHeadSize):
        return _block_activation_bytes(section.batch_tokens, head, width=width)
    hidden, steps, tokens = head.hidden, section.ttt_steps, section.batch_tokens
    step = 7 * hidden + 2 * head.queries + 2 * head.keys + 3 * head.intermediate
    every = steps * step + 2 * head.keys * steps * (steps - 1) // 2
    if section.activation_checkpointing:
        every = step + 2 * head.keys * (steps - 1) + steps * (3 * hidden + 2 * head.keys)
    every += steps * 2 * hidden if section.dropout else 0  # its factors, recomputed or not
    once = 4 * hidden  # the aux states and fc's output
    loss = 3 * hidden * steps
    logits = min(CHUNK_LOGITS, tokens * steps * head.draft_vocabulary)
    kept = tokens * (every + once + loss) + logits
    return kept * width + tokens * step * 4 + 4 * head.lm_head


def _block_activation_bytes(tokens: int, head: BlockHeadSize, *, width: int) -> int:
    """Likewise of blocks, as if the micro-batch were one document.

    Each block token and layer keeps its input and norms, queries, keys, values and what attention
    gives, gate, up and their product, and its scores and weights over the context; each token the
    context's state, keys and values. Every position of the loss keeps lm_head's gradient.
    """
    rows = round(tokens * head.anchors_per_token) * head.block
    scores = 2 * head.queries // head.head_dim * (tokens + head.block)
    layer = 6 * head.hidden + 3 * head.queries + 2 * head.keys + 3 * head.intermediate + scores
    context = 5 * head.hidden + 4 * head.keys * head.layers
    logits = min(CHUNK_LOGITS, rows * head.draft_vocabulary // head.block)
    kept = rows * (layer * head.layers + 3 * head.hidden) + tokens * context + logits
    return kept * width + 4 * head.lm_head * (head.block - 1)


def start_bytes(section: TrainSection, head: HeadSize, target: TargetShape) -> int:
    """Of a start by least squares; 0 without.

    The embedding in the type it is stored in and in float32. Then, for the larger P of both
    regressions: sums of P by P and P by H in float32, the former factored in float64, a solution,
    and of the numbers that strengths are compared by one for each, and a block in float64.
    """
    if not solves_least_squares(section):
        return 0
    hidden = head.hidden
    most = max(4 * hidden, _second_regressors(head))
    sums = 12 * most**2 + 8 * most * hidden
    sums += (4 * RIDGE_STRENGTHS + 8) * most * min(hidden, RIDGE_COMPARED)
    return (2 + 4) * target.vocabulary * hidden + sums


def start_flops(section: TrainSection, head: HeadSize, tokens: int) -> float:
    """Of a start by least squares on the rows that it wants, of the `tokens` that there are as if
    each were supervised, all in float32; 0 without.

    For the P of both regressions: products of P by P, of which a half is enough, and of P by H, a
    Cholesky factor for each strength and one for the solution. One forward pass of the head.
    """
    if not solves_least_squares(section):
        return 0.0
    regressors = 4 * head.hidden
    asked = section.head_config.init_tokens if section.algorithm == "eagle3" else None
    rows = min(tokens, asked or 30 * regressors)
    second = rows
    if isinstance(head, BlockHeadSize):
        second = round(rows * head.anchors_per_token * (head.block - 1))
    solved = sum(
        count * size * (size + 2 * head.hidden) + (RIDGE_STRENGTHS + 1) * size**3 / 3
        for count, size in ((rows, regressors), (second, _second_regressors(head)))
    )
    return solved + rows * 2 * head.parameters


def _second_regressors(head: HeadSize) -> int:
    """What the second regression reads: of a head the MLP, of a block drafter what its attention
    gives."""
    return head.queries if isinstance(head, BlockHeadSize) else head.intermediate


def step_traffic(head: HeadSize, *, ranks: int) -> float:
    """Bytes that a process sends for one optimiser step, in float32.

    Stage 0 reduces gradients everywhere by a ring, stage 1 reduces them to their owners and gathers
    weights: each number is sent twice.
    """
    return 2 * head.parameters * 4 * (ranks - 1) / ranks
