"""The states shard: one safetensors file, drawn in docs/states-format.md.

Shapes: n samples, T tokens of all samples, S stored final states, H the target's hidden size.

    token_ids       int32 [T]
    loss_mask       uint8 [T]       1 where the target generated the token
    aux_states      bf16  [T, 3H]   low, middle and high layer, concatenated
    final_states    bf16  [S, H]    after the target's last norm
    final_positions int32 [S]       position of each final state inside its sample
    token_offsets   int64 [n+1]     sample s owns tokens [token_offsets[s], token_offsets[s+1])
    final_offsets   int64 [n+1]     … and final states likewise

The final state at position p is the teacher for token p+1, so a sample keeps those at j-1 for every
supervised token j:

    position     0  1  2  3  4  5          tokens 3, 4, 5 were generated
    loss_mask    0  0  0  1  1  1
    final state        ●  ●  ●             positions 2, 3, 4
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import CorruptShard
from pipeline.records import Shard, canonical_json
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS

if TYPE_CHECKING:
    import torch

FORMAT = 1
#: The only metadata key: safetensors keeps its metadata in no particular order, one key has but one.
METADATA = "eagle3"

_FIX = "restore the file, or run `eagle3 features --force`"
_BYTES = {"I64": 8, "I32": 4, "BF16": 2, "U8": 1}
_DTYPES = {
    "token_ids": "I32",
    "loss_mask": "U8",
    "aux_states": "BF16",
    "final_states": "BF16",
    "final_positions": "I32",
    "token_offsets": "I64",
    "final_offsets": "I64",
}


@dataclass(frozen=True)
class StatesSample:
    """One sample's states; written by features, read by train. T and S are this sample's."""

    sample_id: str
    source: str
    token_ids: torch.Tensor  # int32 [T]
    loss_mask: torch.Tensor  # uint8 [T]
    aux_states: torch.Tensor  # bf16 [T, 3H]
    final_states: torch.Tensor  # bf16 [S, H]
    final_positions: torch.Tensor  # int32 [S], ascending


def teacher_positions(loss_mask: torch.Tensor) -> torch.Tensor:
    """Positions whose final state teaches a supervised token: j-1 for each j with loss_mask[j]. int32 [S]."""
    import torch

    return loss_mask[1:].nonzero().flatten().to(torch.int32)


def encode_states(samples: list[StatesSample]) -> bytes:
    """One safetensors file of at least one sample; equal samples give equal bytes."""
    import torch
    from safetensors.torch import save

    assert samples, "a states shard holds at least one sample"
    for sample in samples:
        _assert_sound(sample)
    listing = {"format": FORMAT, "samples": [{"id": sample.sample_id, "source": sample.source} for sample in samples]}
    tensors = {
        "token_ids": torch.cat([sample.token_ids for sample in samples]),
        "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
        "aux_states": torch.cat([sample.aux_states for sample in samples]),
        "final_states": torch.cat([sample.final_states for sample in samples]),
        "final_positions": torch.cat([sample.final_positions for sample in samples]),
        "token_offsets": _offsets([len(sample.token_ids) for sample in samples]),
        "final_offsets": _offsets([len(sample.final_states) for sample in samples]),
    }
    return save(tensors, metadata={METADATA: canonical_json(listing)})


class StatesReader:
    """The samples of one states shard of the stage at `location`.

    Opening reads the header, ids and masks — a few bytes a token — and checks the layout; `sample(i)`
    reads only that sample's states: from a memory map when local, as two byte ranges when remote.
    Checksums are `verify_shard`'s business. Raises CorruptShard with file and tensor.
    """

    def __init__(self, location: Location, shard: Shard) -> None:
        self._folder, self._name, self._bytes = location.child(SHARDS), shard.name, shard.bytes
        self._map = self._memory_map()
        self._header = self._read_header()
        self._samples = self._read_listing()
        self._token_ids = self._whole("token_ids")
        self._loss_mask = self._whole("loss_mask")
        self._final_positions = self._whole("final_positions")
        self._token_offsets: list[int] = self._whole("token_offsets").tolist()
        self._final_offsets: list[int] = self._whole("final_offsets").tolist()
        self._check_layout()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def hidden_size(self) -> int:
        """H of the target."""
        return self._header["final_states"].shape[1]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, known without reading any state."""
        return [stop - start for start, stop in zip(self._token_offsets, self._token_offsets[1:], strict=False)]

    def origin(self, index: int) -> tuple[str, str]:
        """Id and source of one sample, without reading any state."""
        return self._samples[index]["id"], self._samples[index]["source"]

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_ids` and `loss_mask` of one sample, without reading any state."""
        own = self._span(self._token_offsets, index)
        return self._token_ids[own], self._loss_mask[own]

    def sample(self, index: int) -> StatesSample:
        """All of one sample; its states are copies that the caller owns."""
        token_ids, loss_mask = self.tokens(index)
        tokens, finals = self._span(self._token_offsets, index), self._span(self._final_offsets, index)
        return StatesSample(
            sample_id=self._samples[index]["id"],
            source=self._samples[index]["source"],
            token_ids=token_ids,
            loss_mask=loss_mask,
            aux_states=self._rows("aux_states", tokens),
            final_states=self._rows("final_states", finals),
            final_positions=self._final_positions[finals],
        )

    def _span(self, offsets: list[int], index: int) -> slice:
        return slice(offsets[index], offsets[index + 1])

    def _memory_map(self) -> mmap.mmap | None:
        size = self._folder.size(self._name)
        if size != self._bytes:
            raise self._corrupt(f"has {size} bytes, {self._bytes} were committed")
        if not self._folder.is_local or not size:
            return None
        with open(self._folder.local_path(self._name), "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _read(self, start: int, stop: int) -> bytes:
        if self._map is not None:
            return self._map[start:stop]
        return self._folder.read_range(self._name, start, stop)

    def _read_header(self) -> dict[str, _Tensor]:
        length = int.from_bytes(self._read(0, 8), "little") if self._bytes >= 8 else 0
        if not 2 <= length <= self._bytes - 8:
            raise self._corrupt("has no safetensors header")
        try:
            fields: dict[str, Any] = json.loads(self._read(8, 8 + length))
            self._metadata = fields.pop("__metadata__")[METADATA]
            header = {
                name: _Tensor(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in entry["data_offsets"])) for name, entry in fields.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._corrupt(f"has a broken safetensors header: {error}") from None
        if sorted(header) != sorted(_DTYPES):
            raise self._corrupt(f"holds tensors {', '.join(sorted(header))} instead of {', '.join(sorted(_DTYPES))}")
        for name, tensor in header.items():
            if tensor.dtype != _DTYPES[name]:
                raise self._corrupt(f"{name} is {tensor.dtype} instead of {_DTYPES[name]}")
            if tensor.stop - tensor.start != math.prod(tensor.shape) * _BYTES[tensor.dtype] or not 0 <= tensor.start <= tensor.stop <= self._bytes:
                raise self._corrupt(f"{name} has byte range [{tensor.start}, {tensor.stop}), which does not fit its shape {list(tensor.shape)}")
        return header

    def _read_listing(self) -> list[dict[str, str]]:
        try:
            listing = json.loads(self._metadata)
            version, samples = listing["format"], [{"id": str(entry["id"]), "source": str(entry["source"])} for entry in listing["samples"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._corrupt(f"has broken metadata {METADATA}: {error}") from None
        if version != FORMAT:
            raise self._corrupt(f"has format {version}, this version reads {FORMAT}")
        return samples

    def _check_layout(self) -> None:
        shapes = {name: tensor.shape for name, tensor in self._header.items()}
        count, total, stored = len(self._samples), len(self._token_ids), len(self._final_positions)
        hidden = shapes["final_states"][-1]
        expected = {
            "token_ids": (total,),
            "loss_mask": (total,),
            "aux_states": (total, 3 * hidden),
            "final_states": (stored, hidden),
            "final_positions": (stored,),
            "token_offsets": (count + 1,),
            "final_offsets": (count + 1,),
        }
        for name, shape in expected.items():
            if shapes[name] != shape:
                raise self._corrupt(f"{name} has shape {list(shapes[name])} instead of {list(shape)}")
        for name, offsets, end in (("token_offsets", self._token_offsets, total), ("final_offsets", self._final_offsets, stored)):
            if offsets[0] != 0 or offsets[-1] != end or sorted(offsets) != offsets:
                raise self._corrupt(f"{name} does not rise from 0 to {end}")

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self._header[name]
        return _tensor(self._read(tensor.start, tensor.stop), tensor.dtype, tensor.shape)

    def _rows(self, name: str, rows: slice) -> torch.Tensor:
        tensor = self._header[name]
        width = tensor.shape[1] * _BYTES[tensor.dtype]
        data = self._read(tensor.start + rows.start * width, tensor.start + rows.stop * width)
        return _tensor(data, tensor.dtype, (rows.stop - rows.start, tensor.shape[1]))

    def _corrupt(self, problem: str) -> CorruptShard:
        return CorruptShard(problem, where=self._folder.where(self._name), fix=_FIX)


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that owns a writable copy of `data`."""
    import torch

    types = {"I64": torch.int64, "I32": torch.int32, "BF16": torch.bfloat16, "U8": torch.uint8}
    if not data:
        return torch.empty(shape, dtype=types[dtype])
    return torch.frombuffer(bytearray(data), dtype=types[dtype]).view(shape)


def _offsets(counts: list[int]) -> torch.Tensor:
    import torch

    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)


def _assert_sound(sample: StatesSample) -> None:
    import torch

    tokens, finals = len(sample.token_ids), len(sample.final_states)
    hidden = sample.final_states.shape[1]
    assert sample.token_ids.dtype == torch.int32 and sample.loss_mask.dtype == torch.uint8 and sample.final_positions.dtype == torch.int32
    assert sample.aux_states.dtype == sample.final_states.dtype == torch.bfloat16
    assert sample.loss_mask.shape == (tokens,) and sample.aux_states.shape == (tokens, 3 * hidden) and sample.final_positions.shape == (finals,)
