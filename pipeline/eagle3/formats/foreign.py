"""A head of another trainer, read and checked: its dialect, its names, its aux layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from pipeline.eagle3.formats import sglang, speculators
from pipeline.eagle3.formats.fields import Layers
from pipeline.eagle3.formats.known import architectures_of
from pipeline.eagle3.formats.tensors import fill_head, read_json, read_tensors
from pipeline.eagle3.head import DraftingHead, Eagle3Head
from pipeline.errors import HeadError

Dialect = Literal["sglang", "speculators", "dflash", "mtp"]

#: SGLang's older names of the three norms before fc.
_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}

_PASS_A_HEAD = "pass the directory of an EAGLE-3 head"


@dataclass(frozen=True)
class ForeignHead:
    """What a directory holds, under our names."""

    dialect: Dialect
    #: Output indices; None leaves them to the loader's default.
    capture_layers: Layers | None
    head: DraftingHead  # float32
    embedding: Tensor | None  # [V, H], when it ships one
    lacks_rows: bool = False  # its lm_head is the target's rows of its draft vocabulary
    lm_head: Tensor | None = None  # [V, H], when it ships one that is not the head's own


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
