"""A block drafter before its first step: shape and starting weights; and checks of any shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import DflashSection
from pipeline.console import notice
from pipeline.eagle3.dflash.head import DflashHead, DflashShape
from pipeline.eagle3.dflash.init import dflash_shape_for, start_block_layers
from pipeline.eagle3.head import DraftShape
from pipeline.eagle3.init import (
    DraftVocabulary,
    random_init,
    start_fc_from_high_layer,
    start_lm_head,
)
from pipeline.errors import ConfigError
from pipeline.records import TargetContract
from pipeline.target.weights import TargetWeights

#: Keys of `train.dflash` that decide the shape, and its field. A fine-tuned head keeps its own.
DFLASH_FIXED = {
    "layers": "num_hidden_layers",
    **{
        name: name
        for name in (
            "block_size",
            "draft_vocab_size",
            "target_lm_head",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "mask_token_id",
        )
    },
}


def dflash_shape(
    section: DflashSection, target_directory: Path, contract: TargetContract
) -> DflashShape:
    """The drafter's shape for the target in `target_directory`.

    Raises ConfigError for one that cannot be.
    """
    from transformers import AutoConfig

    target: Any = AutoConfig.from_pretrained(target_directory).get_text_config()
    shape = dflash_shape_for(target, **{name: getattr(section, name) for name in DFLASH_FIXED})
    check_sizes(shape, "train.dflash")
    for key, value, most, what in (
        ("mask_token_id", shape.mask_token_id, contract.vocab_size - 1, "token"),
        ("layers", section.layers, contract.num_layers, "number of layers"),
    ):
        if value > most:
            problem = f"{value} is above the target's last {what}, {most}"
            raise ConfigError(problem, where=f"train.dflash.{key}", fix=f"choose at most {most}")
    return shape


def check_sizes(shape: DraftShape, section: str) -> None:
    """Raise ConfigError for a shape, asked for in `section`, that no head can have."""
    size, heads, groups = (
        shape.draft_vocab_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
    )
    if size > shape.vocab_size:
        problem = f"{size} is more than the target's {shape.vocab_size} tokens"
        fix = f"choose at most {shape.vocab_size}"
        raise ConfigError(problem, where=f"{section}.draft_vocab_size", fix=fix)
    if heads % groups:
        problem = f"{heads} query heads do not divide over {groups} key/value heads"
        fix = f"choose a divisor of {section}.num_attention_heads"
        raise ConfigError(problem, where=f"{section}.num_key_value_heads", fix=fix)


def new_dflash_head(
    section: DflashSection,
    shape: DflashShape,
    vocabulary: DraftVocabulary,
    weights: TargetWeights,
    *,
    layers: int,
    seed: int,
) -> DflashHead:
    """A float32 drafter with the starting weights that `section` asks for; the target has so many
    `layers`."""
    head = DflashHead(shape)
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    start_fc_from_high_layer(head)
    start_lm_head(head, weights.lm_head(), weights.final_norm())
    output = "output rows, which it keeps, and norm" if shape.target_lm_head else "lm_head and norm"
    copied = ["fc: identity on the high layer", output]
    if section.init_layers != "random":
        last = range(layers - shape.num_hidden_layers, layers)
        copied += start_block_layers(head, [weights.layer(index) for index in last])
    notice("train", f"head starts from the target's {', '.join(copied)}; all else is random")
    return head
