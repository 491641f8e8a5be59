"""Memory of one training process, by ZeRO stage, as DeepSpeed holds it for torch's AdamW."""

from __future__ import annotations

from pipeline.config import TrainSection
from pipeline.planning.heads import HeadSize
from pipeline.planning.targets import TargetShape
from pipeline.records import ZeroMemory, ZeroStage

ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
#: Numbers in DeepSpeed's reduce bucket (stages 1 to 3), and at most gathered at once (stage 3).
_BUCKET, _LIVE = 500_000_000, 1_000_000_000
#: Logits held at one time; train/ttt/divergence.py.
CHUNK_LOGITS = 8 << 20


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

    bf16: weights and gradients of 2 bytes; master, two moments, and while the optimiser steps a
    gradient, of 4. fp32: all of 4; without ZeRO the weights are their own master.
    """
    count, width = head.parameters, 2 if bf16 else 4
    share = count / ranks
    master = 4 if bf16 or stage else 0
    held = share if stage >= 1 else count  # optimiser state
    gathered = min(count, _LIVE) * width if stage == 3 else 0
    return ZeroMemory(
        stage=stage,
        weights=round((share if stage == 3 else count) * width),
        gradients=round((share if stage >= 2 else count) * width),
        optimiser=round(held * (master + 8)),
        stepping=round(held * 4) if bf16 else 0,
        buffers=min(count, _BUCKET) * width * bool(stage) + gathered,
        frozen=(target.vocabulary + head.draft_vocabulary) * head.hidden * width,
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
    hidden, steps, tokens = head.hidden, section.ttt_steps, section.batch_tokens
    step = 7 * hidden + 2 * head.queries + 2 * head.keys + 3 * head.intermediate
    every = steps * step + 2 * head.keys * steps * (steps - 1) // 2
    if section.activation_checkpointing:
        every = step + 2 * head.keys * (steps - 1) + steps * (3 * hidden + 2 * head.keys)
    once = 4 * hidden  # the aux states and fc's output
    loss = 3 * hidden * steps
    logits = min(CHUNK_LOGITS, tokens * steps * head.draft_vocabulary)
    kept = tokens * (every + once + loss) + logits
    return kept * width + tokens * step * 4 + 4 * head.lm_head


def start_bytes(section: TrainSection, head: HeadSize, target: TargetShape) -> int:
    """Of a start by least squares; 0 without.

    The embedding in the type it is stored in and in float32. Then either the sums of 4H by 4H in
    float64, scaled and factored, and 4H by H three times; or those of I by I in float32, four
    times.
    """
    if section.start_from or section.head_config.init_layer != "least_squares":
        return 0
    hidden, wide = head.hidden, head.intermediate
    linear = 8 * (3 * (4 * hidden) ** 2 + 3 * 4 * hidden * hidden)
    mlp = 4 * 4 * wide * wide
    return (2 + 4) * target.vocabulary * hidden + max(linear, mlp)


def step_traffic(head: HeadSize, *, stage: ZeroStage, ranks: int, bf16: bool) -> float:
    """Bytes that a process sends for one optimiser step: ring all-reduce, or what stands for it.

    Stage 0 reduces gradients everywhere, 1 and 2 reduce them to their owners and gather weights: 2
    a parameter each; stage 3 gathers weights twice.
    """
    passes = 3 if stage == 3 else 2
    return passes * head.parameters * (2 if bf16 else 4) * (ranks - 1) / ranks
