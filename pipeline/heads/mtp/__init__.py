"""Chained heads (multi-token prediction): a head for each step, then the last one unrolled.

shape.py        the module
init.py         first weights: copied from the target, and solved by least squares, head by head
ttt.py          the objective: step k is head k's
drafter.py      the tree that they draft
checkpoint.py   our directory; mimo.py is the format that servers read
"""

from __future__ import annotations

from pipeline.config import TrainSection
from pipeline.heads.algorithm import HeadAlgorithm, HeadSettings
from pipeline.planning.heads import ChainedHeadSize

#: Keys of `train.head_config` that decide tensors.
FIXED = (
    *("draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("heads", "chain_input"),
)
#: Those of one head, which a chain has none of.
_OF_ONE = ("fc_norm", "norm_output")


def _settings(section: TrainSection) -> HeadSettings:
    head, fixed = section.head_config, {key: key for key in (*FIXED, *_OF_ONE)}
    solved = head.init_layer == "least_squares"
    return HeadSettings(head, "train.head_config", fixed, head.max_share_of_target, solved)


ALGORITHM = HeadAlgorithm(
    name="mtp",
    architecture="ChainedDraftModel",
    package=__name__,
    objective="ttt",
    settings=_settings,
    size=ChainedHeadSize.of,
    describe=lambda head: f"a chain of {head.shape.heads} draft heads (multi-token prediction)",
    drafter_name="eagle3",  # a head, and a tree from its steps
    formats=("mtp",),
    refusals={
        "sglang": "SGLang's EAGLE-3 class has one head, this one is a chain",
        # speculators 0.9.0, models/mtp; vLLM 0.32's loader of that dialect has no type mtp at all
        "speculators": "speculators' MTP layers norm queries and keys, which these do not",
    },
)
