"""Several processes at one stage, some of them killed: one of them commits each shard, for good.

Their bytes differ on purpose, as those of a generator do that nobody can repeat.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.store.gc import find_orphans, remove
from pipeline.store.location import Location
from pipeline.store.manifest import read_manifest
from pipeline.store.shards import read_entries
from pipeline.store.verify import verify_run

WRITERS = """
import os, random, signal, sys, time
from pipeline.store.location import Location
from pipeline.store.stage_run import open_stage
from tests.store.conftest import CONTRACT, make_config

uri, writers, kills, slow = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
enough, results, late_kills = sys.argv[5], sys.argv[6], 3
if uri.startswith("gs://"):
    Location("memory://warm").names()  # the event loop of a remote store does not survive a fork


def run():
    stage_run = open_stage(make_config(uri), "synth", None)
    if stage_run.manifest is None:
        names = [f"{index:05d}.bin" for index in range(12)]
        for index, name in enumerate(names):
            if name not in stage_run.committed:
                while name == names[-1] and not os.path.exists(enough):
                    time.sleep(0.001)  # the stage is not finished before so many were killed
                data = os.urandom(20_000 + index)
                stage_run.commit(name, data, rows=1, tokens=index, rejected={"too_short": 1})
        list(stage_run.collect(names))
        stage_run.finish(contract=CONTRACT, licenses={}, sources={}, details={})
    with open(results, "a") as file:  # what this process takes the stage to be
        file.write(stage_run.manifest.content_hash + chr(10))


def start():
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


draw, killed = random.Random(5), 0
children = {start() for _ in range(writers)}
while children:
    if killed == kills:
        open(enough, "w").close()
    if killed < kills + late_kills:
        time.sleep(draw.uniform(0, slow))
        victim = draw.choice(sorted(children))
        os.kill(victim, signal.SIGKILL)
    child, status = os.wait()
    children.remove(child)
    if os.WIFSIGNALED(status):
        killed += 1
        if killed < kills + late_kills:
            children.add(start())
    else:
        assert status == 0, status
run()
print(killed)
"""


@pytest.mark.parametrize("writers", [2, 4, 8])
@pytest.mark.parametrize("kind", ["local", "gs"])
def test_of_many_writers_one_commits_each_shard(
    kind: str, writers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    uri = str(tmp_path / "run")
    if kind == "gs":
        uri = f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    slow = {"local": 0.02, "gs": 0.2}[kind]
    numbers = [str(writers), "10", str(slow)]
    files = [str(tmp_path / "enough"), str(tmp_path / "results")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITERS, uri, *numbers, *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10
    manifest, check = read_manifest(uri, "synth"), verify_run(uri)
    results = (tmp_path / "results").read_text().split()
    assert len(results) > 1 and set(results) == {manifest.content_hash}, "the first one is final"
    assert [shard.bytes for shard in manifest.shards] == [20_000 + index for index in range(12)]
    assert check.problems == () and check.finished == ("synth",)
    remove([orphan for orphan in find_orphans(uri)])
    kept = {shard.path for shard in manifest.shards}
    entries = {f"{shard.name}.entry.json" for shard in manifest.shards}
    folder = Location(f"{uri}/synth/shards")
    assert set(folder.names()) == kept | entries
    # An entry that a late writer had replaced would name another file than the manifest.
    recorded = read_entries(folder, [shard.name for shard in manifest.shards])
    assert [entry.shard for entry in recorded] == list(manifest.shards)
    assert verify_run(uri).problems == ()
