"""Samples to the bytes of one states shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from pipeline.errors import DataError
from pipeline.records import STATES_FORMAT, canonical_json
from pipeline.store.states.encodings import AUX_LAYERS, Encoding, OutOfRange, calibrate
from pipeline.store.states.layout import MASK, METADATA
from pipeline.store.states.sample import StatesSample, crc32, sample_checksum, teacher_positions

#: Ids below this are stored as two bytes.
_SHORT_IDS = 1 << 16


def encode_states(
    samples: list[StatesSample],
    encoding: Encoding = "bf16",
    *,
    hidden_size: int | None = None,
    agreements: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """One safetensors file of samples with bf16 states; equal samples give equal bytes.

    Without any sample, `hidden_size` says how wide the rows would be. `agreements` of replies with
    the teacher, one a sample or none at all, stand beside the ids. States are encoded on their
    device. Raises DataError for those that the encoding cannot hold.
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
        aux = final.repeat(1, AUX_LAYERS)
        token_ids, supervised_mask = torch.empty(2, 0, dtype=torch.int32).unbind()
        supervised_mask = supervised_mask.byte()
    codec = calibrate(encoding, aux, final)
    token_offsets = _offsets([len(sample.token_ids) for sample in samples])
    final_offsets = _offsets([len(sample.final_states) for sample in samples])
    aux_rows = _encoded(codec.encode_aux, aux, token_offsets, samples, encoding)
    final_rows = _encoded(codec.encode_final, final, final_offsets, samples, encoding)
    short = not len(token_ids) or int(token_ids.max()) < _SHORT_IDS
    tensors = {
        "token_offsets": token_offsets,
        "final_offsets": final_offsets,
        "token_ids": token_ids.to(torch.uint16) if short else token_ids,
        "aux_states": aux_rows,
        "final_states": final_rows,
        MASK: torch.from_numpy(np.packbits(supervised_mask.numpy())),
        "checksums": _checksums(samples, aux_rows, final_rows, crc32(codec.channels)),
    }
    if codec.channels is not None:
        tensors["channel_scales"] = codec.channels
    listed: list[dict[str, Any]] = [
        {"sample_id": sample.sample_id, "source": sample.source} for sample in samples
    ]
    for entry, agreement in zip(listed, agreements, strict=False):
        entry["agreement"] = dict(agreement)
    listing = {"format": STATES_FORMAT, "encoding": encoding, "samples": listed}
    return save(tensors, metadata={METADATA: canonical_json(listing)})


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
    samples: list[StatesSample], aux_rows: Tensor, final_rows: Tensor, channels_checksum: int
) -> Tensor:
    """uint32 [n]; rows are those of all samples, one after the other."""
    aux = torch.split(aux_rows, [len(sample.token_ids) for sample in samples])
    final = torch.split(final_rows, [len(sample.final_states) for sample in samples])
    stored = [
        replace(sample, aux_states=own_aux, final_states=own_final)
        for sample, own_aux, own_final in zip(samples, aux, final, strict=True)
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
    assert sample.aux_states.shape == (tokens, 3 * hidden)
    assert sample.final_positions.shape == (finals,)
    # Positions are not stored: the mask and their number say which they are.
    assert torch.equal(sample.final_positions, teacher_positions(sample.supervised_mask, finals)), (
        "final states stand one before each supervised token, or each token"
    )
