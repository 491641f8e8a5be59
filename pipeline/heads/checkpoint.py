"""Head directories: `config.json`, `model.safetensors` and `eagle3.json`, written atomically.

docs/head-format.md specifies them. The card (`eagle3.json`) carries contract, provenance, metrics.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import HeadError, StoreError
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.fields import Layers
from pipeline.heads.tensors import WEIGHTS, read_json
from pipeline.records import TargetContract, match_contracts
from pipeline.target.weights import TargetWeights

CONFIG, CARD = "config.json", "eagle3.json"


HEAD_FILES = CONFIG, WEIGHTS, CARD


@dataclass(frozen=True)
class HeadCard:
    """`eagle3.json`: which target the head is for, what it was made from, how good it is."""

    contract: TargetContract
    provenance: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


def open_files(directory: Path, expected: TargetContract | None) -> HeadCard:
    """The card of a head directory of any kind, all of whose files are there.

    Raises HeadError, or ContractMismatch when it is for another target than `expected`.
    """
    where = f"head {directory}"
    for name in HEAD_FILES:
        if not (directory / name).is_file():
            fix = "pass a head directory that `eagle3 train` wrote"
            raise HeadError(f"has no {name}", where=where, fix=fix)
    card = read_card(directory / CARD)
    if expected is not None:
        match_contracts(expected, card.contract, where=where)
    return card


def check_card(card: HeadCard, shape: DraftShape, layers: Layers | None, where: str) -> None:
    """Raise HeadError where a config.json is of another target than the card beside it."""
    contract = card.contract
    pairs = [(name, getattr(shape, name)) for name in ("hidden_size", "vocab_size")]
    pairs += [("capture_layers", layers)] if layers else []
    for name, value in pairs:
        if value != getattr(contract, name):
            problem = f"{name} is {value}, in {CARD} {getattr(contract, name)}"
            raise HeadError(problem, where=where, fix="export the head again")


def read_card(path: Path) -> HeadCard:
    """The card in an `eagle3.json`. Raises HeadError with file, field and fix."""
    body, where = read_json(path), f"head {path.parent}: {CARD}"
    fix = "export or import the head again"
    parts = {name: body.get(name) for name in ("contract", "provenance", "metrics")}
    for name, value in parts.items():
        if not isinstance(value, dict):
            problem = f"{name} is {value!r}, not an object" if name in body else f"lacks {name}"
            raise HeadError(problem, where=where, fix=fix)
    try:
        contract = TargetContract.model_validate(parts["contract"])
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("contract", *first["loc"])))
        problem = f"{field} is {first['input']!r}: it {first['msg'].removeprefix('Input ')}"
        problem = f"lacks {field}" if first["type"] == "missing" else problem
        raise HeadError(problem, where=where, fix=fix) from error
    for name, value in (("parameters", contract.parameters), ("num_layers", contract.num_layers)):
        if value < 1:
            raise HeadError(f"contract.{name} is {value}", where=where, fix=fix)
    return HeadCard(contract, parts["provenance"] or {}, parts["metrics"] or {})


def write_files(
    directory: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], card: HeadCard
) -> None:
    """Write a head directory atomically, weights in bfloat16; an existing one is replaced."""
    partial = directory.with_name(f".{directory.name}.partial")
    stored = {name: _stored(tensor) for name, tensor in tensors.items()}
    body = {
        "contract": card.contract.model_dump(mode="json"),
        "provenance": card.provenance,
        "metrics": card.metrics,
    }
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(stored, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (partial / CARD).write_text(json.dumps(body, indent=2) + "\n")
        shutil.copymode(partial / CONFIG, partial / WEIGHTS)  # safetensors makes it the user's own
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(partial, directory)
    except OSError as error:
        problem = f"cannot write the head: {error.strerror}"
        fix = "free some space or choose a writable directory"
        raise StoreError(problem, where=str(directory), fix=fix) from error


def _stored(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


#: Fields whose text is a place, unless it names something public.
_PLACES = frozenset({"source", "start_from", "head", "imported from", "model"})


_PUBLIC = ("hub:", "package:")


_ON_A_MACHINE = ("/", "~", ".", "file:")


def published(card: HeadCard) -> HeadCard:
    """The card for a head that leaves its run."""
    contract = card.contract
    if contract.revision == "local":
        contract = contract.model_copy(update={"source": last_part(contract.source)})
    return replace(card, contract=contract, provenance=without_places(card.provenance))


def without_places(facts: Any, field: str = "") -> Any:
    """The same JSON; of paths and URIs only the last part is left."""
    if isinstance(facts, dict):
        return {name: without_places(value, name) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [without_places(value, field) for value in facts]
    is_place = isinstance(facts, str) and field in _PLACES and not facts.startswith(_PUBLIC)
    return last_part(facts) if is_place and not is_hub_id(facts) else facts


def last_part(place: str) -> str:
    """Of a path or a URI, on whatever system it was written; never a bucket or a host."""
    protocol, separator, rest = place.replace("\\", "/").partition("://")
    path = rest.partition("/")[2] if separator else protocol
    return PurePath(path).name or "unnamed"


def is_hub_id(text: str) -> bool:
    """`org/name`, and no file beside the run."""
    path = PurePath(text)
    looks_so = text.count("/") == 1 and not text.startswith(_ON_A_MACHINE) and "://" not in text
    return looks_so and path.suffix not in (".jsonl", ".gz", ".ndjson", ".parquet", ".gguf")


@torch.no_grad()
def fill_rows(foreign: ForeignHead, weights: TargetWeights, where: str) -> None:
    """Copy the target's rows into an lm_head that the directory leaves to the target."""
    del where
    if foreign.lacks_rows:
        head = foreign.head
        head.lm_head.weight.copy_(weights.lm_head()[head.target_ids()])


@dataclass(frozen=True)
class ForeignHead:
    """What a directory of another trainer holds, under our names."""

    dialect: str
    #: Output indices; None leaves them to the loader's default.
    capture_layers: Layers | None
    head: DraftingHead  # float32
    embedding: Tensor | None  # [V, H], when it ships one
    lacks_rows: bool = False  # its lm_head is the target's rows of its draft vocabulary
    lm_head: Tensor | None = None  # [V, H], when it ships one that is not the head's own
    reads_final_state: bool = False  # the high aux state has to be the target's final one
    #: Adds what the head takes from the target. Raises HeadError where that contradicts it.
    complete: Callable[[ForeignHead, TargetWeights, str], None] = fill_rows
