"""What a cluster gives to the stages; `eagle3 jobs render` makes manifests and scripts of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.section import Section

_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"  # a DNS label that a Service may have too
_OBJECT = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_WORD = r"^[A-Za-z0-9][\w.,-]*$"
_CRON = r"^(@(yearly|monthly|weekly|daily|hourly)|[\dA-Za-z*/,-]+( [\dA-Za-z*/,-]+){4})$"

LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class StageJobSection(Section):
    """What the job of one stage gets; all but `workers` and `hours` is for each worker."""

    workers: int = Field(1, gt=0)
    """Pods, or tasks of the array, that make synth's or features' shards; for train the nodes."""
    gpus: int = Field(1, ge=0)
    """GPUs; training starts a process on each."""
    cpus: int = Field(8, gt=0)
    """CPU cores, and threads of torch, which the processes of a worker share."""
    memory_gib: int = Field(32, gt=0)
    """Main memory."""
    disk_gib: int = Field(100, gt=0)
    """Kubernetes: node disk for downloads and copies of shards; `run.cache_bytes` must fit."""
    hours: float = Field(24, gt=0)
    """Kubernetes: the stage fails after so long, all attempts together. Slurm: limit of one
    attempt, after which the next goes on."""


class SecretSpec(Section):
    """A value of a Kubernetes Secret."""

    name: str = Field(pattern=_OBJECT)
    """The Secret."""
    key: str = Field(pattern=r"^[\w.-]+$")
    """Its key."""
    optional: bool = False
    """Start without it where it does not exist."""


class JobsSection(Section):
    """Jobs of a cluster. Nothing here shapes what a stage makes."""

    name: str | None = Field(None, pattern=_LABEL, max_length=40)
    """Prefix of the jobs' names. None: the last part of run.uri."""
    image: str | None = Field(None, pattern=r"^\S+$")
    """Kubernetes: container image with this package, as Dockerfile builds it."""
    synth: StageJobSection = StageJobSection()
    """Prompts to samples."""
    features: StageJobSection = StageJobSection()
    """Samples to states."""
    train: StageJobSection = StageJobSection()
    """States to head."""
    eval: StageJobSection = StageJobSection()
    """Head to report; one worker."""
    shards_by: Literal["claims", "index"] = "claims"
    """Workers take shards that nobody has claimed, or worker i of n every n-th (--shard i/n)."""
    attempts: int = Field(20, ge=0)
    """Further attempts of a pod or Slurm job that crashed. One that says to try again, or was
    interrupted, is not counted."""
    namespace: str | None = Field(None, pattern=_LABEL, max_length=63)
    """Kubernetes: namespace of all objects. None: kubectl's own."""
    service_account: str | None = Field(None, pattern=_OBJECT)
    """Kubernetes: service account that may read and write the bucket."""
    volume_claim: str | None = Field(None, pattern=_OBJECT)
    """Kubernetes: PersistentVolumeClaim with the run, ReadWriteMany, where run.uri is no bucket."""
    volume_path: str = Field("/runs", pattern=r"^/[^\s:]+$")
    """Where volume_claim is mounted; run.uri and local files lie below it."""
    secrets: dict[Variable, SecretSpec] = Field(
        {
            "EAGLE3_PII_SALT": SecretSpec(name="eagle3", key="pii-salt"),
            "HF_TOKEN": SecretSpec(name="eagle3", key="hf-token", optional=True),
            "WANDB_API_KEY": SecretSpec(name="eagle3", key="wandb-api-key", optional=True),
        }
    )
    """Kubernetes: environment variable → Secret. The salt reaches synth alone, WANDB_API_KEY train
    alone, all others every stage."""
    node_selector: dict[LabelKey, LabelValue] = Field({})
    """Kubernetes: labels of the nodes to run on."""
    tolerations: tuple[LabelKey, ...] = ()
    """Kubernetes: keys of node taints to run in spite of, such as those of preemptible nodes."""
    schedule: str | None = Field(None, pattern=_CRON)
    """Kubernetes: cron times (UTC) at which all four stages make a new run, its directory named
    run.uri-DATE. None: no CronJob."""
    partition: str | None = Field(None, pattern=_WORD)
    """Slurm partition. None: the cluster's default."""
    account: str | None = Field(None, pattern=_WORD)
    """Slurm account. None: the user's default."""

    @model_validator(mode="after")
    def _evaluates_once(self) -> JobsSection:
        if self.eval.workers > 1:
            raise ValueError("jobs.eval.workers must be 1: eval measures on one machine")
        return self
