"""A head on disk, loadable by SGLang as it is.

    config.json        LlamaForCausalLMEagle3, as SGLang reads it
    model.safetensors  fc, midlayer.*, norm, lm_head, d2t, t2d; no embedding
    eagle3.json        contract, provenance and metrics: what SGLang ignores and people need

The other dialect is written by `export_speculators`. A directory is written under a temporary name
and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from pipeline.eagle3.formats.fields import Layers
from pipeline.eagle3.formats.known import architectures_of
from pipeline.eagle3.formats.sglang import read_config, sglang_config
from pipeline.eagle3.formats.speculators import MODEL_TYPE, speculators_config, speculators_tensors
from pipeline.eagle3.formats.tensors import WEIGHTS, fill_head, read_json, read_tensors
from pipeline.eagle3.head import DraftShape, Eagle3Head
from pipeline.errors import HeadError, StoreError
from pipeline.records import TargetContract, match_contracts

CONFIG, CARD = "config.json", "eagle3.json"
HEAD_FILES = CONFIG, WEIGHTS, CARD
#: The architectures of the other kinds of head (`eagle3/dflash/`, `eagle3/chained/`).
BLOCK_DRAFTER, CHAINED = "DFlashDraftModel", "ChainedDraftModel"


@dataclass(frozen=True)
class HeadCard:
    """`eagle3.json`: which target the head is for, what it was made from, how good it is."""

    contract: TargetContract
    provenance: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


def save_head(directory: Path, head: Eagle3Head, card: HeadCard) -> None:
    """Write a head directory atomically, weights in bfloat16; an existing one is replaced."""
    write_files(directory, sglang_config(head.shape, card.contract), head.state_dict(), card)


def export_speculators(
    directory: Path,
    head: Eagle3Head,
    card: HeadCard,
    *,
    embedding: Tensor,
    verifier: str,
    architectures: Sequence[str],
    speculative_tokens: int,
) -> None:
    """Write `head` as speculators and vLLM read it, with its card beside it.

    embedding [V, H] is the target's; for the rest see `speculators_config`.
    """
    config = speculators_config(
        head.shape,
        card.contract,
        verifier=verifier,
        architectures=architectures,
        speculative_tokens=speculative_tokens,
    )
    write_files(directory, config, speculators_tensors(head.state_dict(), embedding), card)


def load_head(
    directory: Path, *, expected: TargetContract | None = None
) -> tuple[Eagle3Head, HeadCard]:
    """Read the directory of an EAGLE-3 head in float32.

    Raises HeadError, or ContractMismatch when it is for another target than `expected`.
    """
    card = open_files(directory, expected)
    body, where = read_json(directory / CONFIG), f"head {directory}: {CONFIG}"
    _refuse_other_kinds(body, where, directory)
    shape, layers = read_config(body, where)
    check_card(card, shape, layers, where)
    head = fill_head(Eagle3Head, shape, read_tensors(directory), where=f"head {directory}")
    return head, card


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


def _refuse_other_kinds(body: dict[str, Any], where: str, directory: Path) -> None:
    """Raise HeadError for a block drafter, chained heads and the other dialect."""
    architectures = architectures_of(body, where)
    if BLOCK_DRAFTER in architectures:
        fix = "name the head of an EAGLE-3 training, or draft with drafter.name=dflash"
        raise HeadError(f"is of a block drafter ({BLOCK_DRAFTER})", where=where, fix=fix)
    if CHAINED in architectures:
        fix = "name a head of one layer (train.head_config.heads=1), or export with --format mtp"
        raise HeadError(f"is of chained heads ({CHAINED})", where=where, fix=fix)
    if MODEL_TYPE in body:
        fix = f"eagle3 import {directory} --target SOURCE --out HEAD"
        raise HeadError("is in the dialect of speculators", where=where, fix=fix)


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
