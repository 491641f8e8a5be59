"""The states shard: exact, deterministic, open, and read piecewise."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from pipeline.store.location import Location
from pipeline.store.states import (
    Encoding,
    StatesReader,
    StatesSample,
    encode_states,
    teacher_positions,
)
from tests.store.conftest import make_config
from tests.store.states import H, commit, make_states, three_samples

FIELDS = [
    *("token_ids", "supervised_mask", "aux_states", "final_states", "final_positions"),
    *("alternative_ids", "alternative_states"),
]
ENCODINGS: list[Encoding] = ["bf16", "fp8", "int8"]


@pytest.fixture(params=[0, 2], ids=["plain", "alternatives"])
def states(request: pytest.FixtureRequest) -> list[StatesSample]:
    return three_samples(request.param)


def assert_equal(found: StatesSample, expected: StatesSample) -> None:
    assert (found.sample_id, found.source) == (expected.sample_id, expected.source)
    for field in FIELDS:
        mine, theirs = getattr(found, field), getattr(expected, field)
        if mine is theirs is None:
            continue
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), field


def test_teachers_sit_one_before_each_supervised_token() -> None:
    """position 0 1 2 3 4 5, tokens 2, 3 and 5 generated: predicted at positions 1, 2 and 4."""
    mask = torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.uint8)
    assert teacher_positions(mask).tolist() == [1, 2, 4]
    both = torch.tensor([1, 1], dtype=torch.uint8)
    assert teacher_positions(both).tolist() == [0], "nothing stands before the first token"
    assert teacher_positions(mask, 3).tolist() == [1, 2, 4]
    assert teacher_positions(mask, 5).tolist() == [0, 1, 2, 3, 4], "one before each token"


def test_a_sample_with_the_teachers_of_its_prompt_comes_back(tmp_path: Path) -> None:
    """Beside one without them."""
    states = [
        make_states(0, 7, range(3, 7), everything=True),
        make_states(2, 12, range(2, 6)),
        make_states(3, 9, range(4, 9), everything=True),
    ]
    location, shard = commit(make_config(tmp_path), encode_states(states))
    reader = StatesReader(location, shard)
    assert [len(reader.final_positions(index)) for index in range(3)] == [6, 4, 8]
    for index, expected in enumerate(states):
        assert_equal(reader.sample(index), expected)


@pytest.mark.parametrize("kind", ["path", "memory", "gs"])
def test_samples_come_back_exactly(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, states: list[StatesSample]
) -> None:
    uri = {
        "path": lambda: str(tmp_path),
        "memory": lambda: f"memory://{tmp_path.name}",
        "gs": lambda: f"{request.getfixturevalue('bucket')}/{tmp_path.name}",
    }[kind]()
    location, shard = commit(make_config(uri), encode_states(states))
    reader = StatesReader(location, shard)
    assert len(reader) == 3 and reader.lengths == [7, 1, 12] and reader.hidden_size == H
    for index in (2, 0, 1):
        assert_equal(reader.sample(index), states[index])
        assert_equal(reader.sample(index, decode=False).decode(), states[index])
        assert torch.equal(
            reader.tokens(index)[1], states[index].supervised_mask
        ) and reader.origin(index) == (f"s{index}", "unit")


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
def test_encoded_samples_come_back_close_and_can_be_decoded_later(
    tmp_path: Path, states: list[StatesSample], encoding: Encoding
) -> None:
    location, shard = commit(make_config(tmp_path), encode_states(states, encoding))
    reader = StatesReader(location, shard)
    for index, sample in enumerate(states):
        decoded, stored = reader.sample(index), reader.sample(index, decode=False)
        assert decoded.codec is None and stored.codec is reader.codec
        assert stored.aux_states.shape == (len(sample.token_ids), 3 * H + 3)
        assert decoded.aux_states.dtype == torch.bfloat16 and stored.aux_states.element_size() == 1
        assert_equal(stored.decode(), decoded)
        names = [name for name in FIELDS if name.endswith("_states")]
        exact = {name: getattr(sample, name) for name in names}
        for name, true in exact.items():
            if true is not None:
                mine = getattr(decoded, name)
                assert (mine.float() - true.float()).norm() <= 0.04 * true.float().norm()
                assert not len(true) or not torch.equal(mine, true)
        assert_equal(replace(decoded, **exact), sample)


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_states_are_read_into_the_rows_given(
    kind: str, tmp_path: Path, states: list[StatesSample]
) -> None:
    uri = str(tmp_path) if kind == "path" else f"memory://{tmp_path.name}"
    location, shard = commit(make_config(uri), encode_states(states))
    reader = StatesReader(location, shard)
    rows = reader.new_rows(20, 10)
    aux, final = rows.aux.zero_(), rows.final.zero_()
    sample = reader.read_into(2, rows.part(slice(3, 15), slice(1, 5)))
    assert reader.final_positions(2).tolist() == [1, 2, 3, 4]
    assert_equal(sample.decode(), states[2])
    assert sample.aux_states.data_ptr() == aux[3:].data_ptr()
    assert torch.equal(aux[3:15], states[2].aux_states)
    assert torch.equal(final[1:5], states[2].final_states)
    assert not aux[:3].any() and not aux[15:].any() and not final[:1].any() and not final[5:].any()


def test_what_a_reader_hands_out_does_not_change_the_file(
    tmp_path: Path, states: list[StatesSample]
) -> None:
    location, shard = commit(make_config(tmp_path), encode_states(states))
    reader = StatesReader(location, shard)
    reader.sample(0).aux_states.zero_()
    assert_equal(reader.sample(0), states[0])
    reader.sample(0, decode=False).aux_states.zero_()
    assert_equal(StatesReader(location, shard).sample(0), states[0])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_equal_samples_give_equal_bytes(states: list[StatesSample], encoding: Encoding) -> None:
    alternatives = 0 if states[0].alternative_ids is None else states[0].alternative_ids.shape[1]
    assert encode_states(states, encoding) == encode_states(three_samples(alternatives), encoding)
    assert encode_states(states, encoding) != encode_states(states[::-1], encoding)


def test_ids_take_two_bytes_when_all_of_them_fit(
    tmp_path: Path, states: list[StatesSample]
) -> None:
    short = load(encode_states(states))["token_ids"]
    assert (
        short.dtype == torch.uint16
        and short.tolist() == torch.cat([sample.token_ids for sample in states]).tolist()
    )
    states[1] = replace(states[1], token_ids=torch.tensor([70_000], dtype=torch.int32))
    data = encode_states(states)
    assert load(data)["token_ids"].dtype == torch.int32
    location, shard = commit(make_config(tmp_path), data)
    assert_equal(StatesReader(location, shard).sample(1), states[1])


def test_the_mask_takes_one_bit_a_token(states: list[StatesSample]) -> None:
    """7 + 1 + 12 tokens; 3 to 6 of the first and 2 to 5 of the third were generated.

    00011110 00111100 0000
    """
    assert load(encode_states(states))["supervised_mask"].tolist() == [
        0b00011110,
        0b00111100,
        0b00000000,
    ]


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the byte ranges that are read."""
    lengths: list[int] = []
    read = Location.read_range

    def counted(self: Location, name: str, start: int, stop: int) -> bytes:
        lengths.append(stop - start)
        return read(self, name, start, stop)

    monkeypatch.setattr(Location, "read_range", counted)
    return lengths


@pytest.mark.parametrize(("encoding", "row"), [("bf16", 2 * H), ("fp8", H + 1), ("int8", H + 1)])
def test_opening_a_remote_shard_is_one_request_and_a_sample_one_a_kind_of_rows(
    tmp_path: Path, states: list[StatesSample], ranges: list[int], encoding: Encoding, row: int
) -> None:
    uri = f"memory://{tmp_path.name}-{encoding}"
    reader = StatesReader(*commit(make_config(uri), encode_states(states, encoding)))
    assert len(ranges) == 1
    reader.sample(2)
    other_rows = [] if states[0].alternative_ids is None else [4 * 2 * row]
    assert ranges[1:] == [12 * 3 * row, 4 * row, *other_rows]


def documented() -> tuple[Callable[..., tuple[np.ndarray, ...]], ...]:
    """The readers of docs/states-format.md, as they stand there."""
    text = (Path(__file__).parents[2] / "docs/states-format.md").read_text()
    scope: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, scope)
    return scope["read_states"], scope["read_alternatives"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_documented_numpy_reader_works(tmp_path: Path, encoding: Encoding) -> None:
    states = [*three_samples(3), make_states(5, 40, range(10, 40), alternatives=3)]
    location, shard = commit(make_config(tmp_path / "run"), encode_states(states, encoding))
    reader, (read_states, read_alternatives) = StatesReader(location, shard), documented()
    path = tmp_path / "run/features/shards" / shard.path
    for index in range(len(states)):
        expected = reader.sample(index)
        token_ids, supervised_mask, aux, final, positions = read_states(path, index)
        ids, others = read_alternatives(path, index)
        assert np.array_equal(token_ids, expected.token_ids)
        assert np.array_equal(supervised_mask, expected.supervised_mask)
        assert np.array_equal(positions, expected.final_positions)
        rounding = 0 if encoding == "bf16" else 2**-8  # ours are rounded to bf16 once more
        np.testing.assert_allclose(aux, expected.aux_states.float(), rtol=rounding)
        np.testing.assert_allclose(final, expected.final_states.float(), rtol=rounding)
        assert expected.alternative_ids is not None and expected.alternative_states is not None
        assert np.array_equal(ids, expected.alternative_ids)
        np.testing.assert_allclose(others, expected.alternative_states.float(), rtol=rounding)


def test_the_documented_rows_are_the_size() -> None:
    """All but header, offsets and checksums: rows, ids of two bytes and one bit a token."""
    states = [make_states(index, 40, range(16, 40)) for index in range(20)]
    tokens, finals = 800, 480
    for encoding, row, scales in (("bf16", 2 * H, 0), ("fp8", H + 1, 0), ("int8", H + 1, 8 * H)):
        data = encode_states(states, encoding)  # type: ignore[arg-type]
        before = 8 + int.from_bytes(data[:8], "little") + 2 * 21 * 8 + 20 * 4
        assert len(data) - before == tokens * (3 * row + 2) + tokens // 8 + finals * row + scales
    several = [make_states(index, 40, range(16, 40), alternatives=2) for index in range(20)]
    data, plain = encode_states(several), encode_states(states)
    sizes = (len(each) - int.from_bytes(each[:8], "little") for each in (data, plain))
    more, less = sizes
    assert more - less == finals * 2 * (2 * H + 2)
