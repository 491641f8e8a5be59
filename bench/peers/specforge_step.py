"""SpecForge's model and loss, in torch's AdamW: its `sdpa` attention is the one that runs on CPUs.

Its teacher is computed from final states in the draft vocabulary (`target_hidden_for_compact`),
which is the cheaper of its two ways. Its loss is a Triton kernel, which wants a GPU; here it is the
reference in torch that stands beside that.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from specforge.algorithms.eagle3 import model as eagle3  # type: ignore[import-not-found]
from specforge.core.loss import _compute_loss  # type: ignore[import-not-found]
from specforge.modeling.draft.llama3_eagle import (  # type: ignore[import-not-found]
    LlamaForCausalLMEagle3,
)
from torch import Tensor
from transformers import LlamaConfig

from bench.peers.turns import (
    DECAY,
    DOCUMENTS,
    DRAFT,
    LAYER,
    LENGTH,
    STEPS,
    VOCABULARY,
    inputs,
    optimised,
    serve,
    supervised_mask,
)


def make(dtype: torch.dtype) -> Callable[[], None]:
    """The step."""
    config = LlamaConfig(**LAYER, num_hidden_layers=1, pad_token_id=0)
    config.draft_vocab_size = DRAFT
    tensors = inputs(dtype)
    head = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(dtype)
    head.embed_tokens.weight.data.copy_(tensors["rows"])
    head.embed_tokens.weight.requires_grad_(False)
    head.t2d.copy_(torch.arange(VOCABULARY) < DRAFT)
    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    model = eagle3.OnlineEagle3Model(head, length=STEPS, attention_backend="sdpa")
    mask = supervised_mask()[..., None]

    def loss() -> Tensor:
        losses, *_ = model(
            input_ids=tensors["token_ids"],
            attention_mask=torch.ones(DOCUMENTS, LENGTH, dtype=torch.bool),
            target=None,
            loss_mask=mask,
            hidden_states=tensors["aux_states"],
            target_hidden_for_compact=tensors["final_states"],
            target_head_weight=tensors["rows"],
        )
        total = sum(DECAY**step * each for step, each in enumerate(losses))
        return torch.as_tensor(total)

    return optimised(model, loss)


if __name__ == "__main__":
    serve(make)
