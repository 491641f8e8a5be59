"""The head before its first step: a new one, or an earlier one to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.console import notice
from pipeline.errors import ConfigError
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.init import DraftVocabulary, choose_vocabulary, lend_rows
from pipeline.heads.registry import algorithm, algorithm_of, empty_head, open_head
from pipeline.heads.tensors import WEIGHTS
from pipeline.records import TargetContract
from pipeline.store.location import Location
from pipeline.target.open import Target


@dataclass(frozen=True)
class HeadInit:
    """What is known of the head before any data is read."""

    shape: DraftShape
    parameters: int
    share: float  # of the target's parameters
    earlier: DraftingHead | None = None  # train.start_from, in float32
    origin: Mapping[str, Any] | None = None  # where `earlier` comes from, for the card


def choose_init(
    section: TrainSection, target_directory: Path, contract: TargetContract
) -> HeadInit:
    """Shape of a new head, or the head of `train.start_from`.

    Raises ConfigError for a shape that cannot be, is too large, or is not that of the earlier head;
    HeadError or ContractMismatch for an earlier head that cannot be read or belongs to another
    target.
    """
    if section.start_from:
        earlier, origin = _load_earlier(section.start_from, contract)
        _check_algorithm(section, earlier, where=section.start_from)
        chosen = algorithm_of(earlier)
        shape = chosen.init.continue_shape(section, earlier, section.start_from)
        earlier.shape = shape
    else:
        earlier, origin, chosen = None, None, algorithm(section)
        shape = chosen.init.choose_shape(section, target_directory, contract)
    settings = chosen.settings(section)
    parameters, share = check_share(shape, contract.parameters, settings.max_share, settings.key)
    of_target = f"{share:.2%} of the target's {contract.parameters:,}"
    notice("train", f"head: {parameters:,} parameters, {of_target}")
    return HeadInit(shape, parameters, share, earlier, origin)


def draft_vocabulary(init: HeadInit, counts: Mapping[str, Tensor]) -> DraftVocabulary:
    """The most frequent supervised tokens, or the earlier head's own. counts: source → [V]."""
    total = torch.stack(list(counts.values())).sum(0)
    if init.earlier is None:
        return choose_vocabulary(total, init.shape.draft_vocab_size)
    ids = init.earlier.target_ids()
    return DraftVocabulary(ids, float(total[ids].sum()) / max(1, int(total.sum())))


def initial_head(
    init: HeadInit, section: TrainSection, vocabulary: DraftVocabulary, target: Target, *, seed: int
) -> DraftingHead:
    """The head that training begins with: the earlier one, or a new one."""
    if init.earlier and init.origin:
        head, same = init.earlier, "its draft vocabulary and shape are kept"
        notice("train", f"head starts from {init.origin['head']}, {same}")
    else:
        layers, weights = target.contract.num_layers, target.weights
        head = algorithm(section).init.new_head(
            section, init.shape, vocabulary, weights, num_layers=layers, seed=seed
        )
    lend_rows(head, target.weights.lm_head())
    return head


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


def _check_algorithm(section: TrainSection, head: DraftingHead, *, where: str) -> None:
    """Raise ConfigError where `train.algorithm` is another one than that of the head at `where`.

    One EAGLE-3 head and a chain are both `algorithm: eagle3`; `head_config.heads` tells them apart.
    """
    earlier = algorithm_of(head).name
    if "mtp" in (earlier, section.head_algorithm) and section.algorithm == "eagle3":
        return
    if earlier != section.head_algorithm:
        raise ConfigError(
            f"the head that training starts from is one of algorithm {earlier} ({where})",
            where="train.algorithm",
            fix=f"set train.algorithm={earlier}, or start from another head",
        )


def _load_earlier(source: str, contract: TargetContract) -> tuple[DraftingHead, dict[str, Any]]:
    head, card = open_head(source, expected=contract)
    checksum = Location(source).sha256(WEIGHTS)
    return head, {"head": source, "weights_sha256": checksum, "provenance": card.provenance}
