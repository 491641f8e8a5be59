"""The header of a states shard, and what must hold between its tensors.

n samples, T tokens of all samples, S stored final states, H the target's hidden size, W bytes a row:

    token_offsets   int64 [n+1]      sample s owns tokens [token_offsets[s], token_offsets[s+1])
    final_offsets   int64 [n+1]      … and final states likewise
    checksums       uint32 [n]       CRC-32 of all that belongs to a sample
    token_ids       int32 [T]        uint16 when every id is below 65,536
    channel_scales  bf16 [4, H]      with int8 only
    aux_states      rows of 3 layers [T, …]
    final_states    rows of 1 layer  [S, …]
    supervised_mask       uint8 [⌈T/8⌉]    one bit a token, the first token in the highest bit

docs/states-format.md specifies it byte by byte.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.store.states.encodings import AUX_LAYERS, LAYERS, ROW_TYPES, Encoding, row_width
from pipeline.store.states.format import FORMAT

#: The only metadata key: safetensors keeps its metadata in no particular order, one key has but one.
METADATA = "eagle3"

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
    """The bytes are not a states shard that this version reads; `fix` is set when it is not the usual one."""

    def __init__(self, problem: str, fix: str | None = None) -> None:
        self.fix = fix
        super().__init__(problem)


class Stored(NamedTuple):
    """Where one tensor lies."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return math.prod(self.shape[1:]) * TYPES[self.dtype].itemsize

    def span(self, rows: slice) -> tuple[int, int]:
        """Byte range of some rows in the file."""
        return self.start + rows.start * self.row_bytes, self.start + rows.stop * self.row_bytes


class Layout(NamedTuple):
    """A header that was understood."""

    encoding: Encoding
    hidden_size: int
    samples: list[tuple[str, str]]  # id, source
    tokens: int  # T
    finals: int  # S
    tensors: dict[str, Stored]


def read_layout(header: bytes, first: int, size: int) -> Layout:
    """Understand a safetensors header whose tensors begin at byte `first` of a file of `size` bytes. Raises BrokenLayout."""
    try:
        fields: dict[str, Any] = json.loads(header)
        metadata = fields.pop("__metadata__")[METADATA]
        tensors = {
            name: Stored(
                entry["dtype"], tuple(entry["shape"]), *(first + at for at in entry["data_offsets"])
            )
            for name, entry in fields.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenLayout(f"has a broken safetensors header: {error}") from None
    encoding, samples = _read_listing(metadata)
    _check_names(tensors, encoding)
    for name, tensor in tensors.items():
        _check_range(name, tensor, size)
    _check_shapes(tensors, encoding, len(samples))
    hidden = _hidden_size(tensors, encoding)
    return Layout(
        encoding,
        hidden,
        samples,
        tensors["token_ids"].shape[0],
        tensors["final_states"].shape[0],
        tensors,
    )


def sample_checksum(
    start: int,
    sample_id: str,
    source: str,
    token_ids: Tensor,
    supervised_mask: Tensor,
    aux_rows: Tensor,
    final_rows: Tensor,
) -> int:
    """CRC-32 over id, source, ids as int32, mask as a byte each, and both kinds of rows as stored.

    `start` is the CRC-32 of the shard's channel scales, 0 without any; a CRC continues from another.
    """
    named = (
        f"{sample_id}\n{source}\n".encode()
        + token_ids.numpy().tobytes()
        + supervised_mask.numpy().tobytes()
    )
    return crc32(final_rows, crc32(aux_rows, zlib.crc32(named, start)))


def crc32(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(as_bytes(tensor).data, start) if tensor.numel() else start


def as_bytes(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The same memory as rows of bytes, for a contiguous CPU tensor; numpy has no bfloat16."""
    return tensor.view(torch.uint8).numpy()


def _read_listing(metadata: Any) -> tuple[Encoding, list[tuple[str, str]]]:
    try:
        listing = json.loads(metadata)
        version = listing["format"]
        if version != FORMAT:
            raise _other_format(version)
        encoding, samples = (
            listing["encoding"],
            [(str(entry["id"]), str(entry["source"])) for entry in listing["samples"]],
        )
    except BrokenLayout:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenLayout(f"has broken metadata {METADATA}: {error}") from None
    if encoding not in ROW_TYPES:
        raise BrokenLayout(f"has encoding {encoding!r}, this version reads {', '.join(ROW_TYPES)}")
    return encoding, samples


def _other_format(version: Any) -> BrokenLayout:
    problem = f"has format {version}, this version reads {FORMAT}"
    if isinstance(version, int) and version > FORMAT:
        return BrokenLayout(problem, "upgrade eagle3, or choose another run.uri=…")
    return BrokenLayout(problem, "make the states again with `eagle3 features --force`")


def _check_names(tensors: dict[str, Stored], encoding: Encoding) -> None:
    rows = _NAMES[ROW_TYPES[encoding]]
    expected = {
        "token_offsets": ("I64",),
        "final_offsets": ("I64",),
        "checksums": ("U32",),
        "token_ids": ("I32", "U16"),
        "aux_states": (rows,),
        "final_states": (rows,),
        "loss_mask": ("U8",),
    }
    if encoding == "int8":
        expected["channel_scales"] = ("BF16",)
    if sorted(tensors) != sorted(expected):
        raise BrokenLayout(
            f"holds tensors {', '.join(sorted(tensors))} instead of {', '.join(sorted(expected))}"
        )
    for name, dtypes in expected.items():
        if tensors[name].dtype not in dtypes:
            raise BrokenLayout(f"{name} is {tensors[name].dtype} instead of {' or '.join(dtypes)}")


def _check_range(name: str, tensor: Stored, size: int) -> None:
    length = math.prod(tensor.shape) * TYPES[tensor.dtype].itemsize
    if tensor.stop - tensor.start != length or not 0 <= tensor.start <= tensor.stop <= size:
        raise BrokenLayout(
            f"{name} has byte range [{tensor.start}, {tensor.stop}), which does not fit its shape {list(tensor.shape)}"
        )


def _check_shapes(tensors: dict[str, Stored], encoding: Encoding, count: int) -> None:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if len(shapes["final_states"]) != 2 or len(shapes["token_ids"]) != 1:
        raise BrokenLayout(
            f"final_states has shape {list(shapes['final_states'])} and token_ids {list(shapes['token_ids'])}"
        )
    total, finals, hidden = (
        shapes["token_ids"][0],
        shapes["final_states"][0],
        _hidden_size(tensors, encoding),
    )
    expected = {
        "token_offsets": (count + 1,),
        "final_offsets": (count + 1,),
        "checksums": (count,),
        "aux_states": (total, row_width(encoding, hidden, AUX_LAYERS)),
        "final_states": (finals, row_width(encoding, hidden, 1)),
        "loss_mask": (-(-total // 8),),
        "channel_scales": (LAYERS, hidden),
    }
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise BrokenLayout(f"{name} has shape {list(shapes[name])} instead of {list(shape)}")


def _hidden_size(tensors: dict[str, Stored], encoding: Encoding) -> int:
    """A row of one layer is as wide as H, and what the encoding adds."""
    return tensors["final_states"].shape[-1] - row_width(encoding, 0, 1)
