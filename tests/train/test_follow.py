"""Training that follows features over a store that never holds all states."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import bounded
from pipeline.config import RunConfig, parse
from pipeline.errors import ConfigError, ConsumedShard, StageConflict
from pipeline.features.plan import plan as plan_features
from pipeline.features.stage import run as run_features
from pipeline.learning.batches import Schedule
from pipeline.learning.corpus import Piece
from pipeline.records import Manifest, Sample
from pipeline.store.gc import find_orphans, remove
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.parts import window_of
from pipeline.store.samples import encode_samples
from pipeline.store.shards import SHARDS, consume, consumed_count, read_consumed, verify_shard
from pipeline.store.stage_run import open_stage
from pipeline.store.verify import verify_run
from pipeline.train import follow, loop
from pipeline.train.plan import plan as plan_train
from pipeline.train.stage import run as run_train
from tests.forked import Command
from tests.train.conftest import HEAD, SETTINGS, VOCAB, contract_of

#: Samples, and those of a synth shard; a shard of states has three or four.
SAMPLES, PER_SHARD, SHARD_TOKENS = 36, 9, 120


def make_sample(number: int) -> Sample:
    draw = random.Random(number)
    length, prompt = 18 + number * 7 % 31, 3 + number % 5
    spans = [] if number % 12 == 5 else [{"start": prompt, "end": length}]
    return Sample.model_validate(
        {
            "sample_id": f"p{number}",
            "source": "even" if number % 2 else "odd",
            "license": "MIT",
            "category": "chat",
            "messages": ({"role": "user", "content": "hi"},),
            "token_ids": tuple(draw.randrange(3, VOCAB) for _ in range(length)),
            "supervised": spans,
            "finish_reason": "length",
            "sampling": {"temperature": 1, "top_p": 1, "top_k": 0, "max_new_tokens": 64},
            "seed": 0,
            "generator": "unit",
        }
    )


def finish_synth(config: RunConfig) -> Manifest:
    samples = [make_sample(number) for number in range(SAMPLES)]
    stage_run = open_stage(config, "synth", None)
    for start in range(0, SAMPLES, PER_SHARD):
        part = samples[start : start + PER_SHARD]
        tokens = sum(len(sample.token_ids) for sample in part)
        name = f"{start:05d}.parquet"
        stage_run.commit(name, encode_samples(part), rows=len(part), tokens=tokens)
    spans = [span for sample in samples for span in sample.supervised]
    return stage_run.finish(
        contract=contract_of(config),
        licenses={"MIT": SAMPLES},
        sources={"even": SAMPLES // 2, "odd": SAMPLES // 2},
        details={"supervised_tokens": sum(span.end - span.start for span in spans)},
    )


Ready = Callable[..., RunConfig]


@pytest.fixture
def ready(tmp_path: Path, target_directory: Path) -> Ready:
    """`ready("name", keep=4, epochs=3)` → a run whose samples are there; keep=None: offline."""

    def build(
        name: str, keep: int | None, *, below: str = "", force: bool = False, **train: Any
    ) -> RunConfig:
        follow = {} if keep is None else {"follow": True}
        where = {"uri": f"{below or tmp_path}/{name}", "threads": 1, "claim_seconds": 1.0}
        where |= {"force": force, "cache_dir": str(tmp_path / f"{name}.cache")}
        tree = {
            "run": where,
            "target": {"source": str(target_directory), "device": "cpu", "dtype": "float32"},
            "synth": {"sources": [{"source": "prompts.jsonl"}]},
            "features": {"shard_tokens": SHARD_TOKENS, "reply_tolerance": 1, "keep_shards": keep},
            "train": {**SETTINGS, "head_config": HEAD, **follow, **train},
        }
        config = parse(tree)
        finish_synth(config)
        return config

    return build


def beside(config: RunConfig, suffix: str) -> Path:
    """A file of this machine for a run, wherever that is."""
    return Path(str(config.run.cache_dir)).with_suffix(f".{suffix}")


def started(config: RunConfig, stage: str, *, tool: tuple[str, ...] = ()) -> Any:
    file, fresh = beside(config, "yaml"), beside(config, "fresh")
    fresh.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    fresh.replace(file)  # another stage may be reading it
    if not tool:
        return Command([stage, "-c", str(file)], beside(config, stage))
    words = [sys.executable, "-W", "ignore", *tool, "-m", "pipeline.cli", stage, "-c", str(file)]
    with open(beside(config, stage), "a") as out:
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)


def printed(config: RunConfig, stage: str) -> str:
    return beside(config, stage).read_text()


def finish(config: RunConfig, *processes: Command) -> None:
    for process in processes:
        assert process.wait(timeout=180) == 0, [
            printed(config, stage) for stage in ("features", "train")
        ]


@contextmanager
def features_beside(config: RunConfig) -> Iterator[None]:
    process = started(config, "features")
    try:
        yield
        finish(config, process)
    finally:
        process.kill()
        process.wait()


def shards_of(config: RunConfig) -> list[str]:
    folder = stage_location(config.run.uri, "features").child(SHARDS)
    return [name for name in folder.names() if name.endswith(".safetensors")]


def head_bytes(config: RunConfig) -> bytes:
    return stage_location(config.run.uri, "train").child("head").read("model.safetensors")


EVALUATION = {
    "evaluate_every": 8,
    "evaluate_prompts": 2,
    "evaluate_tokens": 6,
    "evaluate_tree": {"top_k": 1, "steps": 2, "nodes": 3},
}


def test_where_all_fit_the_head_is_that_of_an_offline_run(ready: Ready) -> None:
    """With held-out samples, part of the tokens, and samples that are longer than a batch."""
    settings = {**EVALUATION, "data_tokens": 700, "batch_tokens": 40}
    offline, follows = ready("offline", None, **settings), ready("follows", 99, **settings)
    shards = run_features(offline).shards
    expected = run_train(offline)
    with features_beside(follows):
        manifest = run_train(follows)
    assert head_bytes(follows) == head_bytes(offline)
    assert manifest.details == expected.details
    states = read_manifest(follows.run.uri, "features")
    assert states.shards == shards and len(shards) > 8
    assert manifest.parent_hash == states.content_hash
    assert shards_of(follows) == []
    check = verify_run(follows.run.uri)
    assert not check.problems and check.consumed == len(shards)
    assert not find_orphans(follows.run.uri)


class Watched:
    """The shards that lie in a run while a block goes on, looked at all the time."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._over = config, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.seen: list[int] = []

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self.seen.append(len(shards_of(self._config)))


def test_no_more_shards_than_that_at_any_time_and_each_batch_once(ready: Ready) -> None:
    """A full window stops capture, with a word; an empty one training."""
    config, looks = ready("bounded", 4), list[bounded.Look]()
    watching = threading.Thread(target=lambda: looks.extend(bounded.watch(Path(config.run.uri))))
    watching.start()
    with features_beside(config):
        manifest = run_train(config)
    watching.join()
    states = read_manifest(config.run.uri, "features")
    assert len(states.shards) == 12 and shards_of(config) == []
    # Those being written included.
    assert max(each.shards for each in looks) == 4 and looks[-1].states == 0
    four = sum(sorted(shard.bytes for shard in states.shards)[-4:])
    assert max(each.states + each.unfinished for each in looks) <= four
    # Every sample that teaches, in both epochs.
    assert manifest.details["tokens"] == SETTINGS["epochs"] * manifest.details["data_tokens"]
    assert manifest.details["data_tokens"] == states.tokens
    said = " ".join(printed(config, "features").split())
    assert "the window is full: 4 shards (features.keep_shards) lie in the run" in said
    check = verify_run(config.run.uri)
    assert not check.problems and check.consumed == 12
    first, location = states.shards[0], stage_location(config.run.uri, "features")
    with pytest.raises(ConsumedShard, match="was consumed: training is past it"):
        verify_shard(location, first)
    (location.local_path("consumed") / "000002.json").unlink()
    problems = verify_run(config.run.uri).problems
    assert len(problems) == 2 and all("the file is missing" in problem for problem in problems)


@pytest.mark.parametrize(
    ("place", "keep", "most"), [("disk", 99, 2), ("mount", 4, 2), ("bucket", 4, 4)]
)
def test_kills_at_random_instants_lose_nothing(
    ready: Ready, place: str, keep: int, most: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of the worker and of the trainer, -9, each up to `most` times: the same head, never more
    shards.

    On another file system and in a bucket it is the head of a run on this disk, and where all
    shards may lie there, that of a run which makes them first.
    """
    below = ""
    if place == "mount":
        below = f"file://{request.getfixturevalue('mount')('size=64m')}"
    if place == "bucket":
        below = f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    whole = ready("whole", None if keep == 99 else keep, epochs=6)
    killed = ready("killed", keep, below=below, epochs=6)
    if keep == 99:
        run_features(whole)
        expected = run_train(whole)
    else:
        with features_beside(whole):
            expected = run_train(whole)
    draw, kills = random.Random(41), {"features": 0, "train": 0}
    processes = {stage: started(killed, stage) for stage in kills}
    until = time.monotonic() + 900
    try:
        with Watched(killed) as watched:
            while any(process.poll() != 0 for process in processes.values()):
                time.sleep(draw.uniform(0.0, 1.0))
                stage = draw.choice(list(kills))
                if processes[stage].poll() is None and kills[stage] < most:
                    done = consumed_count(stage_location(killed.run.uri, "features"))
                    if done or kills[stage] == 0:
                        processes[stage].send_signal(signal.SIGKILL)
                        processes[stage].wait()
                        kills[stage] += 1
                for stage, process in processes.items():
                    if process.poll() not in (0, None):
                        assert process.returncode == -signal.SIGKILL, printed(killed, stage)
                        processes[stage] = started(killed, stage)
                assert time.monotonic() < until
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert min(kills.values()) > 0, kills
    assert head_bytes(killed) == head_bytes(whole)
    assert read_manifest(killed.run.uri, "train").details == expected.details
    # What a killed writer leaves has no entry, until `eagle3 gc`.
    assert max(watched.seen) <= keep + kills["features"]
    assert not [*Path(str(killed.run.cache_dir)).glob("shards/*")]
    remove(find_orphans(killed.run.uri))
    assert shards_of(killed) == [] and not verify_run(killed.run.uri).problems


def test_nothing_is_deleted_before_a_checkpoint_is_past_it(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each deletion the newest marker in the run is of a step after the shards' last batch."""
    config, seen = ready("run", 4), list[tuple[int, int]]()

    def watched(location: Any, names: list[str], *, before: int, step: int) -> None:
        markers = (Path(config.run.uri) / "train/checkpoints").glob("step-*.json")
        newest = max((json.loads(marker.read_text()) for marker in markers), key=_step)
        schedule = loops[0].data.schedule
        passed = len(schedule) if loops[0].steps == step else newest["progress"]["batches"]
        assert newest["progress"]["step"] == step
        assert schedule.window_end(min(len(names) // 2, schedule.windows) - 1) <= passed
        seen.append((len(names), step))
        consume(location, names, before=before, step=step)

    loops: list[loop.TrainingLoop] = []
    run_loop = loop.TrainingLoop.run

    def remembered(self: loop.TrainingLoop) -> None:
        loops.append(self)
        run_loop(self)

    monkeypatch.setattr(follow, "consume", watched)
    monkeypatch.setattr(loop.TrainingLoop, "run", remembered)
    with features_beside(config):
        run_train(config)
    assert [count for count, _ in seen] == [2, 4, 6, 8, 10, 12]


def _step(marker: dict[str, Any]) -> int:
    return int(marker["progress"]["step"])


def test_processes_of_a_group_follow_and_go_on_with_another_number(ready: Ready) -> None:
    config = ready("group", 4, epochs=6)
    tool = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    features, train = started(config, "features"), started(config, "train", tool=tool)
    location = stage_location(config.run.uri, "features")
    until = time.monotonic() + 150
    while consumed_count(location) < 4:
        assert train.poll() is None and time.monotonic() < until, printed(config, "train")
        time.sleep(0.02)
    train.terminate()
    train.wait()
    finish(config, features, started(config, "train"))
    manifest = read_manifest(config.run.uri, "train")
    # A last group of fewer batches than processes is left out, as offline.
    assert manifest.details["tokens"] >= 6 * manifest.details["data_tokens"] - 2 * 64
    assert shards_of(config) == [] and not verify_run(config.run.uri).problems


def test_a_step_of_more_shards_than_may_lie_there_is_refused(ready: Ready) -> None:
    """Else features would wait for room, and training for states."""
    config = ready("run", 2, epochs=1, accumulate=8)
    features = started(config, "features")
    try:
        with pytest.raises(ConfigError, match="2 shards stay, and one step of 8 batches takes"):
            run_train(config)
    finally:
        features.kill()
        features.wait()


def test_sigterm_before_the_first_step_leaves_nothing_to_mend(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, wait = ready("run", 4), follow.FollowedCorpus.wait_for
    with features_beside(config):
        with monkeypatch.context() as patch:
            patch.setattr(
                follow.FollowedCorpus,
                "wait_for",
                lambda self, window, *stopping: not stopping and wait(self, window),
            )
            with pytest.raises(KeyboardInterrupt):
                run_train(config)
        assert not stage_location(config.run.uri, "train").child("checkpoints").names()
        run_train(config)
    assert head_bytes(config)


def test_run_makes_states_and_trains_at_one_time(ready: Ready) -> None:
    config = ready("run", 4)
    file = beside(config, "yaml")
    tree = config.model_dump(mode="json")
    file.write_text(yaml.safe_dump(tree))
    words = ["-c", f"from pipeline.api import *; run(load_config({str(file)!r}), *STAGES[1:3])"]
    script = words[1].replace("import *", "import load_config, run, STAGES")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_consumed(stage_location(config.run.uri, "features"))
    broken = config.model_copy(update={"target": config.target.model_copy(update={"source": "no"})})
    file.write_text(yaml.safe_dump(broken.model_dump(mode="json")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0 and "StageConflict" in done.stderr


def test_training_anew_is_refused_where_its_states_are_gone(ready: Ready) -> None:
    config = ready("run", 4)
    with features_beside(config):
        run_train(config)
    train = config.train.model_copy(update={"step_decay": 0.5})
    forced = config.run.model_copy(update={"force": True})
    other = config.model_copy(update={"train": train, "run": forced})
    with pytest.raises(StageConflict, match=r"12 shards .* train.step_decay 0.8 → 0.5"):
        run_train(other)
    run_train(config)  # it is complete
    for name in ("manifest.json", "checkpoints"):
        path = Path(config.run.uri) / "train" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(StageConflict, match="is missing or damaged, and the 12 shards"):
        run_train(config)
    shutil.rmtree(Path(config.run.uri) / "train")
    with pytest.raises(StageConflict, match=r"12 shards .* a training that is not here"):
        run_train(config)


def test_states_that_were_left_by_a_kill_are_deleted(ready: Ready) -> None:
    """Between the record and the files: gc takes them, and so does training when it goes on."""
    config = ready("run", 99)
    states = run_features(config)
    location = stage_location(config.run.uri, "features")
    names = [shard.name for shard in states.shards]
    copies = {path.name: path.read_bytes() for path in location.local_path(SHARDS).iterdir()}
    consume(location, names[:3], before=0, step=1)
    for name, data in copies.items():
        (location.local_path(SHARDS) / name).write_bytes(data)
    orphans = find_orphans(config.run.uri)
    assert {orphan.reason for orphan in orphans} == {"states that training has consumed"}
    assert len(orphans) == 3 and not verify_run(config.run.uri).problems
    remove(orphans)
    assert len(shards_of(config)) == 9 and not verify_run(config.run.uri).problems


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"features": {"keep_shards": 4}}, "set train.follow=true"),
        ({"train": {"follow": True}}, "set features.keep_shards"),
        ({"features": {"keep_shards": 1}}, "features.keep_shards"),
        (
            {"features": {"keep_shards": 4}, "train": {"follow": True, "max_steps": 5}},
            "max_steps would leave some unread",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse({"target": {"source": "x"}, **settings})


def test_the_plan_knows_how_much_lies_there_at_one_time(ready: Ready) -> None:
    whole, bounded = ready("whole", None), ready("bounded", 3)
    plans = [plan_features(config) for config in (whole, bounded)]
    assert [plan.shards for plan in plans] == [12, 12]
    assert plans[1].storage_bytes == round(plans[0].storage_bytes * 3 / 12)
    assert any("at most 3 shards at one time" in line for line in plans[1].basis)
    training = plan_train(bounded, plans[1])
    assert training.state == "not started"
    assert any("windows: 12 of 1 shards" in line for line in training.basis)


def test_a_window_is_half_of_what_may_lie_there_or_all() -> None:
    assert [window_of(keep, 12) for keep in (2, 3, 4, 11, 12, 99)] == [1, 1, 2, 5, 12, 12]


def test_epochs_pass_over_a_window_before_the_next() -> None:
    pieces = [Piece(shard, sample, 0, 10) for shard in range(5) for sample in range(3)]
    whole = Schedule(pieces, budget=30, seed=1, epochs=2)
    assert whole.windows == 1
    windows = Schedule(pieces, budget=30, seed=1, epochs=2, window=2)
    seen = [
        [
            piece
            for index in range(len(windows))
            if windows.locate(index)[0] == number
            for piece in windows.batch(index)
        ]
        for number in range(6)
    ]
    for number, each in enumerate(seen):
        shards = range(number // 2 * 2, number // 2 * 2 + 2)
        assert sorted(each) == [piece for piece in pieces if piece.shard in shards]
    assert seen[0] != seen[1]
    assert [windows.window_end(window) for window in range(3)] == [4, 8, 10]
    alike = Schedule(pieces, budget=30, seed=1, epochs=2, window=5)
    assert [alike.batch(index) for index in range(len(alike))] == [
        whole.batch(index) for index in range(len(whole))
    ]
