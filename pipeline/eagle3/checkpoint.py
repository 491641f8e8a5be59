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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.eagle3.formats.fields import shape_of
from pipeline.eagle3.formats.foreign import read_json
from pipeline.eagle3.formats.sglang import sglang_config
from pipeline.eagle3.formats.speculators import MODEL_TYPE, speculators_config, speculators_tensors
from pipeline.eagle3.head import DraftingHead, Eagle3Head, HeadShape
from pipeline.errors import HeadError, StoreError
from pipeline.records import TargetContract, match_contracts

HEAD_FILES = CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "eagle3.json"
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
    """Read a head directory in float32.

    Raises HeadError, or ContractMismatch when it is for another target than `expected`.
    """
    card = open_files(directory, expected)
    head = Eagle3Head(read_shape(directory))
    read_weights(directory, head)
    return head.float(), card


def open_files(directory: Path, expected: TargetContract | None) -> HeadCard:
    """The card of a head directory of either kind, all of whose files are there.

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


def read_weights(directory: Path, head: DraftingHead) -> None:
    """Read the tensors into a head of their shapes. Raises HeadError."""
    try:
        head.load_state_dict(load_file(directory / WEIGHTS))
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        problem = f"{WEIGHTS} does not fit {CONFIG}: {reason}"
        where = f"head {directory}"
        raise HeadError(problem, where=where, fix="export the head again") from error


def read_shape(directory: Path) -> HeadShape:
    """The shape in a head directory's config.json.

    Raises HeadError, also for the other dialect and for a block drafter.
    """
    body = read_json(directory / CONFIG)
    where = f"head {directory}: {CONFIG}"
    if BLOCK_DRAFTER in (body.get("architectures") or ()):
        fix = "name the head of an EAGLE-3 training, or draft with drafter.name=dflash"
        raise HeadError(f"is of a block drafter ({BLOCK_DRAFTER})", where=where, fix=fix)
    if CHAINED in (body.get("architectures") or ()):
        fix = "name a head of one layer (train.head_config.heads=1), or export with --format mtp"
        raise HeadError(f"is of chained heads ({CHAINED})", where=where, fix=fix)
    if MODEL_TYPE in body:
        fix = f"eagle3 import {directory} --target SOURCE --out HEAD"
        raise HeadError("is in the dialect of speculators", where=where, fix=fix)
    return shape_of({name: body[name] for name in HeadShape.model_fields if name in body}, where)


def read_card(path: Path) -> HeadCard:
    """The card in an `eagle3.json`. Raises HeadError."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        contract = TargetContract.model_validate(body["contract"])
        return HeadCard(contract, body["provenance"], body["metrics"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        problem = f"{CARD} cannot be read: {str(error).splitlines()[0]}"
        where = f"head {path.parent}"
        raise HeadError(problem, where=where, fix="export the head again") from error


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
