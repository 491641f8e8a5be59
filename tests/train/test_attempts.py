"""Two attempts at one training, in processes of their own: together, and one that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.store.gc import find_orphans
from pipeline.store.manifest import read_manifest
from pipeline.store.verify import verify_run
from tests.scenes import play
from tests.train.runs import Configure, Store, lines_of

STEPS = """
def attempt(name, **options):
    return stage(name, "train", **options)


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
"""

STOPPED = """
silent = attempt("stopped")
until(lambda: markers() > 0 and steps() > 4, silent)
os.kill(silent[1], signal.SIGSTOP)
half = train / "checkpoints" / ("step-000001-" + "0" * 16)  # that a checkpoint is being written to
half.mkdir()
(half / "weights.safetensors").write_bytes(b"half")
live = attempt("live")
printed = folder / "live.1"
until(lambda: printed.exists() and "continuing from" in printed.read_text(), live)
go_on(silent)
end(live, silent)
"""

MEMORY = """
for room in (1 << 20, 8 << 20, 24 << 20):
    end(attempt(f"train {room}", room=room))
end(start("inspect", "inspect", str(folder), room=1 << 20))
"""


def attempts(
    config: Any, scene: str, folder: Path, *, claim_seconds: float = 60
) -> tuple[dict[str, int], dict[str, str]]:
    """Exit codes of the processes of a scene, and what they printed, errors last."""
    tree = config.model_dump(mode="json", exclude_none=True)
    tree["run"]["claim_seconds"] = claim_seconds
    (folder / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return play(STEPS + scene, folder)


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
    assert set(codes.values()) <= {0, 75} and 75 in codes.values(), said
    assert "Traceback" not in "".join(said.values())
    for name, code in codes.items():
        assert code == 0 or "out of memory" in said[name].splitlines()[-1], said
