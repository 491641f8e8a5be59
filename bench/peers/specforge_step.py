"""SpecForge's model and loss, optimiser and schedule: its `sdpa` attention is the one for CPUs.

Its teacher is computed from final states in the draft vocabulary (`target_hidden_for_compact`),
which is the cheaper of its two ways. Its loss is a Triton kernel, which wants a GPU; here it is the
reference in torch that stands beside that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from specforge.algorithms.eagle3 import model as eagle3  # type: ignore[import-not-found]
from specforge.core.loss import _compute_loss  # type: ignore[import-not-found]
from specforge.modeling.draft.llama3_eagle import (  # type: ignore[import-not-found]
    LlamaForCausalLMEagle3,
)
from specforge.optimizer import BF16Optimizer  # type: ignore[import-not-found]
from specforge.utils import padding  # type: ignore[import-not-found]
from torch import Tensor
from transformers import LlamaConfig

from bench.peers.samples import Sample, Samples
from bench.peers.turns import (
    DECAY,
    DRAFT,
    LAYER,
    STEPS,
    VOCABULARY,
    inputs,
    optimised,
    serve,
    supervised_mask,
)

eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)


class HeadTrainer:
    """A head in bfloat16 with float32 copies of its weights, one sample a step, as its defaults."""

    def __init__(self, samples: Samples, settings: dict[str, Any], steps: int) -> None:
        t2d, d2t = samples.marks()
        self._model = _model(samples.layer, samples.embedding, t2d, d2t, settings["steps"])
        self._optimizer = BF16Optimizer(self._model, settings["rate"], total_steps=steps)
        self._decay, self._lm_head = settings["decay"], samples.lm_head

    def step(self, batch: list[Sample]) -> None:
        [sample] = batch
        token_ids, mask, aux, final = (each[None] for each in sample)
        mask[:, -1] = 0
        token_ids, final = padding(token_ids, left=False), padding(final, left=False)
        loss = _loss(self._model, token_ids, mask, aux, final, self._lm_head, self._decay)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def save(self, folder: Path) -> None:
        self._model.draft_model.save_pretrained(folder)


def make(dtype: torch.dtype) -> Callable[[], None]:
    """The step."""
    tensors = inputs(dtype)
    t2d, d2t = torch.arange(VOCABULARY) < DRAFT, torch.zeros(DRAFT).long()
    model = _model(LAYER, tensors["rows"], t2d, d2t, STEPS)

    def loss() -> Tensor:
        token_ids, aux, final, rows = tensors.values()
        return _loss(model, token_ids, supervised_mask(), aux, final, rows, DECAY)

    return optimised(model, loss)


def _model(layer: dict[str, Any], embedding: Tensor, t2d: Tensor, d2t: Tensor, steps: int) -> Any:
    """Its head, of the embedding's type, and the unrolling around it."""
    config = LlamaConfig(**{**layer, "num_hidden_layers": 1, "pad_token_id": 0})
    config.draft_vocab_size = len(d2t)
    head = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(embedding.dtype)
    head.embed_tokens.weight.data.copy_(embedding)
    head.embed_tokens.weight.requires_grad_(False)
    head.t2d.copy_(t2d)
    head.d2t.copy_(d2t)
    return eagle3.OnlineEagle3Model(head, length=steps, attention_backend="sdpa")


def _loss(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    aux: Tensor,
    final: Tensor,
    lm_head: Tensor,
    decay: float,
) -> Tensor:
    """Of documents [D, T]: position t reads aux state t and token t + 1, and final state t + 1 is
    its teacher."""
    losses, *_ = model(
        input_ids=token_ids,
        attention_mask=torch.ones(token_ids.shape, dtype=torch.bool),
        target=None,
        loss_mask=mask[..., None],
        hidden_states=aux,
        target_hidden_for_compact=final,
        target_head_weight=lm_head,
    )
    return torch.as_tensor(sum(decay**step * each for step, each in enumerate(losses)))


if __name__ == "__main__":
    serve(make)
