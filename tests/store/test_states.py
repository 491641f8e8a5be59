"""The states shard: exact, deterministic, open, read piecewise, and checked before it is believed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import RunConfig
from pipeline.errors import CorruptShard
from pipeline.records import Shard
from pipeline.store.location import Location
from pipeline.store.stage import open_stage
from pipeline.store.states import StatesReader, StatesSample, encode_states, teacher_positions

H = 4
FIELDS = ("token_ids", "loss_mask", "aux_states", "final_states", "final_positions")


def make_states(index: int, length: int, supervised: range) -> StatesSample:
    draw = torch.Generator().manual_seed(index)
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[supervised.start : supervised.stop] = 1
    positions = teacher_positions(mask)
    return StatesSample(
        sample_id=f"s{index}",
        source="unit",
        token_ids=torch.randint(0, 60, (length,), generator=draw, dtype=torch.int32),
        loss_mask=mask,
        aux_states=torch.randn(length, 3 * H, generator=draw).bfloat16(),
        final_states=torch.randn(len(positions), H, generator=draw).bfloat16(),
        final_positions=positions,
    )


@pytest.fixture
def states() -> list[StatesSample]:
    return [make_states(0, 7, range(3, 7)), make_states(1, 1, range(0, 0)), make_states(2, 12, range(2, 6))]


def commit(config: RunConfig, data: bytes) -> tuple[Location, Shard]:
    work = open_stage(config, "features", None)
    return work.location, work.commit("00000.safetensors", data, rows=3, tokens=20)


def assert_equal(found: StatesSample, expected: StatesSample) -> None:
    assert (found.sample_id, found.source) == (expected.sample_id, expected.source)
    for field in FIELDS:
        mine, theirs = getattr(found, field), getattr(expected, field)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), field


def test_teachers_sit_one_before_each_supervised_token() -> None:
    """position 0 1 2 3 4 5, tokens 2, 3 and 5 generated: the target predicted them at 1, 2 and 4."""
    assert teacher_positions(torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.uint8)).tolist() == [1, 2, 4]
    assert teacher_positions(torch.tensor([1, 1], dtype=torch.uint8)).tolist() == [0], "nothing stands before the first token"


@pytest.mark.parametrize("kind", ["path", "memory", "gs"])
def test_samples_come_back_exactly(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, states: list[StatesSample], make_config: Callable[..., RunConfig]
) -> None:
    uri = {"path": lambda: str(tmp_path), "memory": lambda: f"memory://{tmp_path.name}", "gs": lambda: f"{request.getfixturevalue('bucket')}/{tmp_path.name}"}[
        kind
    ]()
    location, shard = commit(make_config(uri), encode_states(states))
    reader = StatesReader(location, shard)
    assert len(reader) == 3 and reader.lengths == [7, 1, 12] and reader.hidden_size == H
    for index in (2, 0, 1):
        assert_equal(reader.sample(index), states[index])
        assert torch.equal(reader.tokens(index)[1], states[index].loss_mask)


def test_equal_samples_give_equal_bytes(states: list[StatesSample]) -> None:
    assert encode_states(states) == encode_states(list(states))
    assert encode_states(states) != encode_states(states[::-1])


def test_one_sample_costs_two_byte_ranges(
    tmp_path: Path, states: list[StatesSample], make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    location, shard = commit(make_config(f"memory://{tmp_path.name}"), encode_states(states))
    reader = StatesReader(location, shard)
    ranges: list[tuple[int, int]] = []
    read = Location.read_range

    def counted(self: Location, name: str, start: int, stop: int) -> bytes:
        ranges.append((start, stop))
        return read(self, name, start, stop)

    monkeypatch.setattr(Location, "read_range", counted)
    reader.sample(2)
    assert [stop - start for start, stop in ranges] == [12 * 3 * H * 2, 4 * H * 2]


def test_the_documented_numpy_reader_works(tmp_path: Path, states: list[StatesSample]) -> None:
    text = (Path(__file__).parents[2] / "docs/states-format.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    path = tmp_path / "shard.safetensors"
    path.write_bytes(encode_states(states))
    for index, sample in enumerate(states):
        token_ids, loss_mask, aux, final, positions = scope["read_states"](path, index)
        assert np.array_equal(token_ids, sample.token_ids) and np.array_equal(loss_mask, sample.loss_mask)
        assert np.array_equal(aux, sample.aux_states.float()) and np.array_equal(final, sample.final_states.float())
        assert np.array_equal(positions, sample.final_positions)


def rewrite(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda h: h.pop("loss_mask"), "holds tensors"),
        (lambda h: h["aux_states"].update(dtype="F16"), "aux_states is F16 instead of BF16"),
        (lambda h: h["aux_states"].update(shape=[20, 11]), "does not fit its shape"),
        (lambda h: h["aux_states"].update(shape=[40, 6]), r"aux_states has shape \[40, 6\] instead of \[20, 12\]"),
        (lambda h: h["loss_mask"].update(data_offsets=[10**6, 10**6 + 20]), "loss_mask has byte range"),
        (lambda h: h.pop("__metadata__"), "broken safetensors header"),
        (lambda h: h["__metadata__"].update(eagle3="{"), "broken metadata"),
        (lambda h: h["__metadata__"].update(eagle3='{"format": 2, "samples": []}'), "has format 2, this version reads 1"),
        (lambda h: h["__metadata__"].update(eagle3='{"format": 1, "samples": []}'), r"token_offsets has shape \[4\] instead of \[1\]"),
    ],
)
def test_other_layouts_are_refused(
    change: Callable[[dict[str, Any]], None], problem: str, tmp_path: Path, states: list[StatesSample], make_config: Callable[..., RunConfig]
) -> None:
    location, shard = commit(make_config(tmp_path), rewrite(encode_states(states), change))
    with pytest.raises(CorruptShard, match=rf"shards/00000\.safetensors: .*{problem}"):
        StatesReader(location, shard)


def test_offsets_that_do_not_rise_are_refused(tmp_path: Path, states: list[StatesSample], make_config: Callable[..., RunConfig]) -> None:
    data = encode_states(states)
    rising = np.array([0, 7, 8, 20], dtype="<i8").tobytes()
    assert data.count(rising) == 1
    location, shard = commit(make_config(tmp_path), data.replace(rising, np.array([0, 9, 8, 20], dtype="<i8").tobytes()))
    with pytest.raises(CorruptShard, match="token_offsets does not rise from 0 to 20"):
        StatesReader(location, shard)


@pytest.mark.parametrize("data", [b"", b"\x10", b"\xff" * 8 + b"x" * 100])
def test_files_that_are_no_safetensors_are_refused(tmp_path: Path, make_config: Callable[..., RunConfig], data: bytes) -> None:
    location, shard = commit(make_config(tmp_path), data)
    with pytest.raises(CorruptShard, match="has no safetensors header"):
        StatesReader(location, shard)


def test_a_truncated_shard_is_refused_when_opened(tmp_path: Path, states: list[StatesSample], make_config: Callable[..., RunConfig]) -> None:
    location, shard = commit(make_config(tmp_path), encode_states(states))
    path = tmp_path / "features/shards/00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptShard, match=rf"has {shard.bytes - 3} bytes, {shard.bytes} were committed"):
        StatesReader(location, shard)
