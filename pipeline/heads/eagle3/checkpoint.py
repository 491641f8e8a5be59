"""A head on disk, loadable by SGLang as it is.

    config.json        LlamaForCausalLMEagle3, as SGLang reads it
    model.safetensors  fc, midlayer.*, norm, lm_head, d2t, t2d; no embedding
    eagle3.json        contract, provenance and metrics: what SGLang ignores and people need

The other dialect is written by `export_speculators`. A directory is written under a temporary name
and renamed when it is complete.


A head of another trainer, read and checked: its dialect, its names, its aux layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.errors import HeadError
from pipeline.heads.checkpoint import (
    BLOCK_DRAFTER,
    CHAINED,
    CONFIG,
    Dialect,
    ForeignHead,
    HeadCard,
    check_card,
    open_files,
    write_files,
)
from pipeline.heads.eagle3 import sglang, speculators
from pipeline.heads.eagle3.sglang import read_config, sglang_config
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.speculators import MODEL_TYPE, speculators_config, speculators_tensors
from pipeline.heads.known import architectures_of
from pipeline.heads.tensors import fill_head, read_json, read_tensors
from pipeline.records import TargetContract


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


#: SGLang's older names of the three norms before fc.
_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


_PASS_A_HEAD = "pass the directory of an EAGLE-3 head"


def read_foreign(directory: Path) -> ForeignHead:
    """Read a head directory in either dialect. Raises HeadError with file, field and fix."""
    body = read_json(directory / "config.json")
    where = f"{directory}/config.json"
    dialect = _detect(body, where)
    shape, layers = (speculators if dialect == "speculators" else sglang).read_config(body, where)
    tensors = {_head_name(name): tensor for name, tensor in read_tensors(directory).items()}
    embedding = tensors.pop(speculators.EMBEDDING, None)
    head = fill_head(Eagle3Head, shape, tensors, where=str(directory))
    return ForeignHead(dialect, layers, head, embedding)


def _detect(body: dict[str, Any], where: str) -> Dialect:
    """The dialect of a config.json. Raises HeadError for what is no EAGLE-3 head."""
    if speculators.MODEL_TYPE in body:
        return "speculators"
    if sglang.ARCHITECTURE in architectures_of(body, where) or "draft_vocab_size" in body:
        return "sglang"
    known = f"{speculators.MODEL_TYPE} nor architectures [{sglang.ARCHITECTURE}]"
    problem = f"is no EAGLE-3 head's: it has neither {known} nor draft_vocab_size"
    raise HeadError(problem, where=where, fix=_PASS_A_HEAD)


def _head_name(name: str) -> str:
    """The name that `Eagle3Head` has for a tensor of either dialect."""
    name = speculators.head_name(name.removeprefix("model."))
    for legacy, current in _LEGACY.items():
        name = name.replace(legacy, current)
    return name
