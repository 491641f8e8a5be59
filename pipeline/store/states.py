"""States of samples on storage: the one door to their format, docs/states-format.md.

n samples, T tokens of all samples, S stored final states, H the target's hidden size, L aux layers:

    token_offsets   int64 [n+1]       sample s owns tokens [token_offsets[s], token_offsets[s+1])
    final_offsets   int64 [n+1]       … and final states likewise
    checksums       uint32 [n]        CRC-32 of all that belongs to a sample
    token_ids       int32 [T]         uint16 when every id is below 65,536
    channel_scales  bf16 [L+1, H]     with int8 only
    aux_states      rows of L layers  [T, …]
    final_states    rows of 1 layer   [S, …]
    supervised_mask uint8 [⌈T/8⌉]     one bit a token, the first one highest
    alternative_ids int32 [S, K]      uint16 as above; with `features.alternatives` only
    alternative_states rows of K      [S, …], likewise

The final state at position p is the teacher for token p+1, so a sample stores those at j-1 for each
supervised token j, or with `features.supervise: all` for every token:

    position         0  1  2  3  4  5      tokens 3, 4, 5 were generated
    supervised_mask  0  0  0  1  1  1
    final state            ●  ●  ●         positions 2, 3, 4
    with `all`       ●  ●  ●  ●  ●         positions 0 … 4

The alternatives at position p are other tokens in place of its own, and the final state of each.
"""

from __future__ import annotations

import math
import os
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from pipeline.documents import open_file, parse_json
from pipeline.errors import CorruptShard, DataError
from pipeline.records import STATES_FORMAT, Shard, canonical_json
from pipeline.store.encodings import (
    ROW_TYPES,
    Codec,
    Encoding,
    OutOfRange,
    calibrate,
    row_width,
)
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS

__all__ = [
    "Codec",
    "Encoding",
    "StatesReader",
    "StatesRows",
    "StatesSample",
    "encode_states",
    "teacher_positions",
]


#: The only metadata key: safetensors keeps metadata in no particular order, one key has one.
METADATA = "eagle3"
#: The tensor that holds the supervised mask.
MASK = "supervised_mask"
#: Both or neither are there.
ALTERNATIVES = ("alternative_ids", "alternative_states")
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
_FIX = "restore the file, or run `eagle3 features --force`"
#: What opening reads first: header, offsets, ids and scales of a shard of usual size.
_FIRST_READ = 256 << 10
#: Ids below this are stored as two bytes.
_SHORT_IDS = 1 << 16


@dataclass(frozen=True)
class StatesSample:
    """T tokens and S final states of one sample; written by features, read by train.

    With a codec, states are rows as they are stored; without one they are bf16.
    """

    sample_id: str
    source: str
    token_ids: Tensor  # int32 [T]
    supervised_mask: Tensor  # uint8 [T], 1 where the target generated the token
    aux_states: Tensor  # [T, L · H], layers from low to high
    final_states: Tensor  # [S, H], after the target's last norm
    final_positions: Tensor  # int32 [S], ascending: the position of each final state
    codec: Codec | None = None
    alternative_ids: Tensor | None = None  # int32 [S, K], in place of the token at that position
    alternative_states: Tensor | None = None  # [S, K · H], the final state of each

    def decode(self) -> StatesSample:
        """The same sample with bf16 states."""
        if self.codec is None:
            return self
        others, ids = self.alternative_states, self.alternative_ids
        if others is not None and ids is not None:
            others = self.codec.decode_final(others, ids.shape[1])
        return replace(
            self,
            aux_states=self.codec.decode_aux(self.aux_states),
            final_states=self.codec.decode_final(self.final_states),
            alternative_states=others,
            codec=None,
        )


class StatesRows(NamedTuple):
    """Memory for states as they are stored."""

    aux: Tensor  # [T, …]
    final: Tensor  # [S, …]
    alternatives: Tensor | None  # [S, …], where there are some

    def part(self, tokens: slice, finals: slice) -> StatesRows:
        """Of some tokens, and of some final states."""
        others = self.alternatives
        return StatesRows(
            self.aux[tokens], self.final[finals], None if others is None else others[finals]
        )


def teacher_positions(supervised_mask: Tensor, finals: int | None = None) -> Tensor:
    """Positions whose final state teaches a token: j-1 for each supervised j. int32 [S].

    A sample with T - 1 `finals` has those of all its tokens.
    """
    if finals == len(supervised_mask) - 1:
        return torch.arange(finals, dtype=torch.int32)
    return supervised_mask[1:].nonzero().flatten().to(torch.int32)


def sample_checksum(sample: StatesSample, channels_checksum: int) -> int:
    """CRC-32 over id, source, ids as int32, mask as a byte each, rows as stored, and what there is
    of alternatives, ids as int32 first.

    It continues from the CRC-32 of the shard's channel scales, 0 without any.
    """
    named = f"{sample.sample_id}\n{sample.source}\n".encode()
    checksum = zlib.crc32(named, channels_checksum)
    for tensor in (
        sample.token_ids,
        sample.supervised_mask,
        sample.aux_states,
        sample.final_states,
        sample.alternative_ids,
        sample.alternative_states,
    ):
        checksum = crc32(tensor, checksum)
    return checksum


def crc32(tensor: Tensor | None, start: int = 0) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes, continued from `start`."""
    if tensor is None or not tensor.numel():
        return start
    return zlib.crc32(as_bytes(tensor).data, start)


def as_bytes(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The same memory as rows of bytes, for a contiguous CPU tensor; numpy has no bfloat16."""
    return tensor.view(torch.uint8).numpy()


class BrokenLayout(ValueError):
    """Not a states shard that this version reads; `fix` is None for the usual one."""

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
    aux_layers: int
    samples: list[tuple[str, str]]  # id, source
    tokens: int  # T
    finals: int  # S
    tensors: dict[str, StoredTensor]


def read_layout(header: bytes | bytearray, first: int, size: int) -> Layout:
    """Understand a safetensors header; tensors begin at byte `first` of a file of `size` bytes.

    Raises BrokenLayout.
    """
    try:
        fields: dict[str, Any] = parse_json(header)
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
    sizes = _hidden_size(tensors, encoding), _aux_layers(tensors)
    return Layout(encoding, *sizes, samples, tokens, finals, tensors)


def _stored(entry: Any, first: int) -> StoredTensor:
    start, stop = (first + at for at in entry["data_offsets"])
    return StoredTensor(entry["dtype"], tuple(entry["shape"]), start, stop)


def _read_listing(metadata: Any) -> tuple[Encoding, list[tuple[str, str]]]:
    """Encoding, and id and source of each sample."""
    try:
        listing = parse_json(metadata)
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
    if any(name in tensors for name in ALTERNATIVES):
        expected |= {"alternative_ids": ("I32", "U16"), "alternative_states": rows}
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
    dimensions = [len(shapes[name]) for name in ("aux_states", "final_states", "token_ids")]
    if dimensions != [2, 2, 1]:
        finals, ids = list(shapes["final_states"]), list(shapes["token_ids"])
        raise BrokenLayout(f"final_states has shape {finals} and token_ids {ids}")
    tokens, hidden = shapes["token_ids"][0], _hidden_size(tensors, encoding)
    stored, layers = shapes["final_states"][0], _aux_layers(tensors)
    others = (shapes.get("alternative_ids", ())[1:] or (1,))[0]  # K
    expected = {
        "token_offsets": (count + 1,),
        "final_offsets": (count + 1,),
        "checksums": (count,),
        "aux_states": (tokens, row_width(encoding, hidden, layers)),
        MASK: (-(-tokens // 8),),
        "channel_scales": (layers + 1, hidden),
        "alternative_ids": (stored, others),
        "alternative_states": (stored, row_width(encoding, hidden, others)),
    }
    for name, shape in expected.items():
        if name in shapes and shapes[name] != shape:
            raise BrokenLayout(f"{name} has shape {list(shapes[name])} instead of {list(shape)}")


def _hidden_size(tensors: dict[str, StoredTensor], encoding: Encoding) -> int:
    """A row of one layer is as wide as H, and what the encoding adds."""
    return tensors["final_states"].shape[1] - row_width(encoding, 0, 1)


def _aux_layers(tensors: dict[str, StoredTensor]) -> int:
    """How many layers' states a row of aux states holds; what is left over shows in its width."""
    one_layer = max(1, tensors["final_states"].shape[1])
    return max(1, tensors["aux_states"].shape[1] // one_layer)


class StatesReader:
    """The samples of one states shard of the stage at `location`.

    Opening reads the header, ids and masks — a few bytes a token — and checks the layout. `sample`
    and `read_into` then read only that sample's states: at their position in a local file, as two
    byte ranges of a remote one. A memory map would count every page it touches as this process's
    memory, and take a page fault for each; a read costs one copy into memory that is reused.

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
        has_alternatives = "alternative_ids" in self._layout.tensors
        others = self._whole("alternative_ids") if has_alternatives else None
        self._alternative_ids = None if others is None else others.to(torch.int32)
        has_channels = "channel_scales" in self._layout.tensors
        channels = self._whole("channel_scales") if has_channels else None
        self._channels_checksum = crc32(channels)
        self._front = bytearray()
        #: How this shard's states are encoded.
        self.codec = Codec(self._layout.encoding, channels, self._layout.aux_layers)
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
        tokens = slice(*self._token_offsets[index : index + 2])
        return self._token_ids[tokens], self._supervised_mask[tokens]

    def final_positions(self, index: int) -> Tensor:
        """Positions of one sample's final states, without reading any state."""
        return self._final_positions[index]

    def sample(self, index: int, *, decode: bool = True) -> StatesSample:
        """All of one sample, its states in bf16; with `decode=False` as they are stored."""
        rows = self.new_rows(self.lengths[index], len(self._final_positions[index]))
        sample = self.read_into(index, rows)
        return sample.decode() if decode else sample

    def new_rows(self, tokens: int, finals: int) -> StatesRows:
        """Memory for the states of `tokens` and so many final states, as this shard stores them."""
        others = self._alternative_ids is not None
        return StatesRows(
            self._empty("aux_states", tokens),
            self._empty("final_states", finals),
            self._empty("alternative_states", finals) if others else None,
        )

    def read_into(self, index: int, rows: StatesRows) -> StatesSample:
        """One sample with its states as stored, read into `rows`.

        They are of `new_rows`, as many as the sample has, and hold wrong bytes after an error.
        """
        parts = [part for part in rows if part is not None]
        for (start, stop), part in zip(self._byte_ranges(index), parts, strict=True):
            memory = as_bytes(part).reshape(-1).data
            assert len(memory) == stop - start, "memory for another sample"
            self._fill(memory, start)
        (sample_id, source), (token_ids, mask) = self.origin(index), self.tokens(index)
        others, finals = self._alternative_ids, slice(*self._final_offsets[index : index + 2])
        sample = StatesSample(
            sample_id=sample_id,
            source=source,
            token_ids=token_ids,
            supervised_mask=mask,
            aux_states=rows.aux,
            final_states=rows.final,
            final_positions=self._final_positions[index],
            codec=self.codec,
            alternative_ids=None if others is None else others[finals],
            alternative_states=rows.alternatives,
        )
        checksum, written = sample_checksum(sample, self._channels_checksum), self._checksums[index]
        if checksum != written:
            problem = f"has CRC-32 {checksum:08x}, {written:08x} was written"
            raise self._corrupt(f"sample {sample_id} of {source} {problem}")
        return sample

    def announce(self, index: int) -> None:
        """Tell the operating system to read one sample of a local shard ahead, where it can."""
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
        with open_file(self._folder.local_path(self._name)) as opened:
            file = os.dup(opened.fileno())
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
            expected = teacher_positions(self.tokens(index)[1], stored)
            positions.append(expected)
            if len(expected) != stored:
                sample_id, source = self.origin(index)
                problem = f"{stored} final states for {len(expected)} supervised tokens"
                raise self._corrupt(f"sample {sample_id} of {source} has {problem}")
        return positions

    def _empty(self, name: str, rows: int) -> Tensor:
        tensor = self._layout.tensors[name]
        # numpy asks for huge pages: a fault for each 4 KB would cost as much as reading them. Its
        # empty arrays have strides that torch cannot view as another type.
        memory = torch.from_numpy(np.empty(max(1, rows) * tensor.row_bytes, dtype=np.uint8))
        return memory.view(tensor.dtype).view(-1, tensor.shape[1])[:rows]

    def _byte_ranges(self, index: int) -> list[tuple[int, int]]:
        """Where aux and final states of one sample lie, and those of alternatives."""
        tensors, offsets = self._layout.tensors, slice(index, index + 2)
        tokens, finals = self._token_offsets[offsets], self._final_offsets[offsets]
        ranges = [
            tensors["aux_states"].byte_range(*tokens),
            tensors["final_states"].byte_range(*finals),
        ]
        if self._alternative_ids is not None:
            ranges.append(tensors["alternative_states"].byte_range(*finals))
        return ranges

    def _corrupt(self, problem: str, fix: str | None = None) -> CorruptShard:
        return CorruptShard(problem, where=self._folder.where(self._name), fix=fix or _FIX)


def encode_states(
    samples: list[StatesSample],
    encoding: Encoding = "bf16",
    *,
    hidden_size: int | None = None,
    aux_layers: int = 3,
    agreements: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """One safetensors file of samples with bf16 states; equal samples give equal bytes.

    Without any sample, `hidden_size` and `aux_layers` say how wide the rows would be. `agreements`
    of replies with the teacher, one a sample or none at all, stand beside the ids. States are
    encoded on their device. Raises DataError for those that the encoding cannot hold.
    """
    assert samples or hidden_size, "nothing tells the width of the rows"
    for sample in samples:
        _assert_sound(sample)
    if samples:
        aux = torch.cat([sample.aux_states for sample in samples])
        final = torch.cat([sample.final_states for sample in samples])
        token_ids = torch.cat([sample.token_ids for sample in samples])
        supervised_mask = torch.cat([sample.supervised_mask for sample in samples])
    else:
        final = torch.empty(0, hidden_size or 0, dtype=torch.bfloat16)
        aux = final.repeat(1, aux_layers)
        token_ids, supervised_mask = torch.empty(2, 0, dtype=torch.int32).unbind()
        supervised_mask = supervised_mask.byte()
    others = _joined_alternatives(samples)
    codec = calibrate(encoding, aux, final)
    token_offsets = _offsets([len(sample.token_ids) for sample in samples])
    final_offsets = _offsets([len(sample.final_states) for sample in samples])
    aux_rows = _encoded(codec.encode_aux, aux, token_offsets, samples, encoding)
    final_rows = _encoded(codec.encode_final, final, final_offsets, samples, encoding)
    other_rows = None
    if others:
        encode = partial(codec.encode_final, count=others[0].shape[1])
        other_rows = _encoded(encode, others[1], final_offsets, samples, encoding)
    tensors = {
        "token_offsets": token_offsets,
        "final_offsets": final_offsets,
        "token_ids": _stored_ids(token_ids),
        "aux_states": aux_rows,
        "final_states": final_rows,
        MASK: torch.from_numpy(np.packbits(supervised_mask.numpy())),
        "checksums": _checksums(samples, aux_rows, final_rows, other_rows, crc32(codec.channels)),
    }
    if codec.channels is not None:
        tensors["channel_scales"] = codec.channels
    if others and other_rows is not None:
        tensors["alternative_ids"] = _stored_ids(others[0])
        tensors["alternative_states"] = other_rows
    listed: list[dict[str, Any]] = [
        {"sample_id": sample.sample_id, "source": sample.source} for sample in samples
    ]
    for entry, agreement in zip(listed, agreements, strict=False):
        entry["agreement"] = dict(agreement)
    listing = {"format": STATES_FORMAT, "encoding": encoding, "samples": listed}
    return save(tensors, metadata={METADATA: canonical_json(listing)})


def _stored_ids(token_ids: Tensor) -> Tensor:
    """As two bytes each, where all of them fit."""
    fit = not token_ids.numel() or int(token_ids.max()) < _SHORT_IDS
    return token_ids.to(torch.uint16) if fit else token_ids


def _joined_alternatives(samples: list[StatesSample]) -> tuple[Tensor, Tensor] | None:
    """Ids [S, K] and bf16 states [S, K · H] of all samples' alternatives."""
    if not samples or samples[0].alternative_ids is None:
        return None
    ids = [sample.alternative_ids for sample in samples if sample.alternative_ids is not None]
    states = [each.alternative_states for each in samples if each.alternative_states is not None]
    assert len(ids) == len(states) == len(samples), "all samples of a shard have alternatives"
    return torch.cat(ids), torch.cat(states)


def _encoded(
    encode: Callable[[Tensor], Tensor],
    states: Tensor,
    offsets: Tensor,
    samples: list[StatesSample],
    encoding: Encoding,
) -> Tensor:
    """Rows on the CPU; a state without a scale code is reported with its sample."""
    try:
        return encode(states).cpu()
    except OutOfRange as error:
        sample = samples[int(torch.searchsorted(offsets, error.row, right=True)) - 1]
        raise DataError(
            f"has states that are too large for {encoding}",
            where=f"sample {sample.sample_id} of {sample.source}",
            fix="set features.encoding=bf16",
        ) from None


def _checksums(
    samples: list[StatesSample],
    aux_rows: Tensor,
    final_rows: Tensor,
    other_rows: Tensor | None,
    channels_checksum: int,
) -> Tensor:
    """uint32 [n]; rows are those of all samples, one after the other."""
    finals = [len(sample.final_states) for sample in samples]
    aux = torch.split(aux_rows, [len(sample.token_ids) for sample in samples])
    final = torch.split(final_rows, finals)
    others = [None] * len(samples) if other_rows is None else torch.split(other_rows, finals)
    stored = [
        replace(sample, aux_states=own_aux, final_states=own_final, alternative_states=own_others)
        for sample, own_aux, own_final, own_others in zip(samples, aux, final, others, strict=True)
    ]
    checksums = [sample_checksum(sample, channels_checksum) for sample in stored]
    return torch.from_numpy(np.array(checksums, dtype=np.uint32))


def _offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)


def _assert_sound(sample: StatesSample) -> None:
    tokens, (finals, hidden) = len(sample.token_ids), sample.final_states.shape
    assert sample.codec is None, "states are encoded once"
    assert sample.token_ids.dtype == torch.int32 and sample.supervised_mask.dtype == torch.uint8
    assert sample.aux_states.dtype == sample.final_states.dtype == torch.bfloat16
    assert sample.supervised_mask.shape == (tokens,)
    assert sample.aux_states.ndim == 2 and len(sample.aux_states) == tokens
    assert sample.aux_states.shape[1] % hidden == 0
    assert sample.final_positions.shape == (finals,)
    # Positions are not stored: the mask and their number say which they are.
    assert torch.equal(sample.final_positions, teacher_positions(sample.supervised_mask, finals)), (
        "final states stand one before each supervised token, or each token"
    )
