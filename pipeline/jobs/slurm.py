"""Slurm scripts: a batch script a stage, and submit.sh, which chains them.

    run.yaml          the resolved configuration
    synth.sbatch …    an array of `workers` tasks; for train one job of `workers` nodes
    submit.sh         submits all; each waits for the one before to end with 0

A job that is to try again, was interrupted or crashed puts itself back into the queue, where Slurm
keeps it two minutes; its dependants wait.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from pipeline.config import RunConfig
from pipeline.jobs.scripts import write_script
from pipeline.jobs.stages import (
    INTERRUPTED,
    TRY_AGAIN,
    final_codes,
    grace_seconds,
    launch_words,
    needs_launcher,
    prefix_of,
    run_yaml,
    size_of,
    stage_words,
    stages_of,
    takes_parts,
)
from pipeline.records import Stage

#: Words that the shell fills in on the node → how the script says them.
_CONFIG, _ENDPOINT, _ATTEMPT, _PART = "<config>", "<endpoint>", "<attempt>", "<part>"
_KILLED_BY_SIGTERM = 143


def files(config: RunConfig) -> dict[str, str]:
    """File name → text. Raises ConfigError."""
    stages = stages_of(config)
    scripts = {f"{stage}.sbatch": _batch_script(config, stage) for stage in stages}
    submit = write_script("submit.sh.j2", stages=stages)
    return {"run.yaml": run_yaml(config), **scripts, "submit.sh": submit}


def _batch_script(config: RunConfig, stage: Stage) -> str:
    size, name = size_of(config, stage), f"{prefix_of(config)}-{stage}"
    array = size.workers if stage != "train" and size.workers > 1 else None
    options: dict[str, object] = {
        "job-name": name,
        "output": f"%x-{'%A-%a' if array else '%j'}.log",
        "open-mode": "append",
        "array": f"0-{array - 1}" if array else None,
        "nodes": size.workers if stage == "train" else 1,
        "ntasks-per-node": 1,
        "cpus-per-task": size.cpus,
        "mem": f"{size.memory_gib}G",
        "gpus-per-node": size.gpus or None,
        "time": math.ceil(size.hours * 60),
        "signal": f"TERM@{grace_seconds(config)}",
        "partition": config.jobs.partition,
        "account": config.jobs.account,
    }
    return write_script(
        "stage.sbatch.j2",
        stage=stage,
        options={key: value for key, value in options.items() if value is not None},
        command=_command(config, stage),
        nodes=options["nodes"],
        cpus=size.cpus,
        array=array,
        final=(0, *final_codes(config, stage)),
        repeat=(TRY_AGAIN, INTERRUPTED, _KILLED_BY_SIGTERM),
        attempts=config.jobs.attempts,
    )


def _command(config: RunConfig, stage: Stage) -> str:
    """The stage's command line for a shell."""
    words = stage_words(config, stage, _CONFIG)
    if takes_parts(config, stage):
        words += ["--shard", _PART]
    if needs_launcher(config, stage):
        launch = launch_words(config, endpoint=_ENDPOINT, identity=_ATTEMPT)
        words = ["python", *launch, *words]
    else:
        words = ["eagle3", *words]
    filled_in = {
        _CONFIG: '"$1"',
        # Jobs on the same node differ in their last digits.
        _ENDPOINT: '"$first:$((20000 + SLURM_JOB_ID % 10000))"',
        _ATTEMPT: '"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        # Not $SLURM_ARRAY_TASK_COUNT: that is less where single tasks are submitted again.
        _PART: f'"$SLURM_ARRAY_TASK_ID/{size_of(config, stage).workers}"',
    }
    return _shell_words(words, filled_in)


def _shell_words(words: Sequence[str], filled_in: Mapping[str, str]) -> str:
    return " ".join(filled_in.get(word) or shlex.quote(word) for word in words)
