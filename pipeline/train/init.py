"""The head before its first step: a new one, or an earlier one to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import HeadSection, TrainSection
from pipeline.console import notice
from pipeline.errors import ConfigError
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.dflash.init import DFLASH_FIXED, dflash_shape, new_dflash_head
from pipeline.heads.dflash.shape import DflashHead, DflashShape
from pipeline.heads.eagle3.init import EAGLE3_FIXED, head_shape, new_head
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import (
    DraftVocabulary,
    choose_vocabulary,
    lend_rows,
)
from pipeline.heads.mtp.init import chained_shape, new_chain
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape
from pipeline.heads.registry import empty_head, open_head
from pipeline.heads.tensors import WEIGHTS
from pipeline.records import TargetContract
from pipeline.store.location import Location
from pipeline.target.open import Target


@dataclass(frozen=True)
class Start:
    """What is known of the head before any data is read."""

    shape: DraftShape
    parameters: int
    share: float  # of the target's parameters
    earlier: DraftingHead | None = None  # train.start_from, in float32
    origin: Mapping[str, Any] | None = None  # where `earlier` comes from, for the card


def choose_start(section: TrainSection, target_directory: Path, contract: TargetContract) -> Start:
    """Shape of a new head, or the head of `train.start_from`.

    Raises ConfigError for a shape that cannot be, is too large, or is not that of the earlier head;
    HeadError or ContractMismatch for an earlier head that cannot be read or belongs to another
    target.
    """
    earlier, origin = None, None
    shape: DraftShape
    if section.start_from:
        earlier, origin = _load_earlier(section.start_from, contract)
        _check_kept(section, earlier, where=section.start_from)
        shape = earlier.shape
        window = section.head_config.draft_window  # decides no tensor
        if window and isinstance(earlier, Eagle3Head):
            shape = earlier.shape = earlier.shape.model_copy(update={"draft_window": window})
    elif section.algorithm == "dflash":
        shape = dflash_shape(section.dflash, target_directory, contract)
    elif section.head_config.heads > 1:
        shape = chained_shape(section.head_config, target_directory, contract)
    else:
        shape = head_shape(section.head_config, target_directory, contract.vocab_size)
    own, name = section.asked_head
    parameters, share = check_share(shape, contract.parameters, own.max_share_of_target, name)
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
    start: Start, section: TrainSection, vocabulary: DraftVocabulary, target: Target, *, seed: int
) -> DraftingHead:
    """The head that training begins with: the earlier one, or a new one."""
    head = _own_head(start, section, vocabulary, target, seed=seed)
    lend_rows(head, target.weights.lm_head())
    return head


def _own_head(
    start: Start, section: TrainSection, vocabulary: DraftVocabulary, target: Target, *, seed: int
) -> DraftingHead:
    if start.earlier and start.origin:
        kept = "its draft vocabulary and shape are kept"
        notice("train", f"head starts from {start.origin['head']}, {kept}")
        return start.earlier
    layers, given = target.contract.num_layers, (vocabulary, target.weights)
    if isinstance(start.shape, DflashShape):
        return new_dflash_head(section.dflash, start.shape, *given, layers=layers, seed=seed)
    last = layers - 1
    if isinstance(start.shape, ChainedShape):
        return new_chain(section.head_config, start.shape, *given, last_layer=last, seed=seed)
    assert isinstance(start.shape, HeadShape)
    return new_head(section.head_config, start.shape, *given, last_layer=last, seed=seed)


def check_share(
    shape: DraftShape, target_parameters: int, limit: float, section: str = "train.head_config"
) -> tuple[int, float]:
    """(parameters, share of the target's) of a head that `section` asks for.

    Raises ConfigError for one above `limit`.
    """
    with torch.device("meta"):
        parameters = empty_head(shape).count_parameters()
    share = parameters / target_parameters
    if share > limit:
        above = f"{share:.1%} of the target's {target_parameters:,}, above the limit of {limit:.1%}"
        vocabulary = f"{section}.draft_vocab_size (now {shape.draft_vocab_size})"
        mlp = f"intermediate_size (now {shape.intermediate_size})"
        raise ConfigError(
            f"the head has {parameters:,} parameters, {above}",
            where=f"{section}.max_share_of_target",
            fix=f"lower {vocabulary} or {mlp}, or raise the limit",
        )
    return parameters, share


def _check_kept(section: TrainSection, head: DraftingHead, *, where: str) -> None:
    """Raise ConfigError where `section` asks for another head than the one at `where`.

    A default asks for nothing.
    """
    if isinstance(head, DflashHead) != (section.algorithm == "dflash"):
        kind = "dflash" if isinstance(head, DflashHead) else "eagle3"
        raise ConfigError(
            f"the head that training starts from is one of algorithm {kind} ({where})",
            where="train.algorithm",
            fix=f"set train.algorithm={kind}, or start from another head",
        )
    if isinstance(head, ChainedHead):
        _check_steps(section, head, where=where)
    own, name = section.asked_head
    fixed = DFLASH_FIXED if section.algorithm == "dflash" else {key: key for key in EAGLE3_FIXED}
    for key, field in fixed.items():
        asked, kept = getattr(own, key), _kept(head.shape, field)
        if asked not in (type(own).model_fields[key].default, kept):
            other = f"the head that training starts from has {kept} ({where})"
            new = "without train.start_from a new head takes any value"
            raise ConfigError(
                f"{asked} is asked for, but {other}",
                where=f"{name}.{key}",
                fix=f"leave it out or set it to {kept}; {new}",
            )


def _check_steps(section: TrainSection, head: ChainedHead, *, where: str) -> None:
    """Raise ConfigError where `section` asks what chained heads cannot."""
    if section.ttt_steps < (heads := head.shape.heads):
        problem = f"{section.ttt_steps} steps are too few for the {heads} heads of {where}"
        fix = f"set at least {heads}, one a head"
        raise ConfigError(problem, where="train.ttt_steps", fix=fix)
    for name in ("dropout", "activation_checkpointing", "compile"):
        if getattr(section, name):
            problem = f"the head that training starts from has several heads ({where})"
            raise ConfigError(problem, where=f"train.{name}", fix="leave it out")


def _kept(shape: DraftShape, field: str) -> Any:
    """A field of the earlier head; the default where its kind has none."""
    if not hasattr(shape, field):
        return HeadSection.model_fields[field].default
    return getattr(shape, field)


def _load_earlier(source: str, contract: TargetContract) -> tuple[DraftingHead, dict[str, Any]]:
    head, card = open_head(source, expected=contract)
    checksum = Location(source).sha256(WEIGHTS)
    return head, {"head": source, "weights_sha256": checksum, "provenance": card.provenance}
