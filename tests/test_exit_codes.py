"""What a scheduler sees of a stage: exit codes, SIGTERM, a standard output that nobody reads.

The commands run in children forked from one process that has imported everything, so that each
costs a second and a signal meets the stage rather than the imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from pipeline import errors
from pipeline.errors import TooLargeForMemory, is_out_of_memory, memory_explained
from pipeline.records import Manifest
from pipeline.store.manifest import find_manifest, read_manifest
from tests.conftest import QUESTIONS
from tests.synth.conftest import tree

STAGES = ("synth", "features")
PROMPTS = 9

PARENT = """
import contextlib, json, os, signal, sys, time
from pathlib import Path

import torch
torch.set_num_threads(1)
from pipeline import cli
from pipeline.config import load
from pipeline.features.capture import load_matching_target
from pipeline.target.parallel import Group
from pipeline.synth.stage import SynthPipeline
import pandas, pyarrow.parquet

folder = Path(sys.argv[1])
config = load(folder / "run.yaml", [])
load_matching_target(config, SynthPipeline(config, Group()).contract)  # all libraries, once


def start(stage, run, *options, output=os.devnull, log="text"):
    child = os.fork()
    if child:
        return child
    os.environ["EAGLE3_LOG"] = log
    if isinstance(output, str):
        output = os.open(output, os.O_WRONLY)
    errors = os.open(folder / f"{run}-{stage}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    command = [stage, "-c", str(folder / "run.yaml"), f"run.uri={folder / run}", *options]
    code = 1
    with contextlib.suppress(BaseException):
        try:
            code = cli.main(command)
        except BaseException:
            import traceback
            traceback.print_exc()
            raise
        sys.stdout.flush()
    os._exit(code)


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def terminated(stage, run):
    child = start(stage, run)
    shards = folder / run / stage / "shards"
    while not (entries := list(shards.glob("*.entry.json"))):
        time.sleep(0.002)
    os.kill(child, signal.SIGTERM)
    said = folder / f"{run}-{stage}.err"
    return ended(child), len(list(shards.glob("*.entry.json"))), said.read_text()


def unread(stage, run, log):
    read, write = os.pipe()
    os.close(read)
    code = ended(start(stage, run, output=write, log=log))
    os.close(write)
    return code


codes = {}
metrics = f"run.metrics_dir={folder / 'metrics'}"
for stage in ("synth", "features"):
    codes[f"{stage} whole"] = ended(start(stage, "whole", metrics))
    codes[f"{stage} terminated"], committed, said = terminated(stage, "cut")
    codes[f"{stage} committed"], codes[f"{stage} said"] = committed, said
    if stage == "synth":
        codes["features of unfinished synth"] = ended(start("features", "cut"))
    codes[f"{stage} again"] = ended(start(stage, "cut"))
    codes[f"{stage} unread"] = unread(stage, "unread", "text" if stage == "synth" else "json")
codes["features of no synth"] = ended(start("features", "nothing"))
codes["synth of nothing"] = ended(start("synth", "empty", "synth.min_new_tokens=4096"))
codes["synth full"] = ended(start("synth", "full", output="/dev/full"))
print(json.dumps(codes))
"""


class Fleet(NamedTuple):
    """What became of the commands."""

    folder: Path
    codes: dict[str, Any]

    def manifest(self, run: str, stage: Any) -> Manifest:
        return read_manifest(str(self.folder / run), stage)

    def error(self, run: str, stage: str) -> str:
        """The single line that a command left on standard error."""
        [line] = (self.folder / f"{run}-{stage}.err").read_text(encoding="utf-8").splitlines()
        return line


@pytest.fixture(scope="module")
def fleet(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    folder = tmp_path_factory.mktemp("fleet")
    prompts = folder / "prompts.jsonl"
    records = [{"turns": [question], "license": "MIT"} for question in QUESTIONS[:PROMPTS]]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    values = tree(tiny_target, prompts, folder / "run", shard_prompts=1, batch_size=1)
    values["synth"]["min_new_tokens"] = 12
    values["features"] = {"batch_tokens": 64, "shard_tokens": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-c", PARENT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return Fleet(folder, json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_sigterm_ends_a_stage_like_ctrl_c_and_costs_nothing(fleet: Fleet, stage: str) -> None:
    whole, codes = fleet.manifest("whole", stage), fleet.codes
    assert codes[f"{stage} whole"] == 0 and codes[f"{stage} terminated"] == 130
    assert 0 < codes[f"{stage} committed"] < len(whole.shards), "in the middle of the work"
    said = codes[f"{stage} said"]
    assert said.startswith("error: interrupted (fix: ") and said.count("\n") == 1, "no traceback"
    assert codes[f"{stage} again"] == 0
    assert fleet.manifest("cut", stage).content_hash == whole.content_hash


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "stage"), [("unread", "synth"), ("unread", "features"), ("full", "synth")]
)
def test_a_standard_output_that_takes_nothing_stops_nothing(
    fleet: Fleet, run: str, stage: str
) -> None:
    """Its reader has gone, once with notices as text and once as JSON; or the disk is full."""
    assert fleet.codes[f"{stage} {run}"] == 0
    assert fleet.manifest(run, stage).content_hash == fleet.manifest("whole", stage).content_hash
    assert (fleet.folder / f"{run}-{stage}.err").read_text(encoding="utf-8") == ""


@pytest.mark.slow
def test_a_parent_that_has_been_begun_may_be_finished_later(fleet: Fleet) -> None:
    assert fleet.codes["features of unfinished synth"] == 75
    assert fleet.codes["features of no synth"] == 2
    line = fleet.error("nothing", "features")
    assert "stage synth is not finished (fix: run `eagle3 synth` first" in line


@pytest.mark.slow
def test_filters_that_reject_everything_finish_nothing(fleet: Fleet) -> None:
    assert fleet.codes["synth of nothing"] == 2
    line = fleet.error("empty", "synth")
    assert "none of 9 prompts became a sample (too_short 9) (fix: " in line
    assert find_manifest(str(fleet.folder / "empty"), "synth") is None


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_metrics_of_a_stage_are_those_of_its_manifest(fleet: Fleet, stage: str) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    [file] = (fleet.folder / "metrics").glob(f"eagle3-{stage}-*.prom")
    text, manifest = file.read_text(encoding="utf-8"), fleet.manifest("whole", stage)
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    assert {(each.labels["stage"], each.labels["run"]) for each in samples} == {(stage, "whole")}
    worker = samples[0].labels["worker"]
    assert file.name == f"eagle3-{stage}-{worker}.prom"
    values = {each.name: each.value for each in samples}
    assert values["eagle3_shards_total"] == len(manifest.shards)
    assert values["eagle3_records_total"] == manifest.rows
    assert values["eagle3_tokens_total"] == manifest.tokens
    assert values["eagle3_written_bytes_total"] == sum(shard.bytes for shard in manifest.shards)
    assert values["eagle3_progress_done"] == values["eagle3_progress_total"]
    assert values["eagle3_running"] == 0 and values["eagle3_tokens_per_second"] > 0
    rejected = {
        each.labels["reason"]: each.value
        for each in samples
        if each.name == "eagle3_rejected_total"
    }
    assert rejected == manifest.rejected and (stage != "synth" or rejected)
    assert not any(question in text for question in QUESTIONS), "nobody's prompts"


def test_which_errors_pass() -> None:
    """EX_TEMPFAIL for what the same command may find mended, 2 for what a person has to mend."""
    codes = {
        kind.__name__: kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.Eagle3Error)
    }
    assert {name for name, code in codes.items() if code == 75} == {
        "EndpointsUnavailable",
        "LostProcess",
        "OutOfMemory",
        "StageIncomplete",
        "StoreUnavailable",
        "TakenOver",
        "UnfinishedStage",
        "WorkersDied",
    }
    assert set(codes.values()) == {1, 2, 75} and codes["NotLossless"] == 1


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(1 << 50, dtype=torch.uint8), lambda: bytearray(1 << 60)]
)
def test_memory_that_runs_out_where_nothing_is_halved_needs_a_person(allocate: Any) -> None:
    """A smaller train.batch_tokens gives another head."""
    expected = r"train\.batch_tokens: out of memory"
    with (
        pytest.raises(TooLargeForMemory, match=expected) as caught,
        memory_explained("train"),
    ):
        allocate()
    assert caught.value.exit_code == 2 and caught.value.__cause__ is not None
    assert is_out_of_memory(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="shapes"), memory_explained("train"):
        raise RuntimeError("shapes cannot be multiplied")
