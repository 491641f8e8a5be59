"""What a cluster gives to the stages; `eagle3 jobs render` makes manifests and scripts of it."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipeline.config.section import Section
from pipeline.records import Stage

_OBJECT = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"  # a Kubernetes name


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
    hours: float = Field(24, gt=0)
    """Kubernetes: the stage fails after so long, all attempts together. Slurm: limit of one
    attempt, after which the next continues."""


class JobsSection(Section):
    """Jobs of a cluster. Nothing here shapes what a stage makes."""

    image: str | None = Field(None, pattern=r"^\S+$")
    """Kubernetes: container image with this package, as Dockerfile builds it."""
    service_account: str | None = Field(None, pattern=_OBJECT)
    """Kubernetes: service account that may read and write the bucket."""
    volume_claim: str | None = Field(None, pattern=_OBJECT)
    """Kubernetes: ReadWriteMany claim for a run that is in no bucket, mounted at run.uri's
    parent."""
    stages: dict[Stage, StageJobSection] = Field({})
    """What single stages get, such as {train: {gpus: 8}}; the others get the defaults."""

    @model_validator(mode="after")
    def _evaluates_once(self) -> JobsSection:
        if self.of("eval").workers > 1:
            raise ValueError("stages.eval.workers must be 1: eval measures on one machine")
        return self

    def of(self, stage: Stage) -> StageJobSection:
        """What the job of a stage gets."""
        return self.stages.get(stage, StageJobSection())
