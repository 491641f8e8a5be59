"""What a cluster needs to run the stages: `render` fills templates from the configuration.

job.yaml.j2      Kubernetes: a ConfigMap with run.yaml, an Indexed Job, for training on several
                 nodes a Service
apply.sh.j2      applies one Job after the other
stage.sbatch.j2  Slurm: an array of workers, for training a job of several nodes
submit.sh.j2     submits them as a chain
launch.py        starts a worker's processes on one node, and ends with their exit code

What the files leave out (node selectors, partitions, a namespace) is edited into them, or passed to
`apply.sh` and `sbatch`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from pipeline.config import RunConfig
from pipeline.documents import local_path
from pipeline.errors import ConfigError
from pipeline.records import STAGES, Stage, digest

__all__ = ["USER", "render", "write"]

#: The image's user, as in Dockerfile.
USER = 10001
#: The Secret whose keys, where it exists, become environment variables of every pod.
SECRET = "eagle3"
_RUN_YAML = "/etc/eagle3/run.yaml"
#: Seconds beside train.grace_seconds from SIGTERM to SIGKILL: for the end of a shard, an upload.
_EXTRA_GRACE = 120
#: Further attempts of a pod or Slurm job that crashed.
_ATTEMPTS = 20
#: Exit codes after which the same command continues: try again, stopped by a signal.
TRY_AGAIN, INTERRUPTED, _KILLED_BY_SIGTERM = 75, 130, 143
_RENDEZVOUS_PORT = 29400


def render(config: RunConfig, scheduler: str) -> dict[str, str]:
    """File name → text; the last is the script that starts everything. Raises ConfigError."""
    stages = _stages(config)
    return (_kubernetes if scheduler == "kubernetes" else _slurm)(config, stages)


def write(files: Mapping[str, str], directory: str | os.PathLike[str]) -> Path:
    """Write `files` over those of an earlier call; returns the last. Raises ConfigError."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError(problem, where=str(folder), fix="pass another --out") from None
    return folder / list(files)[-1]


def _kubernetes(config: RunConfig, stages: tuple[Stage, ...]) -> dict[str, str]:
    jobs, text = config.jobs, _run_yaml(config, cache_dir=None)
    if jobs.image is None:
        fix = "jobs.image=REGISTRY/NAME:TAG, built from Dockerfile"
        raise ConfigError("required for Kubernetes, but not set", where="jobs.image", fix=fix)
    prefix, files = _prefix(config), {}
    for stage in stages:
        size, name = config.jobs.of(stage), f"{prefix}-{stage}"
        words, command = _stage_words(config, stage, _RUN_YAML), ["eagle3"]
        if _needs_launcher(config, stage):
            endpoint = f"{name}-0.{name}:{_RENDEZVOUS_PORT}"
            command = ["python", *_launch_words(config, stage, endpoint=endpoint, identity=name)]
        files[f"{stage}.yaml"] = _fill(
            "job.yaml.j2",
            name=name,
            prefix=prefix,
            stage=stage,
            settings=f"{prefix}-{digest(text)[:8]}",
            run_yaml=text,
            jobs=jobs,
            size=size,
            command=[*command, *words],
            final_codes=_final_codes(config, stage),
            retried_codes=[TRY_AGAIN, INTERRUPTED],
            attempts=_ATTEMPTS,
            grace=_grace_seconds(config),
            deadline=round(size.hours * 3600),
            several_nodes=_several_nodes(config, stage),
            processes=_processes(config, stage),
            port=_RENDEZVOUS_PORT,
            volume_path=_volume_path(config),
            user=USER,
            secret=SECRET,
        )
    names = [[(stage, f"{prefix}-{stage}") for stage in group] for group in config.in_turn(stages)]
    return {**files, "apply.sh": _fill("apply.sh.j2", stages=names)}


def _slurm(config: RunConfig, stages: tuple[Stage, ...]) -> dict[str, str]:
    files = {"run.yaml": _run_yaml(config)}
    for stage in stages:
        size = config.jobs.of(stage)
        array = size.workers if stage != "train" and size.workers > 1 else None
        options = {
            "job-name": f"{_prefix(config)}-{stage}",
            "output": f"%x-{'%A-%a' if array else '%j'}.log",
            "open-mode": "append",
            "array": f"0-{array - 1}" if array else None,
            "nodes": size.workers if stage == "train" else 1,
            "ntasks-per-node": 1,
            "cpus-per-task": size.cpus,
            "mem": f"{size.memory_gib}G",
            "gpus-per-node": size.gpus or None,
            "time": math.ceil(size.hours * 60),
            "signal": f"TERM@{_grace_seconds(config)}",
        }
        files[f"{stage}.sbatch"] = _fill(
            "stage.sbatch.j2",
            stage=stage,
            options={key: value for key, value in options.items() if value is not None},
            command=_slurm_command(config, stage),
            nodes=options["nodes"],
            cpus=size.cpus,
            array=array,
            final=(0, *_final_codes(config, stage)),
            repeat=(TRY_AGAIN, INTERRUPTED, _KILLED_BY_SIGTERM),
            attempts=_ATTEMPTS,
        )
    return {**files, "submit.sh": _fill("submit.sh.j2", stages=config.in_turn(stages))}


def _slurm_command(config: RunConfig, stage: Stage) -> str:
    """The stage's command line; words in <> are what the shell fills in on the node."""
    words = ["eagle3", *_stage_words(config, stage, "<config>")]
    if _needs_launcher(config, stage):
        launch = _launch_words(config, stage, endpoint="<endpoint>", identity="<attempt>")
        words = ["python", *launch, *words[1:]]
    on_node = {
        "<config>": '"$1"',
        # Jobs on the same node differ in their last digits.
        "<endpoint>": '"$first:$((20000 + SLURM_JOB_ID % 10000))"',
        "<attempt>": '"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
    }
    return " ".join(on_node.get(word) or shlex.quote(word) for word in words)


def _stages(config: RunConfig) -> tuple[Stage, ...]:
    """The stages that the configuration is complete enough to run."""
    possible = {
        "synth": config.synth is not None,
        "eval": bool(config.eval.prompts or config.eval.sources),
    }
    return tuple(stage for stage in STAGES if possible.get(stage, True))


def _prefix(config: RunConfig) -> str:
    """The last part of run.uri as a DNS label."""
    last = config.run.uri.rstrip("/").rpartition("/")[2].lower()
    label = re.sub(r"[^a-z0-9]+", "-", last)[:30].strip("-") or "eagle3"
    return label if label[0].isalpha() else f"run-{label}"


def _run_yaml(config: RunConfig, **run: Any) -> str:
    """The resolved configuration without what belongs to one machine; `run` replaces keys of run.

    Threads are counted on this machine, so each job's own command sets them.
    """
    for key, name in (("shard", "--shard"), ("force", "--force")):
        if getattr(config.run, key):
            fix = f"leave {name} out: jobs claim their shards and are started again"
            raise ConfigError("belongs to one process, not to jobs", where=f"run.{key}", fix=fix)
    values = config.model_dump(mode="json", exclude={"jobs": True, "run": {"threads"}})
    values["run"] |= run
    # Escaped: characters that YAML takes for line breaks would end a block of a ConfigMap.
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=120)


def _volume_path(config: RunConfig) -> str:
    """Where jobs.volume_claim is mounted: the parent of run.uri; "" for a run in a bucket."""
    uri = config.run.uri
    local = local_path(uri)
    if local is None and "://" in uri:
        return ""
    path = PurePosixPath(local or uri)
    if config.jobs.volume_claim is None or not path.is_absolute() or len(path.parts) < 3:
        fix = "set run.uri to a bucket, or to /DIR/NAME with jobs.volume_claim"
        raise ConfigError(f"{uri} is not on storage that pods share", where="run.uri", fix=fix)
    if ":" in str(path.parent):
        fix = "choose a directory without one"
        raise ConfigError("Kubernetes mounts no path with a colon", where="run.uri", fix=fix)
    return str(path.parent)


def _stage_words(config: RunConfig, stage: Stage, file: str) -> list[str]:
    """`eagle3`'s arguments for a stage; `file` is the configuration where the job runs."""
    threads = max(config.jobs.of(stage).cpus // _processes(config, stage), 1)
    return [stage, "-c", file, f"run.threads={threads}"]


def _processes(config: RunConfig, stage: Stage) -> int:
    """Processes of one worker, each on a GPU. Raises ConfigError where they are too few."""
    gpus = config.jobs.of(stage).gpus
    splits = getattr(getattr(config, stage), "parallel", "none") == "tensor"
    if splits and gpus < 2:
        problem = f"{gpus} is too few: one process cannot split the target"
        fix = f"set it to 2 or more, or {stage}.parallel=none"
        raise ConfigError(problem, where=f"jobs.stages.{stage}.gpus", fix=fix)
    return max(gpus, 1) if splits or stage == "train" else 1


def _several_nodes(config: RunConfig, stage: Stage) -> bool:
    """Whether all workers are one group; those of other stages share nothing but the run."""
    return stage == "train" and config.jobs.of(stage).workers > 1


def _needs_launcher(config: RunConfig, stage: Stage) -> bool:
    """Whether a worker is one of several processes, which a launcher starts."""
    return _processes(config, stage) > 1 or _several_nodes(config, stage)


def _final_codes(config: RunConfig, stage: Stage) -> list[int]:
    """Exit codes other than 0 after which another attempt is pointless.

    Processes of a training that lose the others crash with 1, so there 1 is not final; those that
    split a target end with 75.
    """
    return [2] if stage == "train" and _needs_launcher(config, stage) else [1, 2]


def _grace_seconds(config: RunConfig) -> int:
    """Seconds that a job has between SIGTERM and SIGKILL."""
    return math.ceil(config.train.grace_seconds) + _EXTRA_GRACE


def _launch_words(config: RunConfig, stage: Stage, *, endpoint: str, identity: str) -> list[str]:
    """The launcher's arguments before the stage's own.

    `endpoint` is HOST:PORT of the first node, `identity` names the attempt.
    """
    words = ["-m", "pipeline.jobs.launch", "--grace", str(_grace_seconds(config))]
    words += ["--nproc-per-node", str(_processes(config, stage))]
    if not _several_nodes(config, stage):
        words.append("--standalone")
    else:
        nodes = config.jobs.of(stage).workers
        words += ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", endpoint, "--rdzv-id", identity]
    return [*words, "--module", "pipeline.cli"]


def _fill(template: str, **values: Any) -> str:
    """The template's text; `quoted` quotes for a shell, `tojson` for YAML."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    source = resources.files("pipeline.jobs").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)
