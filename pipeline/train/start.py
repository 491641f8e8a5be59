"""The head before its first step: vocabulary, shape, size limit, starting weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.config import HeadSection
from pipeline.console import notice
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.eagle3.init import random_init, shape_for, start_fc_from_high_layer, start_layer, start_lm_head
from pipeline.eagle3.vocab import DraftVocabulary
from pipeline.errors import ConfigError, TargetError
from pipeline.target.weights import TargetWeights

_LAYER_TENSORS = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def head_shape(section: HeadSection, target_directory: Path, vocabulary_size: int) -> HeadShape:
    """The head's shape for the target in `target_directory`. Raises ConfigError for one that cannot be."""
    from transformers import AutoConfig

    target: Any = AutoConfig.from_pretrained(target_directory).get_text_config()
    if section.draft_vocab_size > vocabulary_size:
        problem = f"{section.draft_vocab_size} is more than the target's {vocabulary_size} tokens"
        raise ConfigError(problem, where="train.head.draft_vocab_size", fix=f"choose at most {vocabulary_size}")
    shape = shape_for(
        target,
        draft_vocab_size=section.draft_vocab_size,
        intermediate_size=section.intermediate_size,
        num_attention_heads=section.num_attention_heads,
        num_key_value_heads=section.num_key_value_heads,
    )
    if shape.num_attention_heads % shape.num_key_value_heads:
        problem = f"{shape.num_attention_heads} query heads do not divide over {shape.num_key_value_heads} key/value heads"
        raise ConfigError(problem, where="train.head.num_key_value_heads", fix="choose a divisor of train.head.num_attention_heads")
    return shape


def check_share(shape: HeadShape, target_parameters: int, limit: float) -> tuple[int, float]:
    """(parameters, share of the target's). Raises ConfigError for a head above `limit`."""
    with torch.device("meta"):
        parameters = Eagle3Head(shape).count_parameters()
    share = parameters / target_parameters
    if share > limit:
        raise ConfigError(
            f"the head has {parameters:,} parameters, {share:.1%} of the target's {target_parameters:,}, above the limit of {limit:.1%}",
            where="train.head.max_share_of_target",
            fix=f"lower train.head.draft_vocab_size (now {shape.draft_vocab_size}) or intermediate_size (now {shape.intermediate_size}), or raise the limit",
        )
    return parameters, share


def start_head(section: HeadSection, shape: HeadShape, vocabulary: DraftVocabulary, weights: TargetWeights, *, last_layer: int, seed: int) -> Eagle3Head:
    """A float32 head with the starting weights that `section` asks for."""
    head = Eagle3Head(shape)
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    start_fc_from_high_layer(head)
    borrowed = ["fc: identity on the high layer"]
    if section.init_lm_head == "target":
        start_lm_head(head, weights.lm_head(), weights.final_norm())
        borrowed.append("lm_head and norm")
    if section.init_layer == "target_last":
        layer = weights.layer(last_layer)
        missing = [name for name in _LAYER_TENSORS if name not in layer]
        if missing:
            problem = f"layer {last_layer} has no {missing[0]}, so the head cannot start from it"
            raise TargetError(problem, where=str(weights.directory), fix="set train.head.init_layer=random")
        borrowed += start_layer(head, layer)
    notice("train", f"head starts from the target's {', '.join(borrowed)}")
    return head
