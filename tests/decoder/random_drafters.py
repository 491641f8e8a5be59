"""One drafter of every kind for a random target. They draft badly, which losslessness must survive.

Not those that a head's own conftest makes with weights that show each norm: here it is the shapes
of what reaches the kernels that counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.random_target import random_head, random_model
from pipeline.config import NgramSection
from pipeline.decoder.drafter import Drafter, Trees
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.layer import PAGE, Float8Rows
from pipeline.drafters.lookup import LookupDrafter
from pipeline.drafters.ngram import NgramDrafter
from pipeline.drafters.self_spec import SnapKvDrafter, StreamingDrafter
from pipeline.drafters.standalone import StandaloneDrafter
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.dflash.init import dflash_shape_for
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.init import random_init, shape_for
from pipeline.heads.mtp.drafter import ChainedDrafter
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape

DRAFTERS = (
    *("eagle3", "mtp", "dflash", "dspark", "ngram", "standalone", "streaming", "snapkv"),
    "eagle3 and lookup",
)


def in_float8(head: Eagle3Head) -> Eagle3Head:
    """The head with its matrices rounded beforehand."""
    rounded = copy.deepcopy(head)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.dim() == 2:
                parameter.copy_(Float8Rows.of(parameter).widened())
    return rounded


def every_drafter(model: DecoderModel) -> Mapping[str, Callable[[Trees], Drafter]]:
    """Name → what makes it for some trees; heads propose every second token, models all."""
    proposed = torch.arange(0, model.vocabulary, 2)
    fields: dict[str, Any] = {
        "draft_vocab_size": len(proposed),
        "intermediate_size": 96,
        "num_attention_heads": None,
        "num_key_value_heads": None,
    }
    eagle3 = random_head(model.config, proposed, intermediate_size=96, scale=6)
    chained = ChainedHead(
        shape_for(ChainedShape, model.config, heads=3, chain_input="aux", **fields)
    )
    random_init(chained, 3)
    chained.set_vocabulary(proposed)
    kinds: list[dict[str, Any]] = [
        {"block_size": 7},
        {"block_size": 6, "markov_rank": 8, "confidence": True},
    ]
    block, dspark = (
        DflashHead(dflash_shape_for(model.config, layers=1, mask_token_id=0, **fields, **options))
        for options in kinds
    )
    for each in (block, dspark):
        random_init(each, 4)
        each.set_vocabulary(proposed)
    small = random_model(
        model.config,
        (),
        device=model.device,
        dtype=model.dtype,
        max_length=model.max_length,
        scale=0.06,
        ops=model.ops,
    )
    makers: list[Callable[[Trees], Drafter]] = [
        lambda trees: Eagle3Drafter(eagle3, model, trees),
        lambda trees: ChainedDrafter(chained, model, trees),
        lambda trees: DflashDrafter(block, model, trees),
        lambda trees: DflashDrafter(dspark, model, trees),
        lambda trees: NgramDrafter(model, trees, NgramSection()),
        lambda trees: StandaloneDrafter(small, model, trees),
        lambda trees: StreamingDrafter(model, trees, budget=PAGE + 20),
        lambda trees: SnapKvDrafter(model, trees, budget=40, recent=16, window=8, pool=3),
        lambda trees: LookupDrafter(
            Eagle3Drafter(eagle3, model, trees), NgramDrafter(model, trees, NgramSection())
        ),
    ]
    return dict(zip(DRAFTERS, makers, strict=True))
