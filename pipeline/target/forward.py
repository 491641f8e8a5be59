"""Which states are captured, and one packed forward that captures them.

The residual stream of a target with L layers; id i is the output of decoder layer i:

    embed ─ layer 0 ─┬─ layer 1 ─ … ─┬─ layer m ─ … ─┬─ layer h ─ … ─ layer L-1 ─ norm ─┬─ lm_head
                    id 0            id 1 = low      id m = middle   id h = high     final state

    aux states   [T, 3H] = concat(low, middle, high)
    final state  [T, H], after the last norm: lm_head(final) are the target's logits

Documents are packed into one row without padding; attention stays inside each document:

    tokens     a0 a1 a2 b0 b1            a attends to a only, b to b only;
    positions   0  1  2  0  1            no mask is built, each document is one causal call
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import UnsupportedModel
from pipeline.target.load import LoadedTarget

#: Name under which the packed attention is registered with transformers.
PACKED_ATTENTION = "eagle3_packed"
#: transformers' own, for the same states by another way.
_REFERENCE_ATTENTION = "sdpa"
#: What some families pass to their attention and the packed one does not compute.
_UNSUPPORTED = ("softcap", "s_aux", "attention_chunk_size")

_lengths: list[int] = []  # of the documents in the forward that is running


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention per document.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] → [1, T, heads, d]. With a sliding
    window, position i attends to the last `sliding_window` positions, itself included.
    Raises UnsupportedModel for attention that is more than that.
    """
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if unsupported:
        names = ", ".join(unsupported)
        problem = f"its attention uses {names}, which packed capture does not compute"
        fix = "choose a target with plain causal or sliding-window attention"
        raise UnsupportedModel(problem, where=f"target: {type(module).__name__}", fix=fix)
    split = (torch.split(x, _lengths, dim=2) for x in (query, key, value))
    documents = zip(*split, strict=True)
    outputs = [_attend(q, k, v, scaling, sliding_window) for q, k, v in documents]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """One document."""
    length, grouped = query.shape[2], key.shape[1] != query.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device)  # [query, key]
    visible = visible.tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scaling, enable_gqa=grouped
    )


def register_packed_attention() -> str:
    """Make `PACKED_ATTENTION` known to transformers; returns the name for `attn_implementation`."""
    from transformers import AttentionInterface

    # No mask function goes with it: transformers then builds no mask at all.
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def capture_states(
    target: LoadedTarget, documents: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """(aux [T, 3H], final [T, H]) of each document, from one packed forward.

    Both are in the target's dtype and on its device. The target must have been loaded with
    `attention=register_packed_attention()`. Its layers may be on several devices.
    """
    backbone = target.model.get_decoder()
    packed = backbone.config._attn_implementation == PACKED_ATTENTION
    assert packed, "load the target with the packed attention"
    _lengths[:] = [len(document) for document in documents]
    flat = [token for document in documents for token in document]
    aux, final = _forward(target, flat, torch.cat([torch.arange(length) for length in _lengths]))
    return list(zip(torch.split(aux, _lengths), torch.split(final, _lengths), strict=True))


def capture_alone(target: LoadedTarget, document: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(aux [T, 3H], final [T, H]) of one document, by transformers' own attention and masks."""
    with _attention(target.model, _REFERENCE_ATTENTION):
        return _forward(target, document, torch.arange(len(document)))


@torch.inference_mode()
def _forward(
    target: LoadedTarget, token_ids: Sequence[int], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """aux [T, 3H] and final [T, H] of one row of T tokens at `positions` [T]."""
    backbone = target.model.get_decoder()
    layers, capture_layers = _decoder_layers(backbone), target.contract.capture_layers
    captured: dict[int, Tensor] = {}
    hooks = [
        layers[index].register_forward_hook(_capture_hook(captured, index))
        for index in capture_layers
    ]
    try:
        output = backbone(
            input_ids=torch.tensor([token_ids], device=target.device),  # [1, T]
            position_ids=positions[None].to(target.device),  # [1, T]
            use_cache=False,
        )
    finally:
        for hook in hooks:
            hook.remove()
    states = [captured[index].to(target.device) for index in capture_layers]
    aux = torch.cat(states, dim=-1)  # [1, T, 3H]
    return aux[0], output.last_hidden_state[0].to(target.device)


def _decoder_layers(backbone: Any) -> Any:
    """The list of decoder layers. Raises UnsupportedModel for a model that keeps them elsewhere."""
    layers = getattr(backbone, "layers", None)
    if layers is None:
        problem, where = "has no list `layers` in its decoder", f"target: {type(backbone).__name__}"
        raise UnsupportedModel(problem, where=where, fix="choose a decoder-only language model")
    return layers


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """Another attention for the time of the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _capture_hook(captured: dict[int, Tensor], index: int) -> Any:
    def capture(_module: Any, _inputs: Any, output: Any) -> None:
        captured[index] = output[0] if isinstance(output, tuple) else output

    return capture
