"""How a toy head begins."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import TrainSection
from pipeline.heads.algorithm import check_fixed
from pipeline.heads.init import (
    DraftVocabulary,
    check_sizes,
    init_fc,
    init_lm_head,
    random_init,
    shape_for,
)
from pipeline.learning.least_squares import BatchesOf
from pipeline.records import TargetContract
from pipeline.target.open import Target
from pipeline.target.weights import TargetWeights

from . import ALGORITHM
from .shape import ToyHead, ToyShape


def choose_shape(
    section: TrainSection, target_directory: Path, contract: TargetContract
) -> ToyShape:
    from transformers import AutoConfig

    key, options = "train.options", ALGORITHM.settings(section).section
    shape = shape_for(
        ToyShape,
        AutoConfig.from_pretrained(target_directory).get_text_config(),
        intermediate_size=None,
        num_attention_heads=None,
        num_key_value_heads=None,
        **options.model_dump(),
    )
    check_sizes(shape, key)
    return shape


def continue_shape(section: TrainSection, head: ToyHead, where: str) -> ToyShape:
    check_fixed(ALGORITHM.settings(section), head.shape, where)
    return head.shape


def new_head(
    section: TrainSection,
    shape: ToyShape,
    vocabulary: DraftVocabulary,
    weights: TargetWeights,
    *,
    num_layers: int,
    seed: int,
) -> ToyHead:
    head = ToyHead(shape)
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    init_fc(head)
    init_lm_head(head, weights.lm_head(), weights.final_norm())
    return head


def init_least_squares(
    section: TrainSection, head: ToyHead, target: Target, batches: BatchesOf, seed: int
) -> list[str]:
    raise AssertionError("settings.least_squares is False")
