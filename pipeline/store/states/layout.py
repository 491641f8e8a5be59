"""The header of a states shard, and what must hold between its tensors.

n samples, T tokens of all samples, S stored final states, H the target's hidden size:

    token_offsets   int64 [n+1]       sample s owns tokens [token_offsets[s], token_offsets[s+1])
    final_offsets   int64 [n+1]       … and final states likewise
    checksums       uint32 [n]        CRC-32 of all that belongs to a sample
    token_ids       int32 [T]         uint16 when every id is below 65,536
    channel_scales  bf16 [4, H]       with int8 only
    aux_states      rows of 3 layers  [T, …]
    final_states    rows of 1 layer   [S, …]
    supervised_mask uint8 [⌈T/8⌉]     one bit a token, the first one highest

docs/states-format.md specifies it byte by byte.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch

from pipeline.records import STATES_FORMAT
from pipeline.store.states.encodings import AUX_LAYERS, LAYERS, ROW_TYPES, Encoding, row_width

#: The only metadata key: safetensors keeps metadata in no particular order, one key has one.
METADATA = "eagle3"
#: The tensor that holds the supervised mask.
MASK = "supervised_mask"

TYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


class BrokenLayout(ValueError):
    """No states shard that this version reads; `fix` is set when it is not the usual one."""

    def __init__(self, problem: str, fix: str | None = None) -> None:
        self.fix = fix
        super().__init__(problem)


class StoredTensor(NamedTuple):
    """Where one tensor lies."""

    type_name: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.type_name]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def byte_range(self, first: int, last: int) -> tuple[int, int]:
        """Where rows [first, last) lie in the file."""
        return self.start + first * self.row_bytes, self.start + last * self.row_bytes


class Layout(NamedTuple):
    """A header that was understood."""

    encoding: Encoding
    hidden_size: int
    samples: list[tuple[str, str]]  # id, source
    tokens: int  # T
    finals: int  # S
    tensors: dict[str, StoredTensor]


def read_layout(header: bytes | bytearray, first: int, size: int) -> Layout:
    """Understand a safetensors header; tensors begin at byte `first` of a file of `size` bytes.

    Raises BrokenLayout.
    """
    try:
        fields: dict[str, Any] = json.loads(header)
        metadata = fields.pop("__metadata__")[METADATA]
        tensors = {name: _stored(entry, first) for name, entry in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenLayout(f"has a broken safetensors header: {error}") from None
    encoding, samples = _read_listing(metadata)
    _check_names(tensors, encoding)
    for name, tensor in tensors.items():
        _check_range(name, tensor, size)
    _check_shapes(tensors, encoding, len(samples))
    tokens, finals = tensors["token_ids"].shape[0], tensors["final_states"].shape[0]
    return Layout(encoding, _hidden_size(tensors, encoding), samples, tokens, finals, tensors)


def _stored(entry: Any, first: int) -> StoredTensor:
    start, stop = (first + at for at in entry["data_offsets"])
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), start, stop)


def _read_listing(metadata: Any) -> tuple[Encoding, list[tuple[str, str]]]:
    """Encoding, and id and source of each sample."""
    try:
        listing = json.loads(metadata)
        version = listing["format"]
        if version != STATES_FORMAT:
            raise _other_format(version)
        encoding: Encoding = listing["encoding"]
        samples = [(str(entry["sample_id"]), str(entry["source"])) for entry in listing["samples"]]
    except BrokenLayout:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenLayout(f"has broken metadata {METADATA}: {error}") from None
    if encoding not in ROW_TYPES:
        raise BrokenLayout(f"has encoding {encoding!r}, this version reads {', '.join(ROW_TYPES)}")
    return encoding, samples


def _other_format(version: Any) -> BrokenLayout:
    problem = f"has format {version}, this version reads {STATES_FORMAT}"
    if isinstance(version, int) and version > STATES_FORMAT:
        return BrokenLayout(problem, "upgrade eagle3, or choose another run.uri=…")
    return BrokenLayout(problem, "make the states again with `eagle3 features --force`")


def _check_names(tensors: dict[str, StoredTensor], encoding: Encoding) -> None:
    rows = (_NAMES[ROW_TYPES[encoding]],)
    expected = {
        "token_offsets": ("I64",),
        "final_offsets": ("I64",),
        "checksums": ("U32",),
        "token_ids": ("I32", "U16"),
        "aux_states": rows,
        "final_states": rows,
        MASK: ("U8",),
    }
    if encoding == "int8":
        expected["channel_scales"] = ("BF16",)
    if sorted(tensors) != sorted(expected):
        stored, known = ", ".join(sorted(tensors)), ", ".join(sorted(expected))
        raise BrokenLayout(f"holds tensors {stored} instead of {known}")
    for name, types in expected.items():
        stored = tensors[name].type_name
        if stored not in types:
            raise BrokenLayout(f"{name} is {stored} instead of {' or '.join(types)}")


def _check_range(name: str, tensor: StoredTensor, size: int) -> None:
    length = math.prod(tensor.shape) * tensor.dtype.itemsize
    if tensor.stop - tensor.start != length or not 0 <= tensor.start <= tensor.stop <= size:
        byte_range, shape = f"[{tensor.start}, {tensor.stop})", list(tensor.shape)
        raise BrokenLayout(
            f"{name} has byte range {byte_range}, which does not fit its shape {shape}"
        )


def _check_shapes(tensors: dict[str, StoredTensor], encoding: Encoding, count: int) -> None:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if len(shapes["final_states"]) != 2 or len(shapes["token_ids"]) != 1:
        finals, ids = list(shapes["final_states"]), list(shapes["token_ids"])
        raise BrokenLayout(f"final_states has shape {finals} and token_ids {ids}")
    tokens, hidden = shapes["token_ids"][0], _hidden_size(tensors, encoding)
    expected = {
        "token_offsets": (count + 1,),
        "final_offsets": (count + 1,),
        "checksums": (count,),
        "aux_states": (tokens, row_width(encoding, hidden, AUX_LAYERS)),
        MASK: (-(-tokens // 8),),
        "channel_scales": (LAYERS, hidden),
    }
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise BrokenLayout(f"{name} has shape {list(shapes[name])} instead of {list(shape)}")


def _hidden_size(tensors: dict[str, StoredTensor], encoding: Encoding) -> int:
    """A row of one layer is as wide as H, and what the encoding adds."""
    return tensors["final_states"].shape[1] - row_width(encoding, 0, 1)
