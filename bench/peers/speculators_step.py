"""speculators' model, loss, optimisers and schedule: dense masks, as flex attention wants a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig  # type: ignore[import-not-found]
from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
from speculators.models.eagle3 import (  # type: ignore[import-not-found]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)
from speculators.models.eagle3.data import shift_batch  # type: ignore[import-not-found]
from speculators.proposals.greedy import (  # type: ignore[import-not-found]
    GreedyTokenProposalConfig,
)
from speculators.train.optimizers import build_optimizers  # type: ignore[import-not-found]
from speculators.train.trainer import TrainerConfig  # type: ignore[import-not-found]
from torch import Tensor
from transformers import LlamaConfig, get_linear_schedule_with_warmup

from bench.peers.samples import Sample, Samples
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

#: What `speculators train` has by default for EAGLE-3, but for its window, which is longer than
#: any sample here.
_NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
_CLIP = 1.0
_WARM_UP = 100  # one of so many steps


class HeadTrainer:
    """A head in float32 under bfloat16 autocast, with Muon for its matrices."""

    def __init__(self, samples: Samples, settings: dict[str, Any], steps: int) -> None:
        t2d, d2t = samples.marks()
        rows = samples.embedding.float(), samples.lm_head.float()[samples.draft_ids]
        self._model = _model(samples.layer, *rows, t2d, d2t, settings["steps"], _NORMS)
        self._model.verifier_norm = torch.nn.Identity()  # final states are normed
        rate = settings["rate"]
        config = TrainerConfig(lr=rate, num_epochs=settings["passes"], save_path="")
        self._optimizers = build_optimizers(
            self._model, config._replace(optimizer="muon", muon_lr=rate)
        )
        self._schedules = [
            get_linear_schedule_with_warmup(each, steps // _WARM_UP, steps)  # type: ignore[no-untyped-call]
            for each in self._optimizers
        ]
        self._unroll = settings["steps"], settings["decay"]

    def step(self, batch: list[Sample]) -> None:
        """Documents joined to one row: position i has token i + 1 and its teacher."""
        shifted = [
            shift_batch(
                {
                    "input_ids": sample.token_ids,
                    "hidden_states": sample.aux_states,
                    "verifier_last_hidden_states": sample.final_states,
                    "loss_mask": sample.supervised.bool(),
                    "lengths": torch.tensor([len(sample.token_ids)]),
                    "position_ids": torch.arange(len(sample.token_ids)),
                }
            )
            for sample in batch
        ]
        lengths = torch.cat([each.pop("lengths") for each in shifted])
        row = {name: torch.cat([each[name] for each in shifted])[None] for name in shifted[0]}
        row["document_ids"] = torch.arange(len(batch)).repeat_interleave(lengths)[None]
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = _loss(self._model, row, *self._unroll)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
        for each in (*self._optimizers, *self._schedules):
            each.step()

    def save(self, folder: Path) -> None:
        self._model.to(torch.bfloat16).save_pretrained(folder)


def make(dtype: torch.dtype) -> Callable[[], None]:
    """The step: documents joined to one row, position i with token i + 1 and its teacher."""
    tensors = inputs(dtype)
    t2d, d2t = torch.arange(VOCABULARY) < DRAFT, torch.zeros(DRAFT).long()
    rows = tensors["rows"], tensors["rows"][:DRAFT]
    model = _model(LAYER, *rows, t2d, d2t, STEPS, {"norm_before_residual": False})
    row = {
        "hidden_states": tensors["aux_states"].flatten(0, 1)[None],
        "input_ids": tensors["token_ids"].flatten().roll(-1)[None],
        "document_ids": torch.arange(DOCUMENTS).repeat_interleave(LENGTH)[None],
        "loss_mask": supervised_mask().flatten().roll(-1)[None].bool(),
        "position_ids": torch.arange(LENGTH).repeat(DOCUMENTS)[None],
        "verifier_last_hidden_states": tensors["final_states"].flatten(0, 1).roll(-1, 0)[None],
    }
    return optimised(model, lambda: _loss(model, row, STEPS, DECAY))


def _model(
    layer: dict[str, Any],
    embedding: Tensor,
    lm_head: Tensor,
    t2d: Tensor,
    d2t: Tensor,
    steps: int,
    norms: dict[str, bool],
) -> Any:
    """Its head, of the embedding's type; embedding and output layer are the target's, and stay."""
    config = LlamaConfig(**{**layer, "num_hidden_layers": 1})
    config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=len(d2t),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
            **norms,
        )
    )
    model.load_vocab_mappings(t2d, d2t)
    model = model.to(embedding.dtype)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(lm_head)
        model.verifier_lm_head.weight.copy_(lm_head)
    return model


def _loss(model: Any, row: dict[str, Tensor], steps: int, decay: float) -> Tensor:
    losses = resolve_loss_config("kl_div", "eager")
    _, total, _ = model(**row, ttt_steps=steps, ttt_step_loss_decay=decay, loss_config=losses)
    return torch.as_tensor(total)


if __name__ == "__main__":
    serve(make)
