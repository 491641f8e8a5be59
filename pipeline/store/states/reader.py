"""The samples of one states shard, each read by itself and checked before it is handed out."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import CorruptShard
from pipeline.records import Shard
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS
from pipeline.store.states.encodings import Codec
from pipeline.store.states.layout import (
    TYPES,
    BrokenLayout,
    Layout,
    as_bytes,
    crc32,
    read_layout,
    sample_checksum,
)
from pipeline.store.states.sample import StatesSample, teacher_positions

#: (tensor, rows, width, type) → memory [rows, width] that the reader fills and hands out.
Room = Callable[[str, int, int, torch.dtype], Tensor]

_FIX = "restore the file, or run `eagle3 features --force`"
#: What a remote shard's first request asks for: header, offsets, ids and scales of a shard of usual size.
_FIRST_READ = 256 << 10


class StatesReader:
    """The samples of one states shard of the stage at `location`.

    Opening reads the header, ids and masks — a few bytes a token — and checks the layout; `sample(i)`
    reads only that sample's states: from a memory map when local, as two byte ranges when remote.
    `verify=False` leaves out the samples' checksums, for a shard whose own was checked just now.

    Raises CorruptShard with file and tensor, or with file and sample.
    """

    def __init__(self, location: Location, shard: Shard, *, verify: bool = True) -> None:
        self._folder, self._name, self._bytes, self._verify = (
            location.child(SHARDS),
            shard.name,
            shard.bytes,
            verify,
        )
        self._front = b""
        self._map = self._memory_map()
        self._front = self._read(0, min(self._bytes, _FIRST_READ)) if self._map is None else b""
        self._layout = self._read_layout()
        self._token_ids = self._whole("token_ids").to(torch.int32)
        self._supervised_mask = self._read_mask()
        self._checksums: list[int] = self._whole("checksums").tolist()
        self._token_offsets: list[int] = self._whole("token_offsets").tolist()
        self._final_offsets: list[int] = self._whole("final_offsets").tolist()
        self._codec = Codec(
            self._layout.encoding,
            self._whole("channel_scales") if "channel_scales" in self._layout.tensors else None,
        )
        self._front = b""
        self._check_offsets()
        self._final_positions = self._find_positions()
        self._start = crc32(self._codec.channels) if self._codec.channels is not None else 0

    def __len__(self) -> int:
        return len(self._layout.samples)

    @property
    def hidden_size(self) -> int:
        """H of the target."""
        return self._layout.hidden_size

    @property
    def codec(self) -> Codec:
        """How this shard's states are encoded."""
        return self._codec

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, known without reading any state."""
        return [
            stop - start
            for start, stop in zip(self._token_offsets, self._token_offsets[1:], strict=False)
        ]

    def origin(self, index: int) -> tuple[str, str]:
        """Id and source of one sample, without reading any state."""
        return self._layout.samples[index]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """`token_ids` and `supervised_mask` of one sample, without reading any state."""
        own = _span(self._token_offsets, index)
        return self._token_ids[own], self._supervised_mask[own]

    def sample(self, index: int, *, decode: bool = True, room: Room | None = None) -> StatesSample:
        """All of one sample, its states as bf16 copies that the caller owns.

        With `decode=False` they stay as they are stored, for `StatesSample.decode` on another device; those
        of a local shard then lie in the memory map. With a `room` for "aux_states" and "final_states" they lie there.
        """
        (sample_id, source), (token_ids, supervised_mask) = self.origin(index), self.tokens(index)
        aux_rows, final_rows = (
            self._rows(name, rows, room) for name, rows in self._spans(index).items()
        )
        if self._verify:
            found = sample_checksum(
                self._start, sample_id, source, token_ids, supervised_mask, aux_rows, final_rows
            )
            if found != self._checksums[index]:
                raise self._corrupt(
                    f"sample {sample_id} of {source} has CRC-32 {found:08x}, {self._checksums[index]:08x} was written"
                )
        sample = StatesSample(
            sample_id,
            source,
            token_ids,
            supervised_mask,
            aux_rows,
            final_rows,
            self._final_positions[index],
            self._codec,
        )
        if not decode:
            return sample
        decoded = sample.decode()
        return decoded if self._codec.encoding != "bf16" else _copied(decoded)

    def _memory_map(self) -> mmap.mmap | None:
        size = self._folder.size(self._name)
        if size != self._bytes:
            raise self._corrupt(f"has {size} bytes, {self._bytes} were committed")
        if not self._folder.is_local or not size:
            return None
        with open(self._folder.local_path(self._name), "rb") as file:
            # Copy-on-write: torch wants writable memory, and whatever it writes stays out of the file.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _read(self, start: int, stop: int) -> bytes:
        if self._map is not None:
            return self._map[start:stop]
        if stop <= len(self._front):
            return self._front[start:stop]
        return self._folder.read_range(self._name, start, stop)

    def _read_layout(self) -> Layout:
        length = int.from_bytes(self._read(0, 8), "little") if self._bytes >= 8 else 0
        if not 2 <= length <= self._bytes - 8:
            raise self._corrupt("has no safetensors header")
        try:
            return read_layout(self._read(8, 8 + length), 8 + length, self._bytes)
        except BrokenLayout as error:
            raise self._corrupt(str(error), error.fix) from None

    def _read_mask(self) -> Tensor:
        """uint8 [T]."""
        bits = np.frombuffer(self._read(*self._layout.tensors["loss_mask"][2:]), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=self._layout.tokens))

    def _check_offsets(self) -> None:
        layout = self._layout
        for name, offsets, end in (
            ("token_offsets", self._token_offsets, layout.tokens),
            ("final_offsets", self._final_offsets, layout.finals),
        ):
            if offsets[0] != 0 or offsets[-1] != end or sorted(offsets) != offsets:
                raise self._corrupt(f"{name} does not rise from 0 to {end}")

    def _find_positions(self) -> list[Tensor]:
        """Of each sample's final states. Raises CorruptShard where the mask has others."""
        found = [
            teacher_positions(self._supervised_mask[_span(self._token_offsets, index)])
            for index in range(len(self))
        ]
        for index, positions in enumerate(found):
            stored = self._final_offsets[index + 1] - self._final_offsets[index]
            if len(positions) != stored:
                sample_id, source = self.origin(index)
                raise self._corrupt(
                    f"sample {sample_id} of {source} has {stored} final states for {len(positions)} supervised tokens"
                )
        return found

    def _whole(self, name: str) -> Tensor:
        tensor = self._layout.tensors[name]
        return _tensor(self._read(tensor.start, tensor.stop), tensor.dtype, tensor.shape)

    def _spans(self, index: int) -> dict[str, slice]:
        """The rows of one sample in the tensors that hold states."""
        return {
            "aux_states": _span(self._token_offsets, index),
            "final_states": _span(self._final_offsets, index),
        }

    def _rows(self, name: str, rows: slice, room: Room | None) -> Tensor:
        """Rows as stored; of a local shard a view of its memory map, unless there is a room for them."""
        tensor, count = self._layout.tensors[name], rows.stop - rows.start
        start, stop = tensor.span(rows)
        if self._map is not None and stop > start:
            stored = torch.frombuffer(
                self._map, dtype=TYPES[tensor.dtype], count=count * tensor.shape[1], offset=start
            ).view(count, -1)
        else:
            stored = _tensor(self._read(start, stop), tensor.dtype, (count, tensor.shape[1]))
        if room is None:
            return stored
        own = room(name, count, tensor.shape[1], stored.dtype)
        as_bytes(own)[:] = as_bytes(stored)
        return own

    def _corrupt(self, problem: str, fix: str | None = None) -> CorruptShard:
        return CorruptShard(problem, where=self._folder.where(self._name), fix=fix or _FIX)


def _span(offsets: list[int], index: int) -> slice:
    return slice(offsets[index], offsets[index + 1])


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that owns a writable copy of `data`."""
    if not data:
        return torch.empty(shape, dtype=TYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=TYPES[dtype]).view(shape)


def _copied(sample: StatesSample) -> StatesSample:
    return replace(
        sample, aux_states=sample.aux_states.clone(), final_states=sample.final_states.clone()
    )
