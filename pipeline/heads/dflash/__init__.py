"""The block drafter (DFlash, arXiv:2602.06036): one forward predicts all tokens of a block.

shape.py        the module
init.py         its first weights: copied from the target, and solved by least squares
blocks.py       the objective: blocks after anchors
drafter.py      the tree of a block's marginals
checkpoint.py   directories, ours and other trainers'
"""

from __future__ import annotations

from pipeline.config import TrainSection
from pipeline.heads.algorithm import HeadAlgorithm, HeadSettings
from pipeline.planning.heads import BlockHeadSize

#: Keys of `train.dflash` that decide the shape, and its field.
FIXED = {
    "layers": "num_hidden_layers",
    **{
        name: name
        for name in (
            *("block_size", "draft_vocab_size", "target_lm_head", "intermediate_size"),
            *("num_attention_heads", "num_key_value_heads", "mask_token_id"),
        )
    },
}


def _settings(section: TrainSection) -> HeadSettings:
    head = section.dflash
    solved = head.init_layers == "least_squares"
    return HeadSettings(head, "train.dflash", FIXED, head.max_share_of_target, solved)


ALGORITHM = HeadAlgorithm(
    name="dflash",
    architecture="DFlashDraftModel",
    package=__name__,
    objective="blocks",
    settings=_settings,
    size=BlockHeadSize.of,
    describe=lambda _head: "a block drafter (DFlash)",
    formats=("sglang",),
    refusals={
        "mtp": "MTP layers predict one token each, this head a block",
        "gguf": "this version writes GGUF files of EAGLE-3 heads alone",
        "speculators": "this version writes speculators' format for EAGLE-3 heads alone",
    },
)
