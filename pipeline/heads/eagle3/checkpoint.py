"""EAGLE-3 heads on disk: ours, which SGLang loads as it is, and those of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.console import notice
from pipeline.errors import HeadError
from pipeline.heads.algorithm import Export
from pipeline.heads.checkpoint import (
    CONFIG,
    ForeignHead,
    HeadCard,
    add_t2d,
    fill_head,
    fill_rows,
    has_targets_embedding,
    is_own,
    read_json,
    read_tensors,
    write_files,
)
from pipeline.heads.eagle3 import gguf, sglang, speculators
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.fields import Layers, architectures_of
from pipeline.heads.speculators import MODEL_TYPE
from pipeline.records import TargetContract
from pipeline.target.weights import TargetWeights

#: SGLang's older names of the three norms before fc.
_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


_LM_HEAD = "lm_head.weight"


_PASS_A_HEAD = "pass the directory of an EAGLE-3 head"


def read_foreign(directory: Path) -> ForeignHead:
    """Read a head directory in either dialect. Raises HeadError with file, field and fix."""
    body = read_json(directory / CONFIG)
    where = f"{directory}/{CONFIG}"
    dialect = _detect(body, where)
    shape, layers = (speculators if dialect == "speculators" else sglang).read_config(body, where)
    tensors = {_head_name(name): tensor for name, tensor in read_tensors(directory).items()}
    own = shape.own_embedding
    embedding = None if own else tensors.pop(speculators.EMBEDDING, None)
    # SGLang and vLLM then draft with the target's lm_head, which has to be of the same width.
    whole = shape.draft_vocab_size == shape.vocab_size and not shape.target_hidden_size
    lacks_rows = whole and _LM_HEAD not in tensors and not is_own(directory)
    if lacks_rows:
        tensors[_LM_HEAD] = torch.zeros(shape.vocab_size, shape.hidden_size)
    tensors = add_t2d(tensors, shape.vocab_size, directory)
    head = fill_head(Eagle3Head, shape, tensors, where=str(directory))
    architectures = () if dialect == "speculators" else architectures_of(body, where)
    complete = partial(_complete, architectures=architectures)
    return ForeignHead(dialect, layers, head, embedding, lacks_rows, complete=complete)


def _complete(
    foreign: ForeignHead, weights: TargetWeights, where: str, *, architectures: Collection[str]
) -> ForeignHead:
    """The head with what is the target's, or with an embedding of its own.

    SGLang's class puts the target's embedding over the file's, vLLM's keeps the file's.
    """
    foreign = fill_rows(foreign, weights, where)
    if has_targets_embedding(foreign, weights):
        return foreign
    own, check = f"{speculators.EMBEDDING} is not the target's", "check --target if it was frozen"
    if sglang.ARCHITECTURE in architectures:
        notice("import", f"{own}: left out, as {sglang.ARCHITECTURE} reads the target's ({check})")
        return replace(foreign, embedding=None)
    if foreign.dialect == "sglang" and not {*sglang.CLASSES} & {*architectures}:
        problem = f"{own}, and whether the head reads it depends on architectures"
        fix = f"write [{sglang.ARCHITECTURE}] for a head that reads the target's, "
        fix += f"else [{sglang.OF_VLLM}]"
        raise HeadError(problem, where=where, fix=fix)
    notice("import", f"{own}: kept as the head's own, as vLLM does ({check})")
    shape = foreign.head.shape.model_copy(update={"own_embedding": True})
    tensors = {**foreign.head.state_dict(), speculators.EMBEDDING: foreign.embedding}
    return replace(foreign, head=fill_head(Eagle3Head, shape, tensors, where=where), embedding=None)


def _detect(body: dict[str, Any], where: str) -> str:
    """The dialect of a config.json. Raises HeadError for what is no EAGLE-3 head."""
    if MODEL_TYPE in body:
        return "speculators"
    named = architectures_of(body, where)
    if {*sglang.CLASSES} & {*named} or "draft_vocab_size" in body:
        return "sglang"
    known = f"{MODEL_TYPE} nor architectures [{sglang.ARCHITECTURE}]"
    problem = f"is no EAGLE-3 head's: it has neither {known} nor draft_vocab_size"
    if named:
        problem = f"{problem}, and architectures is {named}"
    raise HeadError(problem, where=where, fix=_PASS_A_HEAD)


def _head_name(name: str) -> str:
    """The name that `Eagle3Head` has for a tensor of either dialect."""
    name = speculators.head_name(name.removeprefix("model."))
    for legacy, current in _LEGACY.items():
        name = name.replace(legacy, current)
    return name


def head_config(shape: HeadShape, contract: TargetContract) -> dict[str, Any]:
    """config.json of a head's directory: SGLang's."""
    return sglang.sglang_config(shape, contract.capture_layers)


def read_config(
    body: dict[str, Any], where: str, tensors: Callable[[], Mapping[str, Tensor]]
) -> tuple[HeadShape, Layers | None]:
    """Shape and aux layers of a config.json. Raises HeadError."""
    del tensors
    if MODEL_TYPE in body:
        fix = "eagle3 import DIRECTORY --target SOURCE --out HEAD"
        raise HeadError("is in the dialect of speculators", where=where, fix=fix)
    return sglang.read_config(body, where)


def export(folder: Path, head: Eagle3Head, card: HeadCard, request: Export) -> None:
    """Write the dialect of speculators, a GGUF file, or SGLang's, which is our own directory."""
    if request.format == "speculators":
        speculators.export_speculators(folder, head, card, request)
    elif request.format == "gguf":
        gguf.export_gguf(folder, head, card)
    else:
        write_files(folder, head_config(head.shape, card.contract), head.state_dict(), card)
