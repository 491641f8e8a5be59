"""A toy head on disk: every field of config.json is honoured or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.heads.checkpoint import ForeignHead, HeadCard
from pipeline.heads.fields import Layers, layer_ids, refuse_unknown, validated
from pipeline.records import TargetContract
from pipeline.target.open import Target

from .shape import ToyHead, ToyShape

LAYERS = "target_layer_ids"


def head_config(shape: ToyShape, contract: TargetContract) -> dict[str, Any]:
    layers = list(contract.capture_layers)
    return {"architectures": ["ToyDraftModel"], **shape.model_dump(), LAYERS: layers}


def read_config(
    body: dict[str, Any], where: str, tensors: Callable[[], Mapping[str, Tensor]]
) -> tuple[ToyShape, Layers | None]:
    refuse_unknown(body, where, read=(*ToyShape.model_fields, "architectures", LAYERS), rules={})
    fields = {name: body[name] for name in ToyShape.model_fields if name in body}
    layers = layer_ids(body.get(LAYERS), where, LAYERS, offset=0)
    return validated(ToyShape, fields, where), layers


def read_foreign(directory: Path) -> ForeignHead | None:
    return None


def export(
    folder: Path, head: ToyHead, card: HeadCard, format: str, target: Callable[[], Target]
) -> None:
    raise AssertionError("formats is empty")
