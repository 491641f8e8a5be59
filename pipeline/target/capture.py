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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.target.load import LoadedTarget

#: Name under which the packed attention is registered with transformers.
PACKED_ATTENTION = "eagle3_packed"

_lengths: list[int] = []  # of the documents in the forward that is running


def packed_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float, **_: Any) -> tuple[Tensor, None]:
    """Causal attention per document. query [1, heads, T, d], key and value [1, kv_heads, T, d] → [1, T, heads, d]."""
    spans = [(query, key, value)] if len(_lengths) == 1 else zip(*(torch.split(part, _lengths, dim=2) for part in (query, key, value)), strict=True)
    shared = key.shape[1] != query.shape[1]
    outputs = [torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared) for q, k, v in spans]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def register_packed_attention() -> str:
    """Make `PACKED_ATTENTION` known to transformers; returns the name for `attn_implementation`."""
    from transformers import AttentionInterface

    # No mask function goes with it: transformers then builds no mask at all.
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


@torch.inference_mode()
def capture_states(target: LoadedTarget, documents: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """(aux [T, 3H], final [T, H]) of each document, in the target's dtype, from one packed forward.

    The target must have been loaded with `attention=register_packed_attention()`.
    """
    backbone = target.model.get_decoder()
    assert backbone.config._attn_implementation == PACKED_ATTENTION, "load the target with the packed attention"
    caught: dict[int, Tensor] = {}
    hooks = [backbone.layers[layer].register_forward_hook(_keeper(caught, layer)) for layer in target.contract.capture_layers]
    _lengths[:] = [len(document) for document in documents]
    flat = [token for document in documents for token in document]
    positions = torch.cat([torch.arange(length) for length in _lengths])
    try:
        output = backbone(
            input_ids=torch.tensor([flat], device=target.device),  # [1, T]
            position_ids=positions[None].to(target.device),  # [1, T]
            use_cache=False,
        )
    finally:
        for hook in hooks:
            hook.remove()
    aux = torch.cat([caught[layer] for layer in target.contract.capture_layers], dim=-1)[0]  # [T, 3H]
    final = output.last_hidden_state[0]  # [T, H]
    return list(zip(torch.split(aux, _lengths), torch.split(final, _lengths), strict=True))


def _keeper(caught: dict[int, Tensor], layer: int) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        caught[layer] = output[0] if isinstance(output, tuple) else output

    return keep
