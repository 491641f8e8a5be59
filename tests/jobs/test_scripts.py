"""The rendered shell scripts: without faults that shellcheck knows, and doing what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.jobs import render, write
from pipeline.records import STAGES
from tests.jobs.conftest import Configure

WORKERS = {"synth": {"workers": 4}, "train": {"workers": 2, "gpus": 8}}
LARGE = {"image": "x", "stages": WORKERS}


def program(folder: Path, name: str, text: str) -> dict[str, str]:
    """Put a program in front of PATH; returns the environment."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
@pytest.mark.parametrize("jobs", [{"image": "x"}, LARGE])
def test_scripts_have_no_known_faults(
    configure: Configure, tmp_path: Path, scheduler: str, jobs: dict[str, object]
) -> None:
    start = write(render(configure(jobs=jobs), scheduler), tmp_path)
    scripts = [*tmp_path.glob("*.sh"), *tmp_path.glob("*.sbatch")]
    assert start in scripts and os.access(start, os.X_OK)
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shellcheck_catches_a_fault(tmp_path: Path) -> None:
    script = tmp_path / "x.sh"
    script.write_text("#!/bin/bash\nrm $1\n")
    checker = Path(sys.executable).with_name("shellcheck")
    assert subprocess.run([checker, script], capture_output=True).returncode == 1


KUBECTL = """\
#!/bin/bash
# Stands in for the cluster: notes the calls, and answers what the file `conditions` says.
echo "$*" >> "$NOTED/calls"
case " $* " in
  *" get job "*) cat "$NOTED/conditions" ;;
esac
"""


def _apply(configure: Configure, tmp_path: Path, conditions: str) -> tuple[int, list[str]]:
    start = write(render(configure(jobs=LARGE), "kubernetes"), tmp_path / "out")
    environment = program(tmp_path, "kubectl", KUBECTL) | {"NOTED": str(tmp_path)}
    (tmp_path / "conditions").write_text(conditions)
    command = [str(start), "--namespace", "ml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(call.startswith("--namespace ml ") for call in calls)
    return done.returncode, [call.split()[-1] for call in calls if " apply " in call]


def test_apply_goes_through_the_stages_in_order(configure: Configure, tmp_path: Path) -> None:
    code, applied = _apply(configure, tmp_path, "SuccessCriteriaMet Complete")
    assert code == 0
    assert applied == [f"{stage}.yaml" for stage in STAGES]


def test_apply_stops_at_a_stage_that_failed(configure: Configure, tmp_path: Path) -> None:
    code, applied = _apply(configure, tmp_path, "FailureTarget Failed")
    assert code == 2
    assert applied == ["synth.yaml"]


def test_jobs_leave_training_its_grace(configure: Configure) -> None:
    config = configure(jobs=LARGE, train={"grace_seconds": 200})
    script = render(config, "slurm")["train.sbatch"]
    assert "#SBATCH --signal=TERM@320" in script and "pipeline.jobs.launch --grace 320" in script
    pods = yaml.safe_load_all(render(config, "kubernetes")["train.yaml"])
    [pod] = [each["spec"]["template"]["spec"] for each in pods if each["kind"] == "Job"]
    assert pod["terminationGracePeriodSeconds"] == 320


def test_slurm_scripts_ask_for_what_the_configuration_says(configure: Configure) -> None:
    workers = {**WORKERS, "features": {"gpus": 0, "hours": 0.5}}
    files = render(configure(jobs={"stages": workers}), "slurm")
    assert list(files) == ["run.yaml", *(f"{stage}.sbatch" for stage in STAGES), "submit.sh"]
    options = {
        stage: {
            line.removeprefix("#SBATCH --")
            for line in files[f"{stage}.sbatch"].splitlines()
            if line.startswith("#SBATCH")
        }
        for stage in STAGES
    }
    assert {"array=0-3", "requeue", "signal=TERM@150"} <= options["synth"]
    assert {"nodes=2", "gpus-per-node=8"} <= options["train"]
    assert "time=30" in options["features"]
    assert not any(option.startswith(("gpus", "array")) for option in options["features"])


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_a_training_that_follows_features_starts_with_it(
    configure: Configure, tmp_path: Path, scheduler: str
) -> None:
    """Else each would wait for the other for ever."""
    follows = {"features": {"keep_shards": 8}, "train": {"follow": True}}
    start = write(render(configure(jobs=LARGE, **follows), scheduler), tmp_path)
    log, name = tmp_path / "log", "sbatch" if scheduler == "slurm" else "kubectl"
    answer = "echo 7" if scheduler == "slurm" else '[ "$1" = apply ] || echo Complete'
    environment = program(tmp_path, name, f'#!/bin/bash\necho "$@" >> {log}\n{answer}\n')
    subprocess.run([start], env=environment, check=True, timeout=60)
    calls = [line.split() for line in log.read_text().splitlines()]
    if scheduler == "slurm":
        after = [" ".join(call[1:-2]).partition(" ")[0] for call in calls]
        both = "--dependency=afterok:7"
        assert after == ["", both, both, "--dependency=afterok:7:7"]
    else:
        order = [call[2] if call[0] == "apply" else "?" for call in calls]
        at = order.index("features.yaml")
        assert order[at : at + 2] == ["features.yaml", "train.yaml"]
        assert order[-2:] == ["eval.yaml", "?"]
