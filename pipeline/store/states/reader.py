"""The samples of one states shard, each read by itself and checked before it is handed out."""

from __future__ import annotations

import os
import weakref

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import CorruptShard
from pipeline.records import Shard
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS
from pipeline.store.states.encodings import Codec
from pipeline.store.states.layout import MASK, BrokenLayout, Layout, read_layout
from pipeline.store.states.sample import (
    StatesSample,
    as_bytes,
    crc32,
    sample_checksum,
    teacher_positions,
)

_FIX = "restore the file, or run `eagle3 features --force`"
#: What opening reads first: header, offsets, ids and scales of a shard of usual size.
_FIRST_READ = 256 << 10


class StatesReader:
    """The samples of one states shard of the stage at `location`.

    Opening reads the header, ids and masks — a few bytes a token — and checks the layout. `sample`
    and `read_into` then read only that sample's states: at their position in a local file, as two
    byte ranges of a remote one. A memory map would count every page it has shown as this process's
    memory, and take a page fault for each; a read costs one copy, into memory that is at hand.

    Raises CorruptShard with file and tensor, or with file and sample. Threads may share a reader.
    """

    def __init__(self, location: Location, shard: Shard) -> None:
        self._folder, self._name, self._bytes = location.child(SHARDS), shard.path, shard.bytes
        self._file = self._open()
        self._front = bytearray()
        self._front = self._read(0, min(self._bytes, _FIRST_READ))
        self._layout = self._read_layout()
        self._token_ids = self._whole("token_ids").to(torch.int32)
        self._supervised_mask = self._read_mask()
        self._checksums: list[int] = self._whole("checksums").tolist()
        self._token_offsets = self._read_offsets("token_offsets", self._layout.tokens)
        self._final_offsets = self._read_offsets("final_offsets", self._layout.finals)
        has_channels = "channel_scales" in self._layout.tensors
        channels = self._whole("channel_scales") if has_channels else None
        self._channels_checksum = crc32(channels)
        self._front = bytearray()
        #: How this shard's states are encoded.
        self.codec = Codec(self._layout.encoding, channels)
        #: Tokens of each sample.
        self.lengths: list[int] = np.diff(self._token_offsets).tolist()
        self._final_positions = self._find_positions()

    def __len__(self) -> int:
        return len(self._layout.samples)

    @property
    def hidden_size(self) -> int:
        """H of the target."""
        return self._layout.hidden_size

    def origin(self, index: int) -> tuple[str, str]:
        """Id and source of one sample, without reading any state."""
        return self._layout.samples[index]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """`token_ids` and `supervised_mask` of one sample, without reading any state."""
        own = slice(*self._token_offsets[index : index + 2])
        return self._token_ids[own], self._supervised_mask[own]

    def final_positions(self, index: int) -> Tensor:
        """Positions of one sample's final states, without reading any state."""
        return self._final_positions[index]

    def sample(self, index: int, *, decode: bool = True) -> StatesSample:
        """All of one sample, its states in bf16; with `decode=False` as they are stored."""
        aux, final = self.new_rows(self.lengths[index], len(self._final_positions[index]))
        sample = self.read_into(index, aux, final)
        return sample.decode() if decode else sample

    def new_rows(self, tokens: int, finals: int) -> tuple[Tensor, Tensor]:
        """Memory for the states of `tokens` and so many final states, as this shard stores them."""
        return self._empty("aux_states", tokens), self._empty("final_states", finals)

    def read_into(self, index: int, aux: Tensor, final: Tensor) -> StatesSample:
        """One sample with its states as stored, read into `aux` [T, …] and `final` [S, …].

        They are rows of `new_rows`, as many as the sample has, and hold wrong bytes after an error.
        """
        for (start, stop), rows in zip(self._byte_ranges(index), (aux, final), strict=True):
            memory = as_bytes(rows).reshape(-1).data
            assert len(memory) == stop - start, "memory for another sample"
            self._fill(memory, start)
        (sample_id, source), (token_ids, mask) = self.origin(index), self.tokens(index)
        positions = self._final_positions[index]
        sample = StatesSample(sample_id, source, token_ids, mask, aux, final, positions, self.codec)
        checksum, written = sample_checksum(sample, self._channels_checksum), self._checksums[index]
        if checksum != written:
            problem = f"has CRC-32 {checksum:08x}, {written:08x} was written"
            raise self._corrupt(f"sample {sample_id} of {source} {problem}")
        return sample

    def announce(self, index: int) -> None:
        """Have the operating system read one sample of a local shard ahead, if it can be asked."""
        if self._file is None or not hasattr(os, "posix_fadvise"):
            return
        for start, stop in self._byte_ranges(index):
            if stop > start:  # a length of 0 would mean all of the file
                os.posix_fadvise(self._file, start, stop - start, os.POSIX_FADV_WILLNEED)

    def _open(self) -> int | None:
        """Descriptor of a local file. It must be as long as what was committed, wherever it is."""
        size = self._folder.size(self._name)
        if size != self._bytes:
            raise self._corrupt(f"has {size} bytes, {self._bytes} were committed")
        if not self._folder.is_local:
            return None
        file = os.open(self._folder.local_path(self._name), os.O_RDONLY)
        weakref.finalize(self, os.close, file)  # readers are closed by forgetting them
        return file

    def _read(self, start: int, stop: int) -> bytearray:
        if stop <= len(self._front):
            return self._front[start:stop]
        data = bytearray(stop - start)
        self._fill(memoryview(data), start)
        return data

    def _fill(self, memory: memoryview, start: int) -> None:
        """Read the bytes of the file from `start` on, as many as `memory` holds."""
        stop = start + len(memory)
        if self._file is None:
            memory[:] = self._folder.read_range(self._name, start, stop)
            return
        done = 0
        while done < len(memory):  # one call reads at most 2 GB
            count = os.preadv(self._file, [memory[done:]], start + done)
            if not count:
                raise self._corrupt(f"ends after {start + done} bytes where {stop} were expected")
            done += count

    def _read_layout(self) -> Layout:
        length = int.from_bytes(self._read(0, 8), "little") if self._bytes >= 8 else 0
        if not 2 <= length <= self._bytes - 8:
            raise self._corrupt("has no safetensors header")
        try:
            return read_layout(self._read(8, 8 + length), 8 + length, self._bytes)
        except BrokenLayout as error:
            raise self._corrupt(str(error), error.fix) from None

    def _whole(self, name: str) -> Tensor:
        tensor = self._layout.tensors[name]
        data = self._read(tensor.start, tensor.stop)
        if not data:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)

    def _read_mask(self) -> Tensor:
        """uint8 [T]."""
        bits = self._whole(MASK).numpy()
        return torch.from_numpy(np.unpackbits(bits, count=self._layout.tokens))

    def _read_offsets(self, name: str, end: int) -> list[int]:
        offsets: list[int] = self._whole(name).tolist()
        if offsets[0] != 0 or offsets[-1] != end or sorted(offsets) != offsets:
            raise self._corrupt(f"{name} does not rise from 0 to {end}")
        return offsets

    def _find_positions(self) -> list[Tensor]:
        """Of each sample's final states. Raises CorruptShard where the mask has others."""
        positions = []
        for index, stored in enumerate(np.diff(self._final_offsets).tolist()):
            own = teacher_positions(self.tokens(index)[1], stored)
            positions.append(own)
            if len(own) != stored:
                sample_id, source = self.origin(index)
                problem = f"{stored} final states for {len(own)} supervised tokens"
                raise self._corrupt(f"sample {sample_id} of {source} has {problem}")
        return positions

    def _empty(self, name: str, rows: int) -> Tensor:
        tensor = self._layout.tensors[name]
        # numpy asks for huge pages: a fault for each 4 KB would cost as much as reading them. Its
        # empty arrays have strides that torch cannot view as another type.
        memory = torch.from_numpy(np.empty(max(1, rows) * tensor.row_bytes, dtype=np.uint8))
        return memory.view(tensor.dtype).view(-1, tensor.shape[1])[:rows]

    def _byte_ranges(self, index: int) -> list[tuple[int, int]]:
        """Where aux and final states of one sample lie."""
        tensors, own = self._layout.tensors, slice(index, index + 2)
        return [
            tensors["aux_states"].byte_range(*self._token_offsets[own]),
            tensors["final_states"].byte_range(*self._final_offsets[own]),
        ]

    def _corrupt(self, problem: str, fix: str | None = None) -> CorruptShard:
        return CorruptShard(problem, where=self._folder.where(self._name), fix=fix or _FIX)
