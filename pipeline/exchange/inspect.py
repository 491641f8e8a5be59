"""What a head directory says about itself; its weights are not read, only their header."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from pipeline.eagle3.checkpoint import CARD, CONFIG, HEAD_FILES, WEIGHTS, read_card, read_shape
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.errors import HeadError
from pipeline.store.fetch import as_directory
from pipeline.store.location import Location

_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Tensor:
    """One tensor of model.safetensors."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: BF16, I64, BOOL
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """All that `eagle3 inspect` prints."""

    head: str
    shape: dict[str, Any]
    contract: dict[str, Any]
    parameters: int  # trained; the vocabulary map is not one
    share_of_target: float
    tensors: tuple[Tensor, ...]
    draft_vocabulary: dict[
        str, Any
    ]  # size, of, share, coverage of the training data's supervised tokens
    provenance: dict[str, Any]
    metrics: dict[str, Any]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def inspect_head(uri: str) -> Inspection:
    """Read the head at `uri` (directory or fsspec URI). Raises HeadError for what is no head or has other tensors than its shape."""
    location = Location(uri)
    sizes = location.sizes()
    missing = [name for name in HEAD_FILES if name not in sizes]
    if missing:
        foreign = CONFIG in sizes and WEIGHTS in sizes
        fix = (
            f"eagle3 import {uri} --target SOURCE --out HEAD"
            if foreign
            else "pass a head directory that `eagle3 train` or `eagle3 import` wrote"
        )
        raise HeadError(f"has no {', '.join(missing)}", where=f"head {uri}", fix=fix)
    with as_directory(location, [CONFIG, CARD]) as directory:
        shape, card = read_shape(directory), read_card(directory / CARD)
    tensors = _tensors(location, sizes[WEIGHTS])
    _check(tensors, shape, where=f"head {uri}: {WEIGHTS}")
    parameters = sum(prod(tensor.shape) for tensor in tensors if tensor.name not in _MAPS)
    return Inspection(
        head=uri,
        shape=shape.model_dump(mode="json"),
        contract=card.contract.model_dump(mode="json"),
        parameters=parameters,
        share_of_target=parameters / card.contract.parameters,
        tensors=tensors,
        draft_vocabulary={
            "size": shape.draft_vocab_size,
            "of": shape.vocab_size,
            "share": shape.draft_vocab_size / shape.vocab_size,
            "coverage": card.metrics.get("coverage"),
        },
        provenance=card.provenance,
        metrics=card.metrics,
    )


def _tensors(location: Location, size: int) -> tuple[Tensor, ...]:
    """The header of model.safetensors: 8 bytes of length, then JSON."""
    where = location.where(WEIGHTS)
    broken = HeadError("is no safetensors file", where=where, fix="export the head again")
    if size < 8:
        raise broken
    (length,) = struct.unpack("<Q", location.read_range(WEIGHTS, 0, 8))
    if length > size - 8:
        raise broken
    try:
        header = json.loads(location.read_range(WEIGHTS, 8, 8 + length))
        found = [
            Tensor(
                name,
                tuple(entry["shape"]),
                entry["dtype"],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        end = max(
            (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
            default=0,
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise broken from None
    if end + 8 + length != size:
        raise HeadError(
            f"has {size:,} bytes where its header asks for {end + 8 + length:,}",
            where=where,
            fix="copy or export the head again",
        )
    return tuple(sorted(found, key=lambda tensor: tensor.name))


def _check(tensors: tuple[Tensor, ...], shape: HeadShape, *, where: str) -> None:
    with torch.device("meta"):
        expected = {
            name: tuple(tensor.shape) for name, tensor in Eagle3Head(shape).state_dict().items()
        }
    found = {tensor.name: tensor.shape for tensor in tensors}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            have, want = found.get(name, "missing"), expected.get(name, "no such tensor")
            raise HeadError(
                f"{name} is {have} where {CONFIG} asks for {want}",
                where=where,
                fix="export the head again",
            )


def print_inspection(found: Inspection) -> None:
    """The same, for people."""
    from pipeline.console import console

    draft = found.draft_vocabulary
    covered = (
        f", {draft['coverage']:.2%} of the supervised tokens of its training"
        if isinstance(draft["coverage"], float)
        else ""
    )
    head = {
        "parameters": f"{found.parameters:,}, {found.share_of_target:.2%} of the target's {found.contract['parameters']:,}",
        "draft vocabulary": f"{draft['size']:,} of {draft['of']:,} tokens ({draft['share']:.1%}){covered}",
        **{
            name: value
            for name, value in found.shape.items()
            if name not in ("draft_vocab_size", "vocab_size")
        },
    }
    for title, rows in (
        ("head", head),
        ("contract", found.contract),
        ("provenance", found.provenance),
        ("metrics", found.metrics),
    ):
        console.print(_table(f"{title} {found.head}" if title == "head" else title, rows))
    console.print(_tensor_table(found.tensors))


def _table(title: str, rows: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(_shown(value)))
    if not rows:
        table.add_row("none", "")
    return table


def _tensor_table(tensors: tuple[Tensor, ...]) -> Any:
    from rich.table import Table

    table = Table(
        "tensor", "shape", "dtype", title="tensors", title_justify="left", title_style="bold"
    )
    table.add_column("bytes", justify="right")
    for tensor in tensors:
        table.add_row(
            tensor.name,
            " × ".join(f"{extent:,}" for extent in tensor.shape),
            tensor.dtype,
            f"{tensor.bytes:,}",
        )
    return table


def _shown(value: Any) -> str:
    """Mappings one entry a line, down to two levels; the rest as JSON."""
    if isinstance(value, dict) and value:
        return "\n".join(
            f"{name}: {json.dumps(inner, ensure_ascii=False) if isinstance(inner, dict | list) else inner}"
            for name, inner in value.items()
        )
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
