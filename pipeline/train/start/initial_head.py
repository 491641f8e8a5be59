"""The head before its first step: shape and size limit, vocabulary, starting weights.

Or an earlier head to go on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import HeadSection, TrainSection
from pipeline.console import notice
from pipeline.eagle3.checkpoint import HEAD_FILES, WEIGHTS, load_head
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.eagle3.init import (
    DraftVocabulary,
    choose_vocabulary,
    random_init,
    shape_for,
    start_fc_from_high_layer,
    start_layer,
    start_lm_head,
)
from pipeline.errors import ConfigError
from pipeline.records import TargetContract
from pipeline.store.location import Location, as_directory
from pipeline.target.open import Target
from pipeline.target.weights import TargetWeights

#: Fields of `train.head_config` that decide tensors. A fine-tuned head keeps its own.
_FIXED = (
    "draft_vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "fc_norm",
    "norm_output",
)


@dataclass(frozen=True)
class Start:
    """What is known of the head before any data is read."""

    shape: HeadShape
    parameters: int
    share: float  # of the target's parameters
    earlier: Eagle3Head | None = None  # train.start_from, in float32
    origin: Mapping[str, Any] | None = None  # where `earlier` comes from, for the card


def choose_start(section: TrainSection, target_directory: Path, contract: TargetContract) -> Start:
    """Shape of a new head, or the head of `train.start_from`.

    Raises ConfigError for a shape that cannot be, is too large, or is not that of the earlier head;
    HeadError or ContractMismatch for an earlier head that cannot be read or belongs to another
    target.
    """
    earlier, origin = None, None
    if section.start_from:
        earlier, origin = _load_earlier(section.start_from, contract)
        _check_shape_kept(section.head_config, earlier.shape, where=section.start_from)
        shape = earlier.shape
        if window := section.head_config.draft_window:  # decides no tensor
            shape = shape.model_copy(update={"draft_window": window})
            earlier.shape = shape
    else:
        shape = head_shape(section.head_config, target_directory, contract.vocab_size)
    parameters, share = check_share(
        shape, contract.parameters, section.head_config.max_share_of_target
    )
    of_target = f"{share:.2%} of the target's {contract.parameters:,}"
    notice("train", f"head: {parameters:,} parameters, {of_target}")
    return Start(shape, parameters, share, earlier, origin)


def draft_vocabulary(start: Start, counts: Mapping[str, Tensor]) -> DraftVocabulary:
    """The most frequent supervised tokens, or the earlier head's own. counts: source → [V]."""
    total = torch.stack(list(counts.values())).sum(0)
    if start.earlier is None:
        return choose_vocabulary(total, start.shape.draft_vocab_size)
    kept = start.earlier.target_ids()
    return DraftVocabulary(kept, float(total[kept].sum()) / max(1, int(total.sum())))


def initial_head(
    start: Start, section: HeadSection, vocabulary: DraftVocabulary, target: Target, *, seed: int
) -> Eagle3Head:
    """The head that training begins with: the earlier one, or a new one."""
    if start.earlier and start.origin:
        kept = "its draft vocabulary and shape are kept"
        notice("train", f"head starts from {start.origin['head']}, {kept}")
        return start.earlier
    last = target.contract.num_layers - 1
    return new_head(section, start.shape, vocabulary, target.weights, last_layer=last, seed=seed)


def new_head(
    section: HeadSection,
    shape: HeadShape,
    vocabulary: DraftVocabulary,
    weights: TargetWeights,
    *,
    last_layer: int,
    seed: int,
) -> Eagle3Head:
    """A float32 head with the starting weights that `section` asks for."""
    head = Eagle3Head(shape)
    random_init(head, seed)
    head.set_vocabulary(vocabulary.target_ids)
    start_fc_from_high_layer(head)
    copied = ["fc: identity on the high layer"]
    if section.init_lm_head == "target":
        start_lm_head(head, weights.lm_head(), weights.final_norm())
        copied.append("lm_head and norm")
    if section.init_layer != "random":
        copied += start_layer(head, weights.layer(last_layer))
    notice("train", f"head starts from the target's {', '.join(copied)}; all else is random")
    return head


def head_shape(section: HeadSection, target_directory: Path, vocabulary_size: int) -> HeadShape:
    """The head's shape for the target in `target_directory`.

    Raises ConfigError for one that cannot be.
    """
    from transformers import AutoConfig

    target: Any = AutoConfig.from_pretrained(target_directory).get_text_config()
    size = section.draft_vocab_size
    if size > vocabulary_size:
        problem = f"{size} is more than the target's {vocabulary_size} tokens"
        fix = f"choose at most {vocabulary_size}"
        raise ConfigError(problem, where="train.head_config.draft_vocab_size", fix=fix)
    fixed = {name: getattr(section, name) for name in _FIXED}
    shape = shape_for(target, **fixed, draft_window=section.draft_window or 0)
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if heads % groups:
        problem = f"{heads} query heads do not divide over {groups} key/value heads"
        fix = "choose a divisor of train.head_config.num_attention_heads"
        raise ConfigError(problem, where="train.head_config.num_key_value_heads", fix=fix)
    return shape


def check_share(shape: HeadShape, target_parameters: int, limit: float) -> tuple[int, float]:
    """(parameters, share of the target's). Raises ConfigError for a head above `limit`."""
    with torch.device("meta"):
        parameters = Eagle3Head(shape).count_parameters()
    share = parameters / target_parameters
    if share > limit:
        above = f"{share:.1%} of the target's {target_parameters:,}, above the limit of {limit:.1%}"
        vocabulary = f"train.head_config.draft_vocab_size (now {shape.draft_vocab_size})"
        mlp = f"intermediate_size (now {shape.intermediate_size})"
        raise ConfigError(
            f"the head has {parameters:,} parameters, {above}",
            where="train.head_config.max_share_of_target",
            fix=f"lower {vocabulary} or {mlp}, or raise the limit",
        )
    return parameters, share


def _check_shape_kept(section: HeadSection, shape: HeadShape, *, where: str) -> None:
    """Raise ConfigError where `section` asks for another head than the one at `where`.

    A default asks for nothing.
    """
    for name in _FIXED:
        asked, own = getattr(section, name), getattr(shape, name)
        if asked not in (HeadSection.model_fields[name].default, own):
            other = f"the head that training starts from has {own} ({where})"
            new = "without train.start_from a new head takes any value"
            raise ConfigError(
                f"{asked} is asked for, but {other}",
                where=f"train.head_config.{name}",
                fix=f"leave it out or set it to {own}; {new}",
            )


def _load_earlier(source: str, contract: TargetContract) -> tuple[Eagle3Head, dict[str, Any]]:
    with as_directory(Location(source), HEAD_FILES) as directory:
        head, card = load_head(directory, expected=contract)
        checksum = Location(str(directory)).sha256(WEIGHTS)
    return head, {"head": source, "weights_sha256": checksum, "provenance": card.provenance}
