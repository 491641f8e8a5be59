"""Screening beside generation: the same bytes in any number of processes, and none is left over."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import PiiSection, RunConfig, SourceSpec, SynthSection
from pipeline.errors import ConfigError, WorkersDied
from pipeline.records import Manifest
from pipeline.synth.screening import Screen, Screening, count_processes
from pipeline.synth.stage import run
from tests.synth.server import ServedTarget, TargetServer
from tests.synth.test_remote import QUICK, served
from tests.synth.test_screen import GIVEN, prompt

__all__ = ["served"]  # a fixture

Start = Callable[..., Manifest]
NAMES = ("Anna Schmidt", "Robert Miller", "Maria Gonzalez", "John Smith")


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_PII_SALT", "a salt for tests")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process screens nothing itself while the others load."""
    monkeypatch.setattr(Screening, "_is_loading", lambda self: False)


@pytest.fixture(scope="module")
def server(served: ServedTarget) -> Iterator[TargetServer]:
    with TargetServer(served) as server:
        yield server


@pytest.fixture
def configure(
    make_config: Callable[..., RunConfig], prompts_file: Path, server: TargetServer
) -> Callable[..., RunConfig]:
    """24 prompts in shards of 4, half of them with names, mail addresses and phones."""
    lines = [json.loads(line) for line in prompts_file.read_text().splitlines()]
    for index, line in enumerate(lines):
        if index % 2:
            name = NAMES[index % 4]
            line["turns"][0] += f" I am {name}, write to u{index % 6}@firm.com or 212-555-7{index}."
    prompts_file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def configure(uri: str, processes: int, **synth: Any) -> RunConfig:
        generator = {"backend": "vllm", "endpoints": [server.url], **QUICK}
        pii = {"action": "pseudonymise", "entities": [*PiiSection().entities, "PERSON"]}
        given = {"generator": generator, "pii": pii, "max_new_tokens": 12, "shard_prompts": 4}
        return make_config(uri, screening_processes=processes, **{**given, **synth})

    return configure


@pytest.mark.usefixtures("patient")
def test_any_number_of_processes_gives_the_same_bytes(
    configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    runs = {processes: run(configure(f"by{processes}", processes)) for processes in (0, 1, 2)}
    assert not multiprocessing.active_children()
    findings = json.loads((tmp_path / "by0/synth/audit.json").read_text())
    assert "EMAIL_ADDRESS" in json.dumps(findings) and "PERSON" in json.dumps(findings)
    for processes, manifest in runs.items():
        assert manifest.shards == runs[0].shards, "every checksum, and what was rejected"
        assert manifest.content_hash == runs[0].content_hash
        folder = tmp_path / f"by{processes}" / "synth"
        for name in ("audit.json", "datasheet.md"):
            assert (folder / name).read_bytes() == (tmp_path / "by0/synth" / name).read_bytes()


def begin(screening: Screening) -> None:
    """The first prompts start the processes."""
    assert not multiprocessing.active_children()
    [(_, (kept, *_))] = screening.prompts([("a", GIVEN[:1])])
    assert kept == GIVEN[:1] and multiprocessing.active_children()


def section(processes: int | None, **synth: Any) -> SynthSection:
    given = {"sources": (SourceSpec(source="x"),), "screening_processes": processes, **synth}
    return SynthSection.model_validate(given)


@pytest.mark.usefixtures("patient")
def test_an_error_in_a_process_is_the_one_that_it_would_be_here() -> None:
    spec = section(1)
    broken = spec.model_copy(update={"pii": PiiSection(entities=("EMAIL_ADDRES",))})
    with pytest.raises(ConfigError) as here:
        Screen(broken)
    with (
        pytest.raises(ConfigError, match="no recogniser finds 'EMAIL_ADDRES'") as there,
        Screening(Screen(spec), broken, seed=0) as screening,
    ):
        list(screening.prompts([("a", GIVEN)]))
    assert str(there.value) == str(here.value) and type(there.value) is type(here.value)


@pytest.mark.usefixtures("patient")
def test_a_process_that_is_killed_is_an_error_and_no_endless_wait() -> None:
    spec = section(1)
    with (
        pytest.raises(WorkersDied, match="a screening process has ended early") as died,
        Screening(Screen(spec), spec, seed=0) as screening,
    ):
        begin(screening)
        [process] = multiprocessing.active_children()
        process.kill()
        list(screening.prompts([("a", GIVEN)]))
    assert died.value.exit_code == 75


class SlowToLoad:
    """What a process needs a minute to unpickle, before it can watch for its parent's end."""

    def __reduce__(self) -> tuple[Callable[[float], None], tuple[float]]:
        return time.sleep, (60.0,)


def test_an_interruption_ends_a_process_that_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = section(1)
    with pytest.raises(KeyboardInterrupt), Screening(Screen(spec), spec, seed=0) as screening:
        monkeypatch.setattr(screening, "_make_screen", SlowToLoad())
        assert len(list(screening.prompts([("a", GIVEN)]))) == 1  # screened here meanwhile
        [process] = multiprocessing.active_children()
        raise KeyboardInterrupt
    assert process.exitcode == -signal.SIGKILL


def test_prompts_are_taken_a_few_shards_ahead() -> None:
    """Each may be claimed, so that others cannot make it."""
    taken = []

    def shards() -> Iterator[tuple[str, list[Any]]]:
        for number in range(9):
            taken.append(number)
            yield str(number), [prompt(f"mail u{number}@firm.com"), prompt("hello")]

    for processes, ahead in ((0, 0), (1, 1), (3, 2)):
        taken.clear()
        spec = section(processes)
        with Screening(Screen(spec), spec, seed=0) as screening:
            for number, (name, (kept, dropped, findings)) in enumerate(screening.prompts(shards())):
                assert name == str(number) and [given.turns for given in kept] == [("hello",)]
                assert dropped == {"pii:EMAIL_ADDRESS": 1} and list(findings) == ["prompts"]
                assert len(taken) == min(number + 1 + ahead, 9)


def test_commits_wait_for_screening_but_not_for_ever() -> None:
    """The caller goes on while a few shards are screened, and is told when one fails."""
    spec, done = section(1), []
    go_on = threading.Event()

    def task(number: int) -> None:
        go_on.wait(30)
        done.append(number)

    with Screening(Screen(spec), spec, seed=0) as screening:
        begin(screening)
        screening.commit(partial(task, 0))
        screening.commit(partial(task, 1))
        assert not done
        threading.Timer(0.2, go_on.set).start()
        screening.commit(partial(task, 2))
        assert done, "two shards wait at most"
    assert done == [0, 1, 2]

    def fail() -> None:
        raise ConfigError("no", where="here", fix="none")

    with (
        pytest.raises(ConfigError, match="here: no"),
        Screening(Screen(spec), spec, seed=0) as screening,
    ):
        begin(screening)
        screening.commit(fail)


def test_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = {"backend": "vllm", "endpoints": ["http://a/v1"]}
    for cores, expected in ((1, 1), (2, 1), (4, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert count_processes(section(None, generator=remote)) == expected
        assert count_processes(section(None)) == 0, "the bundled decoder has the cores"
        assert count_processes(section(None, generator=remote, pii={"enabled": False})) == 0
        assert count_processes(section(7)) == 7


def processes_of(parent: int) -> list[int]:
    """Its children, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_leaves_no_process_and_goes_on_later(
    configure: Callable[..., RunConfig], server: TargetServer, tmp_path: Path, number: int
) -> None:
    few = {"backend": "vllm", "endpoints": [server.url], **QUICK, "concurrency": 4}
    config, goes_on = (
        configure("cut", 1, pii={"action": "redact"}, generator=few),
        threading.Event(),
    )

    def committed() -> bool:
        return any((tmp_path / "cut").rglob("*.entry.json"))

    def hold(ids: object, before: int) -> None:
        """However slowly it is seen that a shard is committed, the run does not end before."""
        if committed():
            goes_on.wait(120)

    (tmp_path / "run.json").write_text(config.model_dump_json())
    command = [sys.executable, "-m", "pipeline.cli", "synth", "-c", str(tmp_path / "run.json")]
    # A shell's background jobs ignore the signal, and so would everything that they start.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    server.fault = hold
    try:
        with subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heeding,
        ) as started:
            deadline = time.monotonic() + 120
            while not committed():
                assert started.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            children = processes_of(started.pid)
            assert children
            if number == signal.SIGINT:  # as a terminal sends it
                os.killpg(started.pid, number)
            else:
                os.kill(started.pid, number)
            _, said = started.communicate(timeout=30)
    finally:
        goes_on.set()
        server.fault = lambda ids, before: None
    if number != signal.SIGKILL:
        assert started.returncode == 130 and said.startswith("error: interrupted")
        assert len(said.splitlines()) == 1, said
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.05)
    if number == signal.SIGKILL:
        whole = run(configure("whole", 0, pii={"action": "redact"}))
        assert run(config).shards == whole.shards
