"""Which states are captured, and one packed forward that captures them.

The residual stream of a target with L layers; id i is the output of decoder layer i:

    embed ─ layer 0 ─┬─ layer 1 ─ … ─┬─ layer m ─ … ─┬─ layer h ─ … ─ layer L-1 ─ norm ─┬─ lm_head
                    id 0            id 1 = low      id m = middle   id h = high     final state

    aux states   [T, 3H] = concat(low, middle, high)
    final state  [T, H], after the last norm: lm_head(final) are the target's logits

Documents are packed into one row without padding; attention stays inside each document:

    tokens     a0 a1 a2 b0 b1            a attends to a only, b to b only;
    positions   0  1  2  0  1            no mask is built, each document is one causal call

Attention is torch's own where it is plain, causal or in a sliding window. What torch has no
argument for is computed from explicit scores, a block of queries at a time:

    softcap      cap · tanh(scores / cap)                       Gemma 2
    s_aux        a score per head that no key belongs to        gpt-oss' sinks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.target.architecture import decoder_of
from pipeline.target.load import LoadedTarget

#: Name under which the packed attention is registered with transformers.
PACKED_ATTENTION = "eagle3_packed"
#: Queries whose scores are held at once, where they are.
_BLOCK = 512

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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention per document.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] → [1, T, heads, d]. With a sliding
    window, position i attends to the last `sliding_window` positions, itself included. Llama 4's
    chunks are documents of their own. s_aux [heads] are sinks.
    """
    lengths = _pieces(_lengths, _chunk(module))
    split = (torch.split(x, lengths, dim=2) for x in (query, key, value))
    documents = zip(*split, strict=True)
    if softcap is None and s_aux is None:
        outputs = [_attend(q, k, v, scaling, sliding_window) for q, k, v in documents]
    else:
        outputs = [
            _attend_by_scores(q, k, v, scaling, sliding_window, softcap, s_aux)
            for q, k, v in documents
        ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _chunk(module: Any) -> int | None:
    """Length of the chunks that this layer's attention stays inside."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or index is None or kinds[index] != "chunked_attention":
        return None
    return int(module.config.attention_chunk_size)


def _pieces(lengths: Sequence[int], chunk: int | None) -> list[int]:
    """`lengths` with each cut after every `chunk`."""
    if chunk is None:
        return list(lengths)
    return [min(chunk, n - start) for n in lengths for start in range(0, n, chunk)]


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


def _attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One document, with what changes scores before or in their softmax."""
    heads, length = query.shape[1:3]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    outputs = []
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        first = max(0, start - (window or length))
        scores = query[:, :, start:end] @ key[:, :, first:end].transpose(2, 3) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        age = torch.arange(start, end, device=query.device)[:, None]
        age = age - torch.arange(first, end, device=query.device)  # [query, key]
        hidden = (age < 0) | (age >= (window or length))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, end - start, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32)[..., : end - first].to(value.dtype)
        outputs.append(weights @ value[:, :, first:end])
    return torch.cat(outputs, dim=2)


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
    config = decoder_of(target.model).config
    packed = config._attn_implementation == PACKED_ATTENTION
    assert packed, "load the target with the packed attention"
    if _counts_rows(config, sum(map(len, documents))) and len(documents) > 1:
        return [states for document in documents for states in capture_states(target, [document])]
    _lengths[:] = [len(document) for document in documents]
    flat = [token for document in documents for token in document]
    aux, final = _forward(target, flat, torch.cat([torch.arange(length) for length in _lengths]))
    return list(zip(torch.split(aux, _lengths), torch.split(final, _lengths), strict=True))


def _counts_rows(config: Any, tokens: int) -> bool:
    """Whether a row of so many tokens is scaled by the place in the row, as in Llama 4."""
    return bool(getattr(config, "attn_temperature_tuning", False)) and tokens >= config.floor_scale


def capture_alone(target: LoadedTarget, document: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(aux [T, 3H], final [T, H]) of one document, by transformers' own attention and masks."""
    own = "sdpa" if decoder_of(target.model)._supports_sdpa else "eager"
    with _attention(target.model, own):
        return _forward(target, document, torch.arange(len(document)))


def noise_gain(target: LoadedTarget, document: Sequence[int], final: Tensor) -> float:
    """How far noise of one step of bfloat16 at every layer's output moves the final states.

    final [T, H] are those of the document without noise; the result is their relative change, of
    which nine tokens in ten have less, in such steps. It grows with the depth of a target, and with
    how chaotic it is.
    """
    step, generator = float(torch.finfo(torch.bfloat16).eps), torch.Generator().manual_seed(0)

    def disturb(_module: Any, _inputs: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        noise = torch.randn(states.shape, generator=generator).to(states.device)
        noisy = (states.float() * (1 + step * noise)).to(states.dtype)
        return (noisy, *output[1:]) if isinstance(output, tuple) else noisy

    backbone = decoder_of(target.model)
    hooks = [layer.register_forward_hook(disturb) for layer in backbone.layers]
    try:
        ((_, noisy),) = capture_states(target, [document])
    finally:
        for hook in hooks:
            hook.remove()
    moved = (noisy.float() - final.float()).norm(dim=1) / final.float().norm(dim=1).clamp_min(1e-30)
    return float(moved.quantile(0.9)) / step


@torch.inference_mode()
def _forward(
    target: LoadedTarget, token_ids: Sequence[int], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """aux [T, 3H] and final [T, H] of one row of T tokens at `positions` [T]."""
    backbone, capture_layers = decoder_of(target.model), target.contract.capture_layers
    captured: dict[int, Tensor] = {}
    hooks = [
        backbone.layers[index].register_forward_hook(_capture_hook(captured, index))
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
