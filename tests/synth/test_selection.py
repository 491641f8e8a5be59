"""Prompts are selected once: streamed into files, committed by one of those who try, then read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import yaml

from pipeline.config import RunConfig
from pipeline.errors import CorruptShard, DataError, StageConflict, StoreError
from pipeline.records import Prompt, SamplingOverride
from pipeline.store.backend import FileInfo
from pipeline.store.location import Location
from pipeline.synth.select import (
    PROMPTS,
    SELECTION,
    PromptStream,
    Selection,
    draws_from,
    find_selection,
    load_prompt_shard,
    position,
    select,
    synth_section,
)
from tests.synth.conftest import tree

Configs = Callable[..., RunConfig]


def stage_of(config: RunConfig) -> Location:
    return Location(f"{config.run.uri}/synth")


def files_of(location: Location) -> list[str]:
    return location.child(PROMPTS).names()


def all_prompts(location: Location, selection: Selection) -> list[Prompt]:
    return [prompt for shard in selection.shards for prompt in load_prompt_shard(location, shard)]


class Overtaken(Location):
    """A directory in which another process commits its selection right before this one does."""

    other: Callable[[], object]

    def create(self, name: str, data: bytes) -> bytes:
        if name == SELECTION:
            self.other()
        return super().create(name, data)


def test_the_files_hold_the_prompts_that_pass(make_config: Configs) -> None:
    config = make_config(shard_prompts=10)
    assert config.synth
    selection = select(config, stage_of(config))
    expected = list(PromptStream(config.synth, config.run.seed))
    assert all_prompts(stage_of(config), selection) == expected
    assert [shard.prompts for shard in selection.shards] == [10, 10, 4]
    assert files_of(stage_of(config)) == [shard.file for shard in selection.shards]
    asked = [len(turn) for prompt in expected for turn in prompt.turns]
    sums = (selection.turns, selection.asked, selection.characters)
    assert sums == (2, len(asked), sum(asked)) and (selection.loaded, selection.prompts) == (24, 24)
    one_turn = make_config("one", max_turns=1)
    shorter = select(one_turn, stage_of(one_turn))
    assert (shorter.turns, shorter.asked) == (1, 24)


def test_a_share_is_of_what_was_drawn_and_holds_every_smaller_one(make_config: Configs) -> None:
    def names(**settings: object) -> tuple[list[str], PromptStream]:
        config = make_config("share", **settings)
        assert config.synth
        stream = PromptStream(config.synth, config.run.seed)
        return [each.sample_id for each in stream], stream

    whole, _ = names(max_prompts=20)
    half, stream = names(max_prompts=20, share=0.5)
    some, _ = names(max_prompts=20, share=0.25)
    assert half == [each for each in whole if each in half] and len(half) < 20
    assert 0 < len(some) < len(half) and set(some) < set(half)
    assert stream.rejected == {"max_prompts": 4, "share": 20 - len(half)}
    prompt = next(iter(PromptStream(synth_section(make_config("share")), 0)))
    many = [prompt.model_copy(update={"sample_id": str(number)}) for number in range(2000)]
    assert sum(position(each) < 0.25 for each in many) / 2000 == pytest.approx(0.25, abs=0.03)
    config, all_of_it, other = (
        make_config("c", share=0.5),
        make_config("a"),
        make_config("o", share=0.5, max_prompts=20),
    )
    selection = select(all_of_it, stage_of(all_of_it))
    assert draws_from(config, selection) and draws_from(all_of_it, selection)
    assert not draws_from(other, selection)


def test_every_field_of_a_prompt_is_kept(make_config: Configs, prompts_file: Path) -> None:
    records = [
        {"turns": ["A", "B", "ünï\u0000 👋"], "system": "S", "license": "MIT"},
        {"turns": ["C"], "license": "MIT", "category": "x", "id": "5", "source": "y"},
    ]
    prompts_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    sampling = {"temperature": 0.3, "top_k": 2**40}
    plain, drawn = str(prompts_file), prompts_file.with_name("more.jsonl")
    drawn.write_text('{"turns": ["D"], "license": "MIT"}\n')
    config = make_config(sources=[{"source": plain}, {"source": str(drawn), "sampling": sampling}])
    assert config.synth
    stored = all_prompts(stage_of(config), select(config, stage_of(config)))
    assert stored == list(PromptStream(config.synth, 0))
    assert [prompt.sampling for prompt in stored[1:]] == [None, SamplingOverride(**sampling)]
    [shard] = files_of(stage_of(config))
    columns = pq.read_schema(stage_of(config).child(PROMPTS).local_path(shard))
    assert columns.names == list(Prompt.model_fields)
    assert [f.name for f in columns.field("sampling").type] == list(SamplingOverride.model_fields)


def test_a_second_start_reads_no_source(make_config: Configs, prompts_file: Path) -> None:
    config = make_config()
    selection = select(config, stage_of(config))
    prompts_file.unlink()
    assert select(config, stage_of(config)) == selection
    assert len(all_prompts(stage_of(config), selection)) == 24


def test_prompts_for_other_keys_are_refused(make_config: Configs) -> None:
    config = make_config()
    select(config, stage_of(config))
    other = make_config(max_prompts=20)
    with pytest.raises(StageConflict, match="prompts of other sources, filters or shards"):
        select(other, stage_of(other))
    select(make_config(batch_size=7), stage_of(config))  # decides nothing


class Slow(Location):
    """A store that takes longer for a file than its prompts take to be read."""

    def child(self, name: str) -> Location:
        return Slow(super().child(name).uri)

    def write(self, name: str, data: bytes) -> FileInfo:
        time.sleep(0.05)
        return super().write(name, data)


def test_prompts_are_streamed(make_config: Configs, prompts_file: Path) -> None:
    config = make_config(shard_prompts=2)
    assert config.synth
    stream = PromptStream(config.synth, 0)
    next(iter(stream))
    assert stream.loaded == 1
    with prompts_file.open("a") as file:
        file.write("broken\n" * 3)
    with pytest.raises(DataError, match=r"prompts\.jsonl:25: not valid JSON"):
        select(config, stage_of(config))
    assert len(files_of(stage_of(config))) >= 11 and find_selection(stage_of(config)) is None


def test_a_source_that_is_missing_is_told_before_anything_is_written(
    make_config: Configs, prompts_file: Path
) -> None:
    missing = str(prompts_file.with_name("gone.jsonl"))
    config = make_config(sources=[{"source": str(prompts_file)}, {"source": missing}])
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        select(config, stage_of(config))
    assert files_of(stage_of(config)) == []


def test_memory_is_that_of_a_few_shards(make_config: Configs, prompts_file: Path) -> None:
    config = make_config(shard_prompts=10)
    select(config, Location(f"{config.run.uri}/first"))  # imports what is imported when needed
    lines = (f'{{"turns": ["{index} {"x" * 8000}"], "license": "MIT"}}\n' for index in range(1500))
    prompts_file.write_text("".join(lines))
    tracemalloc.start()
    selection = select(config, Slow(stage_of(config).uri))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert selection.prompts == 1500 and peak < 5 << 20, "12 MB of prompts"


def test_of_several_processes_one_decides_and_the_others_take_it(make_config: Configs) -> None:
    config = make_config(shard_prompts=1)
    with ThreadPoolExecutor(4) as pool:
        each = list(pool.map(lambda _: select(config, stage_of(config)), range(4)))
    assert all(selection == each[0] for selection in each)
    assert files_of(stage_of(config)) == [shard.file for shard in each[0].shards]
    assert len(all_prompts(stage_of(config), each[0])) == 24


def test_who_comes_second_takes_the_first_selection(make_config: Configs) -> None:
    config, location = make_config(), Overtaken(stage_of(make_config()).uri)
    location.other = lambda: select(config, stage_of(config))
    selection = select(config, location)
    assert selection == find_selection(location)
    assert files_of(location) == [shard.file for shard in selection.shards]


def test_who_comes_second_with_other_prompts_is_told_what_differs(
    make_config: Configs, prompts_file: Path
) -> None:
    config, location = make_config(), Overtaken(stage_of(make_config()).uri)

    def with_one_more() -> None:
        with prompts_file.open("a") as file:
            file.write('{"turns": ["One more"], "license": "MIT"}\n')
        select(config, stage_of(config))

    location.other = with_one_more
    with pytest.raises(StageConflict, match=r"selected other prompts .*: loaded 25, not 24"):
        select(config, location)
    selection = find_selection(location)
    assert selection and selection.loaded == 25
    assert files_of(location) == [shard.file for shard in selection.shards]


def test_equally_many_other_prompts_are_told_by_their_shard(
    make_config: Configs, prompts_file: Path
) -> None:
    config, location = make_config(), Overtaken(stage_of(make_config()).uri)

    def changed() -> None:
        prompts_file.write_text(prompts_file.read_text().replace("5 minus", "55 minus"))
        select(config, stage_of(config))

    location.other = changed
    with pytest.raises(StageConflict, match=r"at the same time: shard 0000\d-\w+\.parquet, not "):
        select(config, location)


def test_files_that_somebody_removed_meanwhile_are_missed(make_config: Configs) -> None:
    class Emptied(Location):
        def child(self, name: str) -> Location:
            return Emptied(super().child(name).uri)

        def sizes(self) -> dict[str, int]:
            self.delete(self.names()[0])
            return super().sizes()

    config = make_config(shard_prompts=1)
    with pytest.raises(StoreError, match="was removed while prompts were selected"):
        select(config, Emptied(stage_of(config).uri))
    assert find_selection(stage_of(config)) is None


def test_killed_half_way_it_selects_again(
    tiny_target: Path, prompts_file: Path, make_config: Configs, tmp_path: Path
) -> None:
    lines = (f'{{"turns": ["Question {index}"], "license": "MIT"}}\n' for index in range(120))
    prompts_file.write_text("".join(lines))
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(tree(tiny_target, prompts_file, tmp_path / "run", shard_prompts=1))
    )
    program = (
        "from pipeline.config import load; from pipeline.synth.select import select\n"
        "from pipeline.store.location import Location; import sys\n"
        "select(load(sys.argv[1]), Location(sys.argv[2]))"
    )
    location = Location(f"{tmp_path}/run/synth")
    process = subprocess.Popen([sys.executable, "-c", program, str(path), location.uri])
    while len(files_of(location)) < 3:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = set(files_of(location))
    assert 3 <= len(left) < 120 and find_selection(location) is None
    config = make_config(shard_prompts=1)
    selection = select(config, location)
    assert left < set(files_of(location)), "an earlier attempt's files are left to gc"
    assert left.isdisjoint(shard.file for shard in selection.shards)
    undisturbed = select(make_config("other", shard_prompts=1), Location(f"{tmp_path}/other/synth"))
    assert undisturbed.difference(selection) == "" and undisturbed.prompts == 120
    assert all_prompts(location, selection) == all_prompts(
        Location(f"{tmp_path}/other/synth"), undisturbed
    )


def test_damaged_prompts_are_refused(make_config: Configs) -> None:
    config = make_config()
    location, selection = stage_of(config), select(config, stage_of(config))
    first, second, third = selection.shards
    folder = location.child(PROMPTS)
    whole = folder.read(first.file)
    folder.write(first.file, whole[:-1] + bytes([whole[-1] ^ 1]))
    folder.write(second.file, b"")
    folder.delete(third.file)
    for shard, problem in ((first, "SHA-256"), (second, "has 0 bytes"), (third, "is missing")):
        with pytest.raises(CorruptShard, match=rf"{shard.file}: .*{problem}.*selected again"):
            load_prompt_shard(location, shard)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "{", "not JSON: "),
        ('"loaded":24', '"loaded":25', "24 prompts and 0 rejected are not the 25 loaded"),
        ('"inputs"', '"input"', "inputs: not a selection: Field required"),
        ('"00000-', '"../../etc-', "shards.0.0: not a selection: String should match pattern"),
    ],
)
def test_a_file_that_is_no_selection_is_refused(
    make_config: Configs, old: str, new: str, problem: str
) -> None:
    config = make_config()
    select(config, stage_of(config))
    text = stage_of(config).read(SELECTION).decode()
    stage_of(config).write(SELECTION, text.replace(old, new, 1).encode())
    with pytest.raises(CorruptShard) as raised:
        find_selection(stage_of(config))
    assert SELECTION in raised.value.where and problem in str(raised.value)


def test_on_an_object_store(make_config: Configs, bucket: str, tmp_path: Path) -> None:
    config, location = make_config(), Location(f"{bucket}/{tmp_path.name}/synth")
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: select(config, location), range(2))
    assert one == other == find_selection(location)
    assert files_of(location) == [shard.file for shard in one.shards]
    assert len(all_prompts(location, one)) == 24
