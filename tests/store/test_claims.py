"""Claims: who makes which shard. They save work; what is committed hangs on none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.errors import StageConflict
from pipeline.store import stage_run as claims_module
from pipeline.store.gc import find_orphans, remove
from pipeline.store.location import Location
from pipeline.store.stage_run import Claims, StageRun, make_shards, open_stage
from tests.store.conftest import CONTRACT, make_config

NAMES = [f"{index:05d}.bin" for index in range(12)]


@pytest.fixture(params=["local", "gs"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "gs":
        return Location(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")
    return Location(str(tmp_path))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of the tests is on a machine of its own: only a claim's age tells."""
    numbers = iter(range(10**6))
    monkeypatch.setattr(claims_module, "process_namespace", lambda: str(next(numbers)))


@pytest.mark.usefixtures("elsewhere")
def test_one_of_two_has_a_shard_until_it_lets_go(location: Location) -> None:
    with Claims(location, 60) as first, Claims(location, 60) as second:
        assert first.take("a") and not second.take("a")
        assert second.take("b") and not first.take("b")
        first.release({"a"})
        assert second.take("a") and not first.take("a")
    assert location.child("claims").names() == [], "nothing is left behind"


@pytest.mark.usefixtures("elsewhere")
def test_an_old_claim_is_taken_over_and_a_renewed_one_is_not(location: Location) -> None:
    held, dead = Claims(location, 1.0), Claims(location, 1000)  # the second is never renewed
    with held, Claims(location, 1.0) as other:
        assert held.take("held") and dead.take("dead")
        time.sleep(2.5)
        assert not other.take("held"), "it was renewed"
        assert other.take("dead") and not held.take("dead")
        assert location.child("claims").names() == [
            *("dead.0000.json", "dead.0001.json"),
            "held.0000.json",
        ]
        other.release_all()
        assert location.child("claims").names() == ["held.0000.json"]
    dead.release_all()


@pytest.mark.usefixtures("elsewhere")
def test_this_machine_s_clock_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both times are the store's: a machine whose clock is a day ahead takes nothing over."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86_400)
    location = Location(str(tmp_path))
    with Claims(location, 60) as first, Claims(location, 60) as second:
        assert first.take("a") and not second.take("a")
        old = tmp_path / "claims/a.0000.json"
        os.utime(old, (now() - 100, now() - 100))
        assert second.take("a")


def test_a_claim_of_a_process_that_is_gone_from_this_machine_is_free_at_once(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time; from pipeline.store.stage_run import Claims; "
        "from pipeline.store.location import Location; "
        "assert Claims(Location(sys.argv[1]), 1000).take('a'); print('taken', flush=True); "
        "time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout and other.stdout.readline() == "taken\n"
    with Claims(Location(str(tmp_path)), 1000) as claims:
        assert not claims.take("a")
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
        assert claims.take("a")


def test_a_broken_claim_grows_old_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    folder.mkdir()
    (folder / "a.0000.json").write_text("{")
    for stranger in ("a", "README", ".DS_Store", "a.²¹.json"):
        (folder / stranger).write_text("")
    with Claims(Location(str(tmp_path)), 60) as claims:
        assert not claims.take("a") and claims.holders() == {"a process that has left no name"}
        os.utime(folder / "a.0000.json", (1, 1))
        assert claims.take("a")


def making(
    stage_run: StageRun, made: list[str], pause: float = 0.0
) -> Callable[[Iterator[str]], None]:
    def make(names: Iterator[str]) -> None:
        for name in names:
            time.sleep(pause)
            stage_run.commit(name, name.encode(), rows=1, tokens=1)
            made.append(name)

    return make


@pytest.mark.usefixtures("elsewhere")
def test_processes_share_the_shards_and_each_ends_when_all_are_there(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    made: list[list[str]] = [[], [], []]
    manifests = []

    def work(own: list[str]) -> None:
        stage_run = open_stage(config, "synth", None)
        make_shards(stage_run, NAMES, config.run, making(stage_run, own, 0.02))
        assert stage_run.committed == set(NAMES)
        list(stage_run.collect(NAMES))
        manifests.append(stage_run.finish(contract=CONTRACT, licenses={}, sources={}))

    threads = [threading.Thread(target=work, args=(own,)) for own in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for own in made for name in own) == NAMES, "none was made twice"
    assert all(made), "all had a part in it"
    assert len(manifests) == 3 and manifests[0] == manifests[1] == manifests[2]
    assert not list((tmp_path / "synth/claims").iterdir())


@pytest.mark.usefixtures("elsewhere")
def test_what_others_commit_is_counted_and_what_they_leave_is_taken_over(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    short = config.run.model_copy(update={"claim_seconds": 0.5})
    other, stage_run = (open_stage(config, "synth", None) for _ in range(2))
    abandoned = Claims(other.location, 1000)
    assert abandoned.take(NAMES[3])
    other.commit(NAMES[5], b"theirs", rows=1, tokens=1)
    made, told = list[str](), set[str]()
    make_shards(stage_run, NAMES, short, making(stage_run, made), told.update)
    assert made[-1] == NAMES[3] and sorted(made) == [name for name in NAMES if name != NAMES[5]]
    assert NAMES[5] not in told, "it was seen when it was this process's turn"


def test_every_nth_shard_is_made_without_claims_on_them(tmp_path: Path) -> None:
    """One on all of them says that somebody is at work, whom `--force` may not disturb."""
    config = make_config(tmp_path)
    stage_run, made, claims = open_stage(config, "synth", None), list[str](), set[str]()
    other = make_config(tmp_path, force=True, synth={"temperature": 0.5})
    run = config.run.model_copy(update={"shard": "1/4"})

    def make(names: Iterator[str]) -> None:
        with pytest.raises(StageConflict, match="at work on it"):
            open_stage(other, "synth", None)
        claims.update(stage_run.location.child("claims").names())
        making(stage_run, made)(names)

    make_shards(stage_run, NAMES, run, make)
    assert made == NAMES[1::4] and claims == {"shard-1-of-4.0000.json"}
    assert not stage_run.location.child("claims").names()


def test_gc_removes_claims_that_killed_processes_left_in_a_finished_stage(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    stage_run = open_stage(config, "synth", None)
    assert Claims(stage_run.location, 60).take(NAMES[0])
    stage_run.commit(NAMES[0], b"x", rows=1, tokens=1)
    assert find_orphans(str(tmp_path)) == [], "the stage is at work"
    stage_run.finish(contract=CONTRACT, licenses={}, sources={})
    (orphan,) = find_orphans(str(tmp_path))
    assert orphan.reason == "claim on a shard of a finished stage"
    remove([orphan])
    assert find_orphans(str(tmp_path)) == []


@pytest.mark.usefixtures("elsewhere")
def test_a_date_in_the_future_keeps_no_claim_alive(tmp_path: Path) -> None:
    """The store's clock was set back: what stands still while it is watched is abandoned."""
    location, ahead = Location(str(tmp_path)), time.time() + 365 * 86_400
    with Claims(location, 1000) as dead, Claims(location, 0.3) as other:
        assert dead.take("a")
        os.utime(tmp_path / "claims/a.0000.json", (ahead, ahead))
        assert not other.take("a")
        time.sleep(0.2)
        os.utime(tmp_path / "claims/a.0000.json", (ahead + 1, ahead + 1))
        time.sleep(0.2)
        assert not other.take("a"), "it was renewed"
        time.sleep(0.4)
        assert other.take("a")


@pytest.mark.usefixtures("elsewhere")
def test_a_claim_that_was_taken_over_is_not_renewed(location: Location) -> None:
    """Its process was stopped, and wakes up."""
    folder = location.child("claims")
    with Claims(location, 0.4) as stopped, Claims(location, 0.4) as other:
        assert stopped.take("a") and stopped.holds("a")
        thread, stopped._thread = stopped._thread, None
        stopped._over.set()
        assert thread is not None
        thread.join()
        stopped._over.clear()
        time.sleep(1.0)
        assert other.take("a") and other.holds("a") and not stopped.holds("a")
        before = folder.info("a.0000.json").modified
        stopped._renew_in_background()
        time.sleep(0.5)
        assert folder.info("a.0000.json").modified == before
        assert other.holds("a") and not stopped.take("a")
        stopped.release_all()
        assert folder.names() == ["a.0000.json", "a.0001.json"] and other.holds("a")
    assert folder.names() == []


@pytest.mark.usefixtures("elsewhere")
def test_what_was_taken_over_is_not_given_back(location: Location) -> None:
    """By a process that wakes up at its end, before it has looked."""
    folder = location.child("claims")
    with Claims(location, 0.4) as other, Claims(location, 1000) as stopped:
        assert stopped.take("a")
        time.sleep(1.0)
        assert other.take("a")
        stopped.release_all()
        assert folder.names() == ["a.0000.json", "a.0001.json"] and other.holds("a")
    assert folder.names() == []


@pytest.mark.usefixtures("elsewhere")
def test_what_a_kill_within_a_release_left_is_taken_over(location: Location) -> None:
    """The last of several claims, without those that it had taken over."""
    folder = location.child("claims")
    with Claims(location, 0.4) as next_one, Claims(location, 1000) as dead:
        assert dead.take("a")
        folder.write("a.0002.json", folder.read("a.0000.json"))
        folder.delete("a.0000.json")
        assert not next_one.take("a")
        time.sleep(1.0)
        assert next_one.take("a") and next_one.holds("a")
        assert folder.names() == ["a.0002.json", "a.0003.json"]
    assert folder.names() == []


def test_force_discards_nothing_that_another_process_is_making(tmp_path: Path) -> None:
    first = make_config(tmp_path)
    second = make_config(tmp_path, force=True, synth={"temperature": 0.5})
    stage_run = open_stage(first, "synth", None)
    with Claims(stage_run.location, 60) as claims:
        assert claims.take("a")
        with pytest.raises(StageConflict, match=rf"at work on it: process {os.getpid()} on .*stop"):
            open_stage(second, "synth", None)
    assert open_stage(second, "synth", None).committed == set()
    with pytest.raises(StageConflict, match="has been begun anew by another process"):
        stage_run.commit("a.bin", b"of the first", rows=1, tokens=1)
    assert stage_run.location.child("shards").names() == []
