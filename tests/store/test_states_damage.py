"""States shards that are not what was written: each is found, and named with file and sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import CorruptShard
from pipeline.store.states import Encoding, StatesReader, encode_states
from tests.store.conftest import make_config
from tests.store.states import commit, three_samples


def open_reader(tmp_path: Path, data: bytes) -> StatesReader:
    """Of a features stage whose one shard is `data`."""
    return StatesReader(*commit(make_config(tmp_path), data))


def split(data: bytes) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file, and where its tensors begin."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def rewrite(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header."""
    header, first = split(data)
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[first:]


def listing(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Change the metadata."""

    def change(header: dict[str, Any]) -> None:
        header["__metadata__"]["eagle3"] = json.dumps(
            {**json.loads(header["__metadata__"]["eagle3"]), **changes}
        )

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda h: h.pop("supervised_mask"), "holds tensors"),
        (lambda h: h["aux_states"].update(dtype="F16"), "aux_states is F16 instead of BF16"),
        (lambda h: h["token_ids"].update(dtype="I64"), "token_ids is I64 instead of I32 or U16"),
        (lambda h: h["aux_states"].update(shape=[20, 11]), "does not fit its shape"),
        (
            lambda h: h["aux_states"].update(shape=[40, 6]),
            r"aux_states has shape \[40, 6\] instead of \[20, 4\]",
        ),
        (
            lambda h: h["supervised_mask"].update(data_offsets=[10**6, 10**6 + 3]),
            "supervised_mask has byte range",
        ),
        (lambda h: h.pop("__metadata__"), "broken safetensors header"),
        (lambda h: h["__metadata__"].update(eagle3="{"), "broken metadata"),
        (listing(format=4), r"has format 4, this version reads 3 \(fix: upgrade eagle3"),
        (listing(format=2), r"has format 2, this version reads 3 \(fix: make the states again"),
        (listing(encoding="int4"), "has encoding 'int4', this version reads bf16, fp8, int8"),
        (listing(encoding="int8"), "holds tensors"),
        (lambda h: h.update(alternative_ids=h["checksums"]), "holds tensors .* alternative_states"),
        (listing(samples=[]), r"token_offsets has shape \[4\] instead of \[1\]"),
    ],
)
def test_other_layouts_are_refused(
    change: Callable[[dict[str, Any]], None], problem: str, tmp_path: Path
) -> None:
    data = rewrite(encode_states(three_samples()), change)
    with pytest.raises(CorruptShard, match=rf"shards/00000\.\w+\.safetensors: .*{problem}"):
        open_reader(tmp_path, data)


@pytest.mark.parametrize("wrong", [[0, 9, 8, 20], [0, 7, 8, 19]])
def test_offsets_that_do_not_rise_to_the_end_are_refused(tmp_path: Path, wrong: list[int]) -> None:
    data = encode_states(three_samples())
    rising = np.array([0, 7, 8, 20], dtype="<i8").tobytes()
    assert data.count(rising) == 1
    damaged = data.replace(rising, np.array(wrong, dtype="<i8").tobytes())
    with pytest.raises(CorruptShard, match="token_offsets does not rise from 0 to 20"):
        open_reader(tmp_path, damaged)


def test_a_mask_that_asks_for_other_final_states_is_refused(tmp_path: Path) -> None:
    data = encode_states(three_samples())
    header, first = split(data)
    at = first + header["supervised_mask"]["data_offsets"][0]
    damaged = data[:at] + bytes([data[at] ^ 0b01000000]) + data[at + 1 :]
    problem = "sample s0 of unit has 4 final states for 5 supervised tokens"
    with pytest.raises(CorruptShard, match=rf"00000\.\w+\.safetensors: {problem}"):
        open_reader(tmp_path, damaged)


@pytest.mark.parametrize("data", [b"", b"\x10", b"\xff" * 8 + b"x" * 100])
def test_files_that_are_no_safetensors_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorruptShard, match="has no safetensors header"):
        open_reader(tmp_path, data)


def test_a_truncated_shard_is_refused_when_opened(tmp_path: Path) -> None:
    location, shard = commit(make_config(tmp_path), encode_states(three_samples()))
    path = tmp_path / "features/shards" / shard.path
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        CorruptShard, match=rf"has {shard.bytes - 3} bytes, {shard.bytes} were committed"
    ):
        StatesReader(location, shard)


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_flipped_bytes_are_found_with_their_sample(tmp_path: Path, encoding: Encoding) -> None:
    """The first, a middle and the last byte of each tensor.

    The shard is refused when opened, or the sample when read.
    """
    data = encode_states(three_samples(2), encoding)
    location, shard = commit(make_config(tmp_path), data)
    path, (header, first) = tmp_path / "features/shards" / shard.path, split(data)
    for name in header.keys() - {"__metadata__"}:
        start, stop = (first + at for at in header[name]["data_offsets"])
        for at in (start, (start + stop) // 2, stop - 1):
            # 0x80: the mask's last byte has four bits that belong to no token.
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
            with pytest.raises(
                CorruptShard,
                match=r"00000\.\w+\.safetensors: (sample s\d of unit has|\w+ does not rise)",
            ):
                read_all(StatesReader(location, shard))
    path.write_bytes(data)
    read_all(StatesReader(location, shard))


def read_all(reader: StatesReader) -> None:
    for index in range(len(reader)):
        reader.sample(index)


def test_a_renamed_sample_is_found(tmp_path: Path) -> None:
    samples = [{"sample_id": name, "source": "unit"} for name in ("s0", "s9", "s2")]
    data = rewrite(encode_states(three_samples()), listing(samples=samples))
    with pytest.raises(CorruptShard, match="sample s9 of unit has CRC-32"):
        open_reader(tmp_path, data).sample(1)
