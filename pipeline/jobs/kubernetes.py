"""Kubernetes objects, API of 1.31: an Indexed Job a stage, and apply.sh, which keeps the order.

    config.yaml          ConfigMap with run.yaml; its name ends in a digest of the content
    synth.yaml …         Job: `workers` pods, done as soon as one ends with 0
    train-service.yaml   names for the nodes of one training
    refresh.yaml         CronJob: all four stages, a new run each time
    apply.sh             applies a stage, waits until it is complete, applies the next

Kubernetes knows no order among Jobs. A pod that waits for the stage before would hold its GPUs
meanwhile, so a later Job is not there before its parent is complete.
"""

from __future__ import annotations

from typing import Any

import yaml

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.jobs import pods
from pipeline.jobs.reach import require_reach
from pipeline.jobs.scripts import write_script
from pipeline.jobs.stages import (
    INTERRUPTED,
    RENDEZVOUS_PORT,
    TRY_AGAIN,
    final_codes,
    launch_words,
    needs_launcher,
    prefix_of,
    run_yaml,
    size_of,
    stage_words,
    stages_of,
    takes_parts,
)
from pipeline.records import STAGES, Stage, digest

_RUN_YAML = "/etc/eagle3/run.yaml"

#: The pods of a CronJob's Job share a run, whose date is that of the schedule: the controller ends
#: the Job's name in the scheduled minute since 1970, and a replaced pod keeps the name.
_REFRESH = """\
minute=${JOB_NAME##*-}
case $minute in
  *[!0-9]*) stamp=$JOB_NAME ;;
  *) stamp=$(date -u -d "@$((minute * 60))" +%Y-%m-%dT%H%M) ;;
esac
uri=$1-$stamp
shift
exec eagle3 run "$@" "run.uri=$uri"
"""


def files(config: RunConfig) -> dict[str, str]:
    """File name → text. Raises ConfigError for what pods could not reach."""
    require_reach(config)
    text = run_yaml(config, cache_dir=None)
    settings = f"{prefix_of(config)}-{digest(text)[:8]}"
    config_map = _object(config, "v1", "ConfigMap", settings)
    config_map |= {"immutable": True, "data": {"run.yaml": text}}
    objects = {"config.yaml": config_map}
    for stage in stages_of(config):
        if stage == "train" and config.jobs.train.workers > 1:
            objects["train-service.yaml"] = _service(config)
        objects[f"{stage}.yaml"] = _job(config, stage, settings)
    if config.jobs.schedule:
        objects["refresh.yaml"] = _cron_job(config, settings)
    script = write_script(
        "apply.sh.j2",
        kubectl=[
            "kubectl",
            *(["--namespace", config.jobs.namespace] * bool(config.jobs.namespace)),
        ],
        shared=[name for name in objects if name in ("config.yaml", "train-service.yaml")],
        stages=[(stage, _job_name(config, stage)) for stage in stages_of(config)],
    )
    return {**{name: _dump(value) for name, value in objects.items()}, "apply.sh": script}


def _job(config: RunConfig, stage: Stage, settings: str) -> dict[str, Any]:
    size, name = size_of(config, stage), _job_name(config, stage)
    pod = pods.pod(config, stage, size, _command(config, stage), settings)
    if stage == "train" and size.workers > 1:
        pod["subdomain"] = name
    return {
        **_object(config, "batch/v1", "Job", name, stage),
        "spec": {
            "completionMode": "Indexed",
            "completions": size.workers,
            "parallelism": size.workers,
            # Exit code 0 says that the whole stage is complete, whoever made the last shard.
            "successPolicy": {"rules": [{"succeededCount": 1}]},
            **_failures(config, stage),
            **({"maxFailedIndexes": 0} if takes_parts(config, stage) else {}),
            "activeDeadlineSeconds": round(size.hours * 3600),
            "template": {"metadata": {"labels": _labels(config, stage)}, "spec": pod},
        },
    }


def _failures(config: RunConfig, stage: Stage | None) -> dict[str, Any]:
    """What a failed pod means; the first rule that fits is taken.

    A pod that is to try again, or was interrupted, is replaced after the controller's growing delay
    and not counted: others may still be at work for hours, and the deadline bounds it. A crash is
    counted.
    """
    rules: list[dict[str, Any]] = [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        _on_codes("FailJob", final_codes(config, stage)),
        _on_codes("Ignore", [TRY_AGAIN, INTERRUPTED]),
    ]
    return {"backoffLimitPerIndex": config.jobs.attempts, "podFailurePolicy": {"rules": rules}}


def _on_codes(action: str, codes: list[int]) -> dict[str, Any]:
    on = {"containerName": pods.CONTAINER, "operator": "In", "values": codes}
    return {"action": action, "onExitCodes": on}


def _command(config: RunConfig, stage: Stage) -> list[str]:
    words = stage_words(config, stage, _RUN_YAML)
    if needs_launcher(config, stage):
        name = _job_name(config, stage)
        endpoint = f"{name}-0.{name}:{RENDEZVOUS_PORT}"
        return ["python", *launch_words(config, endpoint=endpoint, identity=name), *words]
    if takes_parts(config, stage):
        part = f"$(JOB_COMPLETION_INDEX)/{size_of(config, stage).workers}"
        words += ["--shard", part]  # the kubelet puts the variable's value there
    return ["eagle3", *words]


def _service(config: RunConfig) -> dict[str, Any]:
    """Gives the pods of a training names, before they are ready too."""
    name = _job_name(config, "train")
    return {
        **_object(config, "v1", "Service", name, "train"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        },
    }


def _cron_job(config: RunConfig, settings: str) -> dict[str, Any]:
    """All four stages in one pod, as large as the largest of them."""
    schedule = config.jobs.schedule
    if set(stages_of(config)) != set(STAGES):
        fix = "set synth.sources and eval.sources too, or leave jobs.schedule out"
        raise ConfigError("a refresh needs all four stages", where="jobs.schedule", fix=fix)
    size = pods.largest([size_of(config, stage) for stage in STAGES])
    words = ["-c", _RUN_YAML, f"run.threads={size.cpus}"]
    uri = config.run.uri.rstrip("/")
    pod = pods.pod(config, None, size, ["sh", "-c", _REFRESH, "refresh", uri, *words], settings)
    job = {
        "completionMode": "Indexed",
        "completions": 1,
        **_failures(config, None),
        "activeDeadlineSeconds": round(size.hours * 3600),
        "template": {"metadata": {"labels": _labels(config)}, "spec": pod},
    }
    return {
        **_object(config, "batch/v1", "CronJob", f"{prefix_of(config)}-refresh"),
        "spec": {
            "schedule": schedule,
            "timeZone": "Etc/UTC",
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": 3600,
            "jobTemplate": {"metadata": {"labels": _labels(config)}, "spec": job},
        },
    }


def _object(
    config: RunConfig, version: str, kind: str, name: str, stage: Stage | None = None
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": _labels(config, stage)}
    if config.jobs.namespace:
        metadata["namespace"] = config.jobs.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _job_name(config: RunConfig, stage: Stage) -> str:
    return f"{prefix_of(config)}-{stage}"


def _labels(config: RunConfig, stage: Stage | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "eagle3", "app.kubernetes.io/instance": prefix_of(config)}
    return labels | ({"app.kubernetes.io/component": stage} if stage else {})


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they read, and no anchors for what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _as_it_reads(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _as_it_reads)


def _dump(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
