"""kill -9 at fifty random instants of write and commit; the next run ends with the same bytes.

One warmed interpreter forks a process for each attempt, so that an attempt costs no imports.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.store.gc import find_orphans, remove
from pipeline.store.manifest import find_manifest, read_manifest, stage_location
from pipeline.store.shards import committed, read_committed
from pipeline.store.verify import verify_run
from tests.shard_files import stored_path

KILLS = 50

FORKING = """
import os, sys
from pipeline.store.stage_run import open_stage
from tests.store.conftest import CONTRACT, make_config

def run(uri):
    stage_run = open_stage(make_config(uri), "synth", None)
    if stage_run.manifest is None:
        names = [f"{index:05d}.bin" for index in range(24)]
        for index, name in reversed(list(enumerate(names))):  # not in the order of their names
            if name not in stage_run.committed:
                data, rejected = bytes([index]) * 20_000, {"too_short": 1}
                stage_run.commit(name, data, rows=1, tokens=index, rejected=rejected)
        list(stage_run.collect(names))
        stage_run.finish(contract=CONTRACT, licenses={}, sources={}, details={})

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(line.strip())
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forking:
    """Runs the stage in a fresh process, and kills it after a while."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, uri: Path, *, killed_after: float | None = None) -> bool:
        """Whether the process ended by itself."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{uri}\n")
        self._process.stdin.flush()
        child = int(self._process.stdout.readline())
        if killed_after is not None:
            time.sleep(killed_after)
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(child, signal.SIGKILL)
        return int(self._process.stdout.readline()) == 0

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def forking() -> Iterator[Forking]:
    forking = Forking()
    yield forking
    forking.close()


def test_fifty_kills_and_the_same_bytes(tmp_path: Path, forking: Forking) -> None:
    forking.run(tmp_path / "warm-up")
    began = time.monotonic()
    assert forking.run(tmp_path / "whole")
    duration = time.monotonic() - began
    first = tmp_path / "whole"
    expected = read_manifest(str(first), "synth")

    draw, kills, runs = random.Random(20), 0, 0
    while kills < KILLS:
        uri, done = tmp_path / f"killed{runs}", False
        while not done and kills < KILLS:
            done = forking.run(uri, killed_after=draw.uniform(0, duration / 4))
            kills += not done
            manifest = find_manifest(str(uri), "synth")
            assert manifest is None or manifest.shards == expected.shards, "a manifest is whole"
            # Raises for an entry whose file is not what it says.
            location = stage_location(str(uri), "synth")
            list(read_committed(location, sorted(committed(location.child("shards").names()))))
        runs += 1

    for uri in sorted(tmp_path.glob("killed*")):
        assert forking.run(uri)
        manifest = read_manifest(str(uri), "synth")
        assert manifest.shards == expected.shards
        assert manifest.content_hash == expected.content_hash
        remove(find_orphans(str(uri)))
        assert len(list((uri / "synth/shards").iterdir())) == 2 * len(expected.shards)
        for shard in expected.shards:
            whole, again = (stored_path(run / "synth/shards", shard.name) for run in (first, uri))
            assert again.read_bytes() == whole.read_bytes()
        assert verify_run(str(uri)).problems == ()
