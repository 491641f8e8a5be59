"""What a round's pieces would take if only memory traffic or only arithmetic took time (Williams et al. 2009):

    floor = max(bytes / bandwidth, operations / flops)

where weights are read once whatever the batch is, and the context's keys and values once a row. What
is left out (norms, biases, embedding rows, activations) is small beside it. Units: seconds, bytes/s and
FLOP/s, a multiply-add being two. The pieces are those of `pipeline.decoder.tuning.cost`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.model import DecoderModel


def s_max(
    tau: float, t_ar: float, t_verify: float, t_draft: float, t_extend: float, steps: int
) -> float:
    """The speedup of τ tokens a round when every piece runs at its floor, and nothing else takes time."""
    return tau * t_ar / (t_verify + (steps - 1) * t_draft + t_extend)


def eta(measured_speedup: float, s_max: float) -> float:
    """η: the share of S_max that was reached."""
    return measured_speedup / s_max


def floor_seconds(
    model: DecoderModel, tokens: int, rows: int, context: int, bandwidth: float, flops: float
) -> float:
    """T_AR or T_verify at the roofline: a forward of `tokens` tokens a row, logits of all of them included."""
    config, size, layers = model.config, model.head_dim, len(model.layers)
    attention = (
        config.hidden_size * size * (2 * model.num_heads + 2 * model.kv_heads)
    )  # q and o, k and v
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    work = [(layers * layer + model.vocabulary * config.hidden_size, tokens)]
    entry = 2 * layers * model.kv_heads * size
    return _floor(
        work,
        entry,
        layers * model.num_heads * size,
        tokens,
        rows,
        context,
        model.dtype,
        bandwidth,
        flops,
    )


def draft_floor_seconds(
    drafter: Eagle3Drafter, beams: int, rows: int, context: int, bandwidth: float, flops: float
) -> float:
    """T_draft at the roofline: the head's layer and the draft vocabulary's logits for `beams` tokens a row."""
    layer, vocabulary, _ = _head_matrices(drafter)
    return _head_floor(
        drafter, [(layer, beams), (vocabulary, beams)], beams, rows, context, bandwidth, flops
    )


def extend_floor_seconds(
    drafter: Eagle3Drafter, steps: int, rows: int, context: int, bandwidth: float, flops: float
) -> float:
    """T_extend at the roofline: `fc` and the layer for steps + 1 tokens a row, logits for the last one."""
    layer, vocabulary, projection = _head_matrices(drafter)
    return _head_floor(
        drafter,
        [(layer + projection, steps + 1), (vocabulary, 1)],
        steps + 1,
        rows,
        context,
        bandwidth,
        flops,
    )


def _head_matrices(drafter: Eagle3Drafter) -> tuple[int, int, int]:
    """Parameters of the head's layer, of its lm_head, and of fc."""
    shape = drafter.shape
    hidden, size = shape.hidden_size, shape.head_dim
    queries, groups = shape.num_attention_heads * size, shape.num_key_value_heads * size
    layer = (
        2 * hidden * (queries + 2 * groups)
        + hidden * queries
        + 3 * hidden * shape.intermediate_size
    )
    return layer, shape.draft_vocab_size * hidden, 3 * hidden * hidden


def _head_floor(
    drafter: Eagle3Drafter,
    work: Sequence[tuple[int, int]],
    tokens: int,
    rows: int,
    context: int,
    bandwidth: float,
    flops: float,
) -> float:
    shape = drafter.shape
    entry, queries = (
        2 * shape.num_key_value_heads * shape.head_dim,
        shape.num_attention_heads * shape.head_dim,
    )
    return _floor(work, entry, queries, tokens, rows, context, drafter.dtype, bandwidth, flops)


def _floor(
    work: Sequence[tuple[int, int]],  # (parameters, tokens a row that pass through them)
    entry: int,  # numbers in the keys and values of one token
    queries: int,  # numbers in its queries
    tokens: int,
    rows: int,
    context: int,
    dtype: torch.dtype,
    bandwidth: float,
    flops: float,
) -> float:
    numbers = (
        sum(parameters for parameters, _ in work) + rows * (context + tokens) * entry
    )  # the prefix read, the new ones written
    operations = (
        rows * sum(2 * parameters * count for parameters, count in work)
        + 4 * rows * tokens * context * queries
    )  # QK and AV
    return max(numbers * dtype.itemsize / bandwidth, operations / flops)
