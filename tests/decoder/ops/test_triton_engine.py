"""The engine over Triton kernels, built as on CUDA: the smallest bucket has one row.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from bench.random_target import random_head, random_model
from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.ops.triton.ops import TritonOps
from pipeline.decoder.request import Request
from pipeline.heads.eagle3.drafter import Eagle3Drafter

CONFIG = LlamaConfig(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)


def test_a_tree_of_beams_in_one_slot_changes_no_token(device: torch.device) -> None:
    model = random_model(
        CONFIG,
        (0, 1, 2),
        device=device,
        dtype=torch.float32,
        max_length=32,
        scale=0.5,
        ops=TritonOps(torch.float32),
    )
    tree = TreeSection(top_k=2, steps=2, nodes=4)
    drafter = Eagle3Drafter(random_head(CONFIG, torch.arange(12), scale=12), model, tree)
    requests = [Request("0", (3, 1, 4), 4, ())]
    (plain,) = Engine(model).generate(requests)
    (drafted,) = Engine(model, drafter=drafter, slots=1, buckets=(1,)).generate(requests)
    assert drafted.token_ids == plain.token_ids
    assert drafted.statistics.drafted == 3 * drafted.statistics.rounds
