"""What a head directory says about itself, once all of it has been read and checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pipeline.console import console, printable
from pipeline.errors import HeadError
from pipeline.heads.checkpoint import CONFIG, HEAD_FILES, WEIGHTS
from pipeline.heads.registry import head_directory, load_head
from pipeline.store.location import Location

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

    Raises HeadError for what `open_head` refuses.
    """
    location = Location(uri)
    names = location.names()
    missing = [name for name in HEAD_FILES if name not in names]
    if missing:
        fix = "pass a head directory that `eagle3 train` or `eagle3 import` wrote"
        if CONFIG in names and WEIGHTS in names:  # a head of another trainer
            fix = f"eagle3 import {uri} --target SOURCE --out HEAD"
        raise HeadError(f"has no {', '.join(missing)}", where=f"head {uri}", fix=fix)
    with head_directory(location) as directory:
        head, card = load_head(directory)
        tensors = _read_header(directory / WEIGHTS)
    shape = head.shape
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


def _read_header(path: Path) -> tuple[TensorEntry, ...]:
    """Names, shapes, types and sizes in a file that has been read."""
    entries = []
    with safe_open(path, framework="pt") as stored:
        for name in sorted(set(stored.keys())):
            entry = stored.get_slice(name)
            shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
            size = prod(shape) * stored.get_tensor(name).element_size()
            entries.append(TensorEntry(name, shape, dtype, size))
    return tuple(entries)


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
