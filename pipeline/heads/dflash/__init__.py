"""Block drafters (DFlash, arXiv:2602.06036): one forward predicts all tokens of a block. DSpark
(arXiv:2607.05147) is one whose tokens depend on each other: the same files, by its shape.

shape.py        the module
init.py         its first weights: copied from the target, and solved by least squares
blocks.py       the objective: blocks after anchors
drafter.py      the tree of a block's marginals
checkpoint.py   directories, ours and other trainers'; speculators.py is the other format
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.config import Section, TrainSection
from pipeline.heads.algorithm import HeadAlgorithm, HeadSettings, ServeCommand
from pipeline.planning.heads import BlockHeadSize

if TYPE_CHECKING:
    from pipeline.heads.dflash.shape import DflashShape

#: Keys that decide the shape and are called as its fields; those of `train.dspark` alone come last.
_NAMES = (
    *("block_size", "draft_vocab_size", "target_lm_head", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "mask_token_id", "markov_rank", "confidence"),
)


def fixed(section: Section) -> dict[str, str]:
    """Keys of `train.dflash` or `train.dspark` that decide the shape, and its field."""
    keys = type(section).model_fields
    return {"layers": "num_hidden_layers", **{name: name for name in _NAMES if name in keys}}


def _settings(section: TrainSection) -> HeadSettings:
    head, key = section.block, f"train.{section.algorithm}"
    solved = head.init_layers == "least_squares"
    return HeadSettings(head, key, fixed(head), head.max_share_of_target, solved)


def _serve_command(
    shape: DflashShape, format: str, target: str, tree: tuple[int, int, int], tokens: int
) -> ServeCommand | None:
    """vLLM's, of whole blocks, which the head was trained on."""
    del tree, tokens
    if format != "speculators":
        return None
    chain = shape.predicted
    draft = {"method": kind_of(shape).name, "model": "HEAD", "num_speculative_tokens": chain}
    command = f"vllm serve {target} --speculative-config '{json.dumps(draft)}'"
    return ServeCommand(command, chain, "")


def _unread(head: Any, format: str) -> list[str]:
    """Not tried there: readers of speculators' dialect differ in what these mean."""
    names = ("attention_bias", "sliding_layers", "causal_layers") if format == "speculators" else ()
    return [name for name in names if getattr(head.shape, name)]


ALGORITHM = HeadAlgorithm(
    name="dflash",
    architecture="DFlashDraftModel",
    package=__name__,
    objective="blocks",
    settings=_settings,
    size=BlockHeadSize.of,
    describe=lambda _head: "a block drafter (DFlash)",
    formats=("sglang", "speculators"),
    refusals={
        "mtp": "MTP layers predict one token each, this head a block",
        "gguf": "this version writes GGUF files of EAGLE-3 heads alone",
    },
    unread=_unread,
    serve_command=_serve_command,
)


#: One that has a Markov head.
DSPARK = replace(
    ALGORITHM,
    name="dspark",
    architecture="DSparkDraftModel",
    owns=lambda shape: shape.markov_rank > 0,
    describe=lambda _head: "a block drafter whose tokens depend on each other (DSpark)",
    drafter_name="dspark",
)


def kind_of(shape: DflashShape) -> HeadAlgorithm:
    """Which of the two a head of this shape is."""
    return DSPARK if DSPARK.owns(shape) else ALGORITHM
