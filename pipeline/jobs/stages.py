"""What the jobs of every scheduler have in common: their stages, commands and configuration."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from pipeline.config import RunConfig, StageJobSection
from pipeline.errors import ConfigError
from pipeline.records import STAGES, Stage

#: Seconds beside train.grace_seconds from SIGTERM to SIGKILL: for the end of a shard, an upload.
_SURROUNDINGS_SECONDS = 120
#: Exit codes after which the same command goes on: try again, interrupted.
TRY_AGAIN, INTERRUPTED = 75, 130
#: Where the nodes of one training meet.
RENDEZVOUS_PORT = 29400


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """The stages that the configuration says enough of to be run."""
    asks = bool(config.eval.prompts or config.eval.sources)
    said = {"synth": config.synth is not None, "eval": asks}
    return tuple(stage for stage in STAGES if said.get(stage, True))


def grace_seconds(config: RunConfig) -> int:
    """Seconds that a job has between SIGTERM and SIGKILL."""
    return math.ceil(config.train.grace_seconds) + _SURROUNDINGS_SECONDS


def size_of(config: RunConfig, stage: Stage) -> StageJobSection:
    """What the job of `stage` gets."""
    size: StageJobSection = getattr(config.jobs, stage)
    return size


def prefix_of(config: RunConfig) -> str:
    """What all names begin with: jobs.name, or the last part of run.uri as a DNS label."""
    last = config.run.uri.rstrip("/").rpartition("/")[2].lower()
    label = re.sub(r"[^a-z0-9]+", "-", last)[:30].strip("-") or "eagle3"
    return config.jobs.name or (label if label[0].isalpha() else f"run-{label}")


def run_yaml(config: RunConfig, **run: Any) -> str:
    """The resolved configuration without what belongs to one machine; `run` replaces keys of run.

    Threads are counted on this machine, so they are left to each job's own command.
    """
    if config.run.shard or config.run.force:
        key = "shard" if config.run.shard else "force"
        fix = "leave it out: " + (
            "jobs.shards_by=index gives each worker its part"
            if config.run.shard
            else "a job that is started again would discard what it has made"
        )
        raise ConfigError("belongs to one process, not to jobs", where=f"run.{key}", fix=fix)
    values = config.model_dump(mode="json", exclude={"jobs": True, "run": {"threads"}})
    values["run"] |= run
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def stage_words(config: RunConfig, stage: Stage, file: str) -> list[str]:
    """`eagle3`'s arguments for a stage; `file` is the configuration where the job runs."""
    size = size_of(config, stage)
    processes = max(size.gpus, 1) if stage == "train" else 1
    return [stage, "-c", file, f"run.threads={max(size.cpus // processes, 1)}"]


def takes_parts(config: RunConfig, stage: Stage) -> bool:
    """Whether each worker of `stage` makes its own part, --shard i/n."""
    many = stage in ("synth", "features") and size_of(config, stage).workers > 1
    return many and config.jobs.shards_by == "index"


def needs_launcher(config: RunConfig, stage: Stage) -> bool:
    """Whether the stage is one group of several processes, which a launcher starts."""
    size = size_of(config, stage)
    return stage == "train" and (size.workers > 1 or size.gpus > 1)


def final_codes(config: RunConfig, stage: Stage | None) -> list[int]:
    """Exit codes other than 0 that another attempt would not mend; None: of all stages in one.

    Of several processes of one training those that lose the others crash with 1, so there 1 is no
    answer.
    """
    return [2] if stage and needs_launcher(config, stage) else [1, 2]


def launch_words(config: RunConfig, *, endpoint: str, identity: str) -> list[str]:
    """The launcher's arguments before the stage's own.

    `endpoint` is HOST:PORT of the first node, `identity` names the attempt.
    """
    size = config.jobs.train
    words = ["-m", "pipeline.jobs.launch", "--grace", str(grace_seconds(config))]
    words += ["--nproc-per-node", str(max(size.gpus, 1))]
    if size.workers == 1:
        words.append("--standalone")
    else:
        words += ["--nnodes", str(size.workers), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", endpoint, "--rdzv-id", identity]
    return [*words, "--module", "pipeline.cli"]
