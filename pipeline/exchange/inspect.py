"""What a head directory says about itself; its weights are not read, only their header."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from pipeline.console import console, printable
from pipeline.eagle3.any_head import empty_head, read_any_shape
from pipeline.eagle3.checkpoint import CARD, CONFIG, HEAD_FILES, WEIGHTS, read_card
from pipeline.eagle3.head import DraftShape
from pipeline.errors import HeadError
from pipeline.store.location import Location, as_directory

#: The vocabulary's map, and what chained heads keep of the target.
_NOT_TRAINED = ("d2t", "t2d", "target_norm")
#: Fields of the shape that one row of the table shows together.
_VOCABULARIES = ("draft_vocab_size", "vocab_size")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in the header of model.safetensors."""

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
    tensors: tuple[TensorEntry, ...]
    draft_vocabulary: dict[str, Any]  # size, of, share, coverage of the supervised tokens
    provenance: dict[str, Any]
    metrics: dict[str, Any]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def inspect_head(uri: str) -> Inspection:
    """Read the head at `uri` (directory or fsspec URI).

    Raises HeadError for what is no head, or has other tensors than its shape asks for.
    """
    location = Location(uri)
    sizes = location.sizes()
    missing = [name for name in HEAD_FILES if name not in sizes]
    if missing:
        fix = "pass a head directory that `eagle3 train` or `eagle3 import` wrote"
        if CONFIG in sizes and WEIGHTS in sizes:  # a head of another trainer
            fix = f"eagle3 import {uri} --target SOURCE --out HEAD"
        raise HeadError(f"has no {', '.join(missing)}", where=f"head {uri}", fix=fix)
    with as_directory(location, [CONFIG, CARD]) as directory:
        shape, card = read_any_shape(directory), read_card(directory / CARD)
    tensors = _read_header(location, sizes[WEIGHTS])
    _check(tensors, shape, where=f"head {uri}: {WEIGHTS}")
    parameters = sum(prod(tensor.shape) for tensor in tensors if tensor.name not in _NOT_TRAINED)
    draft_vocabulary = {
        "size": shape.draft_vocab_size,
        "of": shape.vocab_size,
        "share": shape.draft_vocab_size / shape.vocab_size,
        "coverage": card.metrics.get("coverage"),
    }
    return Inspection(
        head=uri,
        shape=shape.model_dump(mode="json"),
        contract=card.contract.model_dump(mode="json"),
        parameters=parameters,
        share_of_target=parameters / card.contract.parameters,
        tensors=tensors,
        draft_vocabulary=draft_vocabulary,
        provenance=card.provenance,
        metrics=card.metrics,
    )


def _read_header(location: Location, size: int) -> tuple[TensorEntry, ...]:
    """The header of model.safetensors, a file of `size` bytes: 8 bytes of length, then JSON."""
    where, fix = location.where(WEIGHTS), "export the head again"
    broken = HeadError("is no safetensors file", where=where, fix=fix)
    if size < 8:
        raise broken
    (length,) = struct.unpack("<Q", location.read_range(WEIGHTS, 0, 8))
    if length > size - 8:
        raise broken
    try:
        header = json.loads(location.read_range(WEIGHTS, 8, 8 + length))
        entries, end = [], 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            end = max(end, stop)
            shape = tuple(entry["shape"])
            entries.append(TensorEntry(name, shape, entry["dtype"], stop - start))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise broken from None
    expected = 8 + length + end
    if expected != size:
        problem = f"has {size:,} bytes where its header asks for {expected:,}"
        raise HeadError(problem, where=where, fix="copy or export the head again")
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _check(tensors: tuple[TensorEntry, ...], shape: DraftShape, *, where: str) -> None:
    with torch.device("meta"):
        parts = empty_head(shape).state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in parts.items()}
    stored = {tensor.name: tensor.shape for tensor in tensors}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            have, want = stored.get(name, "missing"), expected.get(name, "no such tensor")
            problem = f"{name} is {have} where {CONFIG} asks for {want}"
            raise HeadError(problem, where=where, fix="export the head again")


def print_inspection(inspection: Inspection) -> None:
    """The same, for people."""
    tables = {
        f"head {inspection.head}": _head_rows(inspection),
        "contract": inspection.contract,
        "provenance": inspection.provenance,
        "metrics": inspection.metrics,
    }
    for title, rows in tables.items():
        console.print(_table(title, rows))
    console.print(_tensor_table(inspection.tensors))


def _head_rows(inspection: Inspection) -> dict[str, Any]:
    draft, share = inspection.draft_vocabulary, inspection.share_of_target
    of_target = f"{share:.2%} of the target's {inspection.contract['parameters']:,}"
    vocabulary = f"{draft['size']:,} of {draft['of']:,} tokens ({draft['share']:.1%})"
    if isinstance(draft["coverage"], float):
        vocabulary += f", {draft['coverage']:.2%} of the supervised tokens of its training"
    return {
        "parameters": f"{inspection.parameters:,}, {of_target}",
        "draft vocabulary": vocabulary,
        **{name: value for name, value in inspection.shape.items() if name not in _VOCABULARIES},
    }


def _table(title: str, rows: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title=printable(title), title_justify="left", title_style="bold", show_header=False
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(printable(name), printable(_shown(value)))
    if not rows:
        table.add_row("none", "")
    return table


def _tensor_table(tensors: tuple[TensorEntry, ...]) -> Any:
    from rich.table import Table

    table = Table(title="tensors", title_justify="left", title_style="bold")
    for column in ("tensor", "shape", "dtype"):
        table.add_column(column)
    table.add_column("bytes", justify="right")
    for tensor in tensors:
        shape = " × ".join(f"{extent:,}" for extent in tensor.shape)
        table.add_row(printable(tensor.name), shape, printable(tensor.dtype), f"{tensor.bytes:,}")
    return table


def _shown(value: Any) -> str:
    """Mappings one entry a line, down to two levels; the rest as JSON."""
    if isinstance(value, dict) and value:
        return "\n".join(f"{name}: {_inline(inner)}" for name, inner in value.items())
    return f"{value:.6g}" if isinstance(value, float) else _inline(value)


def _inline(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
