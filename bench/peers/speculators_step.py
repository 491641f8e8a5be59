"""speculators' model and loss, in torch's AdamW: dense masks, as its flex attention wants a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from speculators import SpeculatorsConfig, VerifierConfig  # type: ignore[import-not-found]
from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
from speculators.models.eagle3 import (  # type: ignore[import-not-found]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)
from speculators.proposals.greedy import (  # type: ignore[import-not-found]
    GreedyTokenProposalConfig,
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
    """The step: documents joined to one row, position i with token i + 1 and its teacher."""
    layer = LlamaConfig(**LAYER, num_hidden_layers=1)
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT,
        norm_before_residual=False,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    tensors, model = inputs(dtype), Eagle3DraftModel(config)
    model.load_vocab_mappings(torch.arange(VOCABULARY) < DRAFT, torch.zeros(DRAFT).long())
    model = model.to(dtype)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(tensors["rows"])
        model.verifier_lm_head.weight.copy_(tensors["rows"][:DRAFT])
    model.verifier_lm_head.weight.requires_grad_(False)
    losses = resolve_loss_config("kl_div", "eager")
    documents = torch.arange(DOCUMENTS).repeat_interleave(LENGTH)[None]
    positions = torch.arange(LENGTH).repeat(DOCUMENTS)[None]

    def loss() -> Tensor:
        _, total, _ = model(
            hidden_states=tensors["aux_states"].flatten(0, 1)[None],
            input_ids=tensors["token_ids"].flatten().roll(-1)[None],
            document_ids=documents,
            loss_mask=supervised_mask().flatten().roll(-1)[None].bool(),
            position_ids=positions,
            verifier_last_hidden_states=tensors["final_states"].flatten(0, 1).roll(-1, 0)[None],
            ttt_steps=STEPS,
            ttt_step_loss_decay=DECAY,
            loss_config=losses,
        )
        return torch.as_tensor(total)

    return optimised(model, loss)


if __name__ == "__main__":
    serve(make)
