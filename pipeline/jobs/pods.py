"""A pod: one container that may write to its volumes only, as a user of no rights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.config import RunConfig, StageJobSection
from pipeline.jobs.stages import grace_seconds
from pipeline.records import Stage

CONTAINER = "eagle3"
#: The image's user, as in Dockerfile.
USER = 10001
_CACHE = "/cache"


def pod(
    config: RunConfig,
    stage: Stage | None,
    size: StageJobSection,
    command: Sequence[str],
    settings: str,
) -> dict[str, Any]:
    """The pod that runs `command`; None is the stage of a pod that runs all of them.

    `settings` is the ConfigMap with run.yaml.
    """
    jobs = config.jobs
    volumes = _volumes(config, size, settings, shares=stage == "train" and size.gpus > 1)
    container = {
        "name": CONTAINER,
        "image": jobs.image,
        "command": list(command),
        "env": _environment(config, stage),
        "resources": _resources(size),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": name, "mountPath": path, **({"readOnly": True} if name == "config" else {})}
            for name, (path, _) in volumes.items()
        ],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # the API wants it beside a podFailurePolicy
        "terminationGracePeriodSeconds": grace_seconds(config),
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }
    if jobs.service_account:
        spec["serviceAccountName"] = jobs.service_account
    if jobs.node_selector:
        spec["nodeSelector"] = dict(jobs.node_selector)
    if jobs.tolerations:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in jobs.tolerations]
    return spec


def largest(sizes: Sequence[StageJobSection]) -> StageJobSection:
    """What one process needs that runs all stages one after another: one GPU, the sum of hours."""
    return StageJobSection(
        gpus=min(1, max(size.gpus for size in sizes)),
        cpus=max(size.cpus for size in sizes),
        memory_gib=max(size.memory_gib for size in sizes),
        disk_gib=max(size.disk_gib for size in sizes),
        hours=sum(size.hours for size in sizes),
    )


def _environment(config: RunConfig, stage: Stage | None) -> list[dict[str, Any]]:
    plain = {"EAGLE3_LOG": "json", "HOME": _CACHE, "XDG_CACHE_HOME": _CACHE}
    environment: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in plain.items()
    ]
    if stage is None:
        label = "metadata.labels['batch.kubernetes.io/job-name']"
        environment.append({"name": "JOB_NAME", "valueFrom": {"fieldRef": {"fieldPath": label}}})
    salt = config.synth.pii.salt_variable if config.synth else ""
    only: dict[str, Stage] = {salt: "synth", "WANDB_API_KEY": "train"}
    for name, secret in config.jobs.secrets.items():
        if stage in (None, only.get(name, stage)):
            reference = {"name": secret.name, "key": secret.key, "optional": secret.optional}
            environment.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return environment


def _resources(size: StageJobSection) -> dict[str, Any]:
    """Cores are requested and not limited; memory, disk and GPUs are both."""
    limits: dict[str, Any] = {
        "memory": f"{size.memory_gib}Gi",
        "ephemeral-storage": f"{size.disk_gib}Gi",
    }
    if size.gpus:
        limits["nvidia.com/gpu"] = size.gpus
    return {"requests": {"cpu": size.cpus, **limits}, "limits": limits}


def _volumes(
    config: RunConfig, size: StageJobSection, settings: str, *, shares: bool
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → where it is mounted, and what it is."""
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "config": ("/etc/eagle3", {"configMap": {"name": settings}}),
        "cache": (_CACHE, {"emptyDir": {"sizeLimit": f"{size.disk_gib}Gi"}}),
        "tmp": ("/tmp", {"emptyDir": {}}),
    }
    if config.jobs.volume_claim:
        claim = {"persistentVolumeClaim": {"claimName": config.jobs.volume_claim}}
        volumes["run"] = (config.jobs.volume_path, claim)
    if shares:  # NCCL's processes talk through it; without a volume it holds 64 MiB
        shared = {"medium": "Memory", "sizeLimit": f"{max(size.memory_gib // 4, 1)}Gi"}
        volumes["shm"] = ("/dev/shm", {"emptyDir": shared})
    return volumes
