"""This package's optimiser step, through DeepSpeed: fp32 weights and sums, products in the type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.peers.turns import (
    CLIP,
    DECAY,
    DOCUMENTS,
    DRAFT,
    GROUPS,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LENGTH,
    RATE,
    SIZE,
    STEPS,
    VOCABULARY,
    inputs,
    loss_mask,
    serve,
)
from pipeline.config import TrainSection
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.eagle3.init import random_init
from pipeline.train.data.batches import TrainBatch
from pipeline.train.trainer import Trainer
from pipeline.train.ttt.model import Objective, TttModel


def make(dtype: torch.dtype) -> Callable[[], None]:
    """The step."""
    shape = HeadShape(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=SIZE,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        max_position_embeddings=8192,
    )
    given, head = inputs(dtype), Eagle3Head(shape)
    random_init(head, 0)
    head.set_vocabulary(torch.arange(DRAFT))
    objective, rows = Objective(STEPS, DECAY), given["rows"]
    model = TttModel(head, rows, rows, objective, max_length=LENGTH, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    section = TrainSection.model_validate({"dtype": name, "clip_norm": CLIP})
    trainer = Trainer(model, section, torch.device("cpu"))
    labels = loss_mask().flatten().nonzero().flatten()
    batch = TrainBatch(
        ("a", "b"),
        (LENGTH,) * DOCUMENTS,
        given["token_ids"].flatten(),
        given["aux_states"].flatten(0, 1),
        labels,
        labels % LENGTH,
        given["final_states"].flatten(0, 1)[labels - 1],
    )

    def step() -> None:
        trainer.step([batch], RATE)

    return step


if __name__ == "__main__":
    serve(make)
