"""Two attempts at one training, in processes of their own: together, and one that was stopped.

They are forked from one process that has imported everything, so that a signal meets the training
rather than the imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.store.gc import find_orphans
from pipeline.store.manifest import read_manifest
from pipeline.store.verify import verify_run
from tests.train.runs import Configure, Store, lines_of

PARENT = """
import contextlib, json, os, resource, signal, sys, time
from pathlib import Path

import torch
torch.set_num_threads(1)
import pipeline.exchange.inspect, pipeline.train.stage, pipeline.train.group
from pipeline import cli
pipeline.train.group._deepspeed()

folder, train = Path(sys.argv[1]), Path(sys.argv[1]) / "run" / "train"
codes = {}


def start(name, *command, room=None):
    child = os.fork()
    if child:
        return name, child
    for number in (1, 2):
        os.dup2(os.open(folder / f"{name}.{number}", os.O_WRONLY | os.O_CREAT), number)
    code = 1
    with contextlib.suppress(BaseException):
        try:
            if room is not None:
                used = int(Path("/proc/self/statm").read_text().split()[0]) << 12
                resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
            code = cli.main(command)
        except BaseException:
            import traceback
            traceback.print_exc()
            raise
        sys.stdout.flush()
    os._exit(code)


def attempt(name, **options):
    return start(name, "train", "-c", str(folder / "run.yaml"), **options)


def until(condition, *attempts):
    while not condition():
        assert not any(os.waitpid(pid, os.WNOHANG)[0] for _, pid in attempts), "ended too early"
        time.sleep(0.005)


def end(*attempts):
    for name, pid in attempts:
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def steps():
    metrics = train / "metrics.jsonl"
    return metrics.read_bytes().count(b"\\n") if metrics.exists() else 0


def markers():
    return len(list((train / "checkpoints").glob("step-*.json")))
"""

TOGETHER = """
first = attempt("first")
until(lambda: markers() > 0, first)
other = attempt("other")
end(first, other)
print(json.dumps(codes))
"""

STOPPED = """
stopped = attempt("stopped")
until(lambda: markers() > 0 and steps() > 4, stopped)
os.kill(stopped[1], signal.SIGSTOP)
half = train / "checkpoints" / ("step-000001-" + "0" * 16)  # that a checkpoint is being written to
half.mkdir()
(half / "weights.safetensors").write_bytes(b"half")
live = attempt("live")
printed = folder / "live.1"
until(lambda: printed.exists() and "continuing from" in printed.read_text(), live)
os.kill(stopped[1], signal.SIGCONT)
end(live, stopped)
print(json.dumps(codes))
"""

MEMORY = """
for room in (0, 1 << 20, 8 << 20, 24 << 20):
    end(attempt(f"train {room}", room=room))
end(start("inspect", "inspect", str(folder), room=0))
print(json.dumps(codes))
"""


def attempts(
    config: Any, scene: str, folder: Path, *, claim_seconds: float = 60
) -> tuple[dict[str, int], dict[str, str]]:
    """Exit codes of the processes of a scene, and what they printed, errors last."""
    tree = config.model_dump(mode="json", exclude_none=True)
    tree["run"]["claim_seconds"] = claim_seconds
    (folder / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-c", PARENT + scene, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    codes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    said = {
        name: "".join((folder / f"{name}.{number}").read_text() for number in (1, 2))
        for name in codes
    }
    return codes, said


@pytest.mark.slow
def test_a_second_attempt_waits_and_ends_with_the_first(
    tiny_config: Configure, store_states: Store, tmp_path: Path
) -> None:
    config = tiny_config(max_steps=24, epochs=8, checkpoint_every=2)
    store_states(config)
    codes, said = attempts(config, TOGETHER, tmp_path)
    assert codes == {"first": 0, "other": 0}, said
    assert "waiting for another process" in said["other"] and "complete: head" in said["other"]
    assert "steps of" in said["first"] and "steps of" not in said["other"]
    assert [line["step"] for line in lines_of(config)] == list(range(1, 25))


@pytest.mark.slow
def test_an_attempt_that_was_stopped_writes_nothing_into_the_one_that_took_over(
    tiny_config: Configure, store_states: Store, tmp_path: Path
) -> None:
    config = tiny_config(max_steps=60, epochs=20, checkpoint_every=2)
    store_states(config)
    codes, said = attempts(config, STOPPED, tmp_path, claim_seconds=2)
    assert codes["live"] == 0 and codes["stopped"] in (0, 75), said
    assert "another process has taken its work over" in said["stopped"]
    assert "head at" in said["live"]
    assert [line["step"] for line in lines_of(config)] == list(range(1, 61))
    read_manifest(config.run.uri, "train")
    half = tmp_path / "run/train/checkpoints" / f"step-000001-{'0' * 16}/weights.safetensors"
    assert half.read_bytes() == b"half", "nobody deletes another attempt's unmarked folder"
    assert str(half) in {orphan.where for orphan in find_orphans(config.run.uri)}
    assert verify_run(config.run.uri).problems == ()


@pytest.mark.slow
def test_memory_that_runs_out_as_a_stage_starts_is_tried_again(
    tiny_config: Configure, store_states: Store, tmp_path: Path
) -> None:
    config = tiny_config(max_steps=2)
    store_states(config)
    codes, said = attempts(config, MEMORY, tmp_path)
    del codes["inspect"]  # which may do without more memory, and finds no head there
    assert set(codes.values()) <= {0, 75} and codes["train 0"] == 75, said
    assert "Traceback" not in "".join(said.values())
    for name, code in codes.items():
        assert code == 0 or "out of memory" in said[name].splitlines()[-1], said
