"""Chained heads: K layers of multi-token prediction, one a step (DeepSeek-V3, arXiv:2412.19437,
§2.2), with the names that MiMo's checkpoints have (arXiv:2505.07608, §2.2).

    aux states [.., L·H] ──fc──► h0        or: the target's final state is h0
                                 │
    embedding of x[t+k+1] ──► token_layernorm ──┐
    h(k) [.., H] ──► hidden_layernorm ──────────┴─concat─► input_proj ─► layer k ─► final_layernorm
                                                                                        │
                                         h(k+1), of the next head  ◄────────────────────┴─► lm_head

Head k reads, at position t, the embedding of token t+k+1 and what the head before gave at t; it
attends to its own keys at positions ≤ t, and proposes token t+k+2. So each is a causal layer over
inputs of its own, and nothing of what it sees is drafted while the text goes on:

    position      0    1    2    3               proposes from position 3
    head 0        x1   x2   x3   x4              x5
    head 1        x2   x3   x4   x5              x6
    head 2        x3   x4   x5   x6              x7

Steps behind the last head's are that head, unrolled on its own outputs. The embedding at position 0
is zero, which is what those servers compute. lm_head and draft vocabulary are shared by all.

Shapes: H hidden size, V target and Vd draft vocabulary, Q query heads, G key/value heads, d head
size; `..` any leading dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pipeline.heads.base import AttentionProjections, DraftingHead, DraftShape, RmsNorm, SwiGluMlp


class ChainedShape(DraftShape):
    """Of chained heads."""

    heads: int = Field(gt=0, le=64)  # K
    chain_input: Literal["aux", "final"] = "aux"  # what head 0 reads
    attention_bias: bool = False  # of queries, keys and values, as Qwen2's


class ChainedLayer(nn.Module):
    """One head, but for lm_head."""

    def __init__(self, shape: ChainedShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm = RmsNorm(size, eps)
        self.hidden_layernorm = RmsNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)  # reads [hidden ; token]
        self.input_layernorm = RmsNorm(size, eps)
        self.self_attn = AttentionProjections(shape, size, bias=shape.attention_bias)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = SwiGluMlp(shape)
        self.final_layernorm = RmsNorm(size, eps)

    def normed_inputs(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What `input_proj` reads [.., 2H], of [.., H] each."""
        return torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedding)), dim=-1)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Embedding and hidden [.., H] → the residual stream at the layer's entry [.., H]."""
        return torch.as_tensor(self.input_proj(self.normed_inputs(embedding, hidden)))

    def project_qkv(
        self, joined: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """joined [.., H] → query [.., Q, d] of all or of `rows`, key and value [.., G, d]."""
        return self.self_attn.project_qkv(self.input_layernorm(joined), rows)

    def after_attention(self, joined: Tensor, attention_output: Tensor) -> Tensor:
        """joined [.., H], attention output [.., Q, d] → normed output [.., H]."""
        stream = joined + self.self_attn.project_output(attention_output)
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        return torch.as_tensor(self.final_layernorm(stream))


class ChainedHead(DraftingHead):
    """Parameters and maths of all heads of a chain."""

    shape: ChainedShape
    target_norm: Tensor  # [H] of the target's last norm, where head 0 reads its final state

    def __init__(self, shape: ChainedShape) -> None:
        super().__init__()
        self.shape = shape
        if shape.chain_input == "aux":
            self.fc = nn.Linear(shape.aux_layers * shape.hidden_size, shape.hidden_size, bias=False)
        else:
            self.register_buffer("target_norm", torch.ones(shape.hidden_size))
        self.mtp_layers = nn.ModuleList(ChainedLayer(shape) for _ in range(shape.heads))
        self._add_vocabulary(shape)

    @property
    def layers(self) -> list[ChainedLayer]:
        """The heads in order."""
        return [layer for layer in self.mtp_layers if isinstance(layer, ChainedLayer)]

    @property
    def aux_projection(self) -> nn.Linear | None:
        return self.fc if self.shape.chain_input == "aux" else None

    def project(self, aux_states: Tensor) -> Tensor:
        """Aux states [.., L · H] → what head 0 reads [.., H].

        The high one is the last layer's output where that is the target's final state.
        """
        if self.shape.chain_input == "aux":
            return torch.as_tensor(self.fc(aux_states))
        size = self.shape.hidden_size
        high = aux_states[..., -size:]
        return F.rms_norm(high, (size,), self.target_norm.to(high.dtype), self.shape.rms_norm_eps)

    def logits(self, output: Tensor) -> Tensor:
        """Output of a head [.., H] → logits over the draft vocabulary [.., Vd]."""
        return torch.as_tensor(self.lm_head(output))


SHAPE, HEAD = ChainedShape, ChainedHead
