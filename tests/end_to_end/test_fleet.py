"""Many processes on synth and features of one run, started together, ten of them killed.

What comes out is what one undisturbed process makes. A warmed interpreter forks the processes, so
that none costs imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.features.stage import run as run_features
from pipeline.records import Stage
from pipeline.store.gc import find_orphans, remove
from pipeline.store.location import Location
from pipeline.store.manifest import read_manifest
from pipeline.store.verify import verify_run
from pipeline.synth.stage import run as run_synth

KILLS = 10
#: A process is killed at one of its first accesses to the store, this many at most.
ACCESSES = 40

FLEET = """
import json, os, random, signal, sys, threading
import torch, torch._dynamo, transformers.models.llama.modeling_llama
import pipeline.features.writer, pipeline.synth.generate.local, pipeline.synth.stage
from pipeline.config import load
from pipeline.errors import Eagle3Error
from pipeline.features.stage import run as run_features
from pipeline.store.location import Location
from pipeline.synth.stage import run as run_synth

torch.set_num_threads(1)
file, uri, workers, kills, accesses, parts = sys.argv[1:]
workers, kills, accesses, parts = int(workers), int(kills), int(accesses), parts == "parts"
RUNS = {"synth": run_synth, "features": run_features}
if uri.startswith("gs://"):
    import gcsfs


def kill_at(access, seconds):
    # This process, a moment after it turns to the store for the n-th time.
    attempt = Location._attempt

    def counted(*arguments, **options):
        nonlocal access
        access -= 1
        if access == 0:
            death = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
            death.daemon = True  # else a process that is done would wait for it
            death.start()
        return attempt(*arguments, **options)

    Location._attempt = counted


def start(stage, index, doom):
    child = os.fork()
    if child:
        return child
    code = 1
    if doom:
        kill_at(*doom)
    try:
        options = {"shard": f"{index}/{workers}"} if parts else {}
        RUNS[stage](load(file, [f"run.uri={uri}", "run.claim_seconds=5"], **options))
        code = 0
    except Eagle3Error as error:
        code = error.exit_code
        print(error, file=sys.stderr)
    except BaseException:
        import traceback
        traceback.print_exc()
    if doom:  # it was quicker than the moment
        print("late", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def work(stage, draw):
    codes, killed = [], 0
    # Counted in accesses, not in seconds: a quick machine would be done before it is killed.
    moments = [(draw.randint(1, accesses), draw.uniform(0, 0.05)) for _ in range(kills)]
    doomed = iter(moments)
    children = {start(stage, index, next(doomed, None)): index for index in range(workers)}
    while children:
        child, status = os.wait()
        index = children.pop(child)
        if os.WIFSIGNALED(status):
            killed += 1
            children[start(stage, index, next(doomed, None))] = index
        else:
            codes.append(os.waitstatus_to_exitcode(status))
    return {"killed": killed, "codes": codes}


print(json.dumps({stage: work(stage, random.Random(3)) for stage in RUNS}))
"""


def run_fleet(file: Path, uri: str, workers: int, how: str) -> dict[str, dict]:  # type: ignore[type-arg]
    command = [sys.executable, "-W", "ignore", "-c", FLEET, str(file), uri, str(workers)]
    done = subprocess.run(
        [*command, str(KILLS // 2), str(ACCESSES), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, dict] = json.loads(done.stdout.splitlines()[-1])  # type: ignore[type-arg]
    assert sum(stage["killed"] for stage in outcome.values()) == KILLS, outcome
    assert done.stderr.splitlines().count("late") < KILLS, "some are killed at work"
    print(done.stderr)  # shown when the test fails
    return outcome


@pytest.mark.parametrize(
    ("how", "kind", "workers"), [("claims", "local", 8), ("claims", "gs", 4), ("parts", "gs", 2)]
)
def test_killed_processes_leave_what_one_undisturbed_process_makes(
    how: str,
    kind: str,
    workers: int,
    write_config: Callable[..., Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    file = write_config("alone", synth={"shard_prompts": 2}, features={"shard_tokens": 60})
    alone = load(file)
    expected = {"synth": run_synth(alone), "features": run_features(alone)}
    uri = str(tmp_path / "fleet")
    if kind == "gs":
        uri = f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    outcome = run_fleet(file, uri, workers, how)
    stages: tuple[Stage, ...] = ("synth", "features")
    for stage in stages:
        codes = outcome[stage]["codes"]
        # With i/n whoever finds parts missing says so; whoever is last finds none.
        assert set(codes) <= ({0} if how == "claims" else {0, 75}) and 0 in codes, codes
        manifest = read_manifest(uri, stage)
        assert manifest.shards == expected[stage].shards
        assert manifest.content_hash == expected[stage].content_hash
    assert verify_run(uri).problems == ()
    remove(find_orphans(uri))
    for stage in stages:
        names = Location(f"{uri}/{stage}/shards").names()
        assert len(names) == 2 * len(expected[stage].shards), "each file has its entry"
    assert verify_run(uri).problems == ()
