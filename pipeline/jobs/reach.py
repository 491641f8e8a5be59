"""What a pod could not reach or have is refused before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.jobs.stages import size_of, stages_of


def require_reach(config: RunConfig) -> None:
    """Raises ConfigError: no image, a run on no volume, a file of this machine, a cache too large
    for the pod's disk, no salt."""
    if config.jobs.image is None:
        fix = "jobs.image=REGISTRY/NAME:TAG, built from Dockerfile"
        raise ConfigError("required for Kubernetes, but not set", where="jobs.image", fix=fix)
    _require_volume(config)
    for key, path in _paths(config):
        if _is_relative(path):
            problem = f"{path} is a file of this machine, which pods do not see"
            fix = f"put it in the bucket or below {config.jobs.volume_path}, and name it in full"
            raise ConfigError(problem, where=key, fix=fix)
    _require_disk(config)
    _require_salt(config)


def _require_volume(config: RunConfig) -> None:
    uri, jobs = config.run.uri, config.jobs
    if "://" in uri and not uri.startswith("file://"):
        return
    path = PurePosixPath(uri.removeprefix("file://"))
    if jobs.volume_claim is None:
        fix = "set run.uri to a bucket, or jobs.volume_claim to a ReadWriteMany claim"
        raise ConfigError(f"{uri} is on no volume that pods share", where="run.uri", fix=fix)
    if ".." in path.parts or not path.is_relative_to(jobs.volume_path):
        fix = f"run.uri={jobs.volume_path}/… , or set jobs.volume_path"
        raise ConfigError(f"{uri} is not below jobs.volume_path", where="run.uri", fix=fix)


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Key and value of all that may name a file."""
    synth = config.synth
    sources = {"eval.sources": config.eval.sources}
    if synth:
        sources |= {"synth.sources": synth.sources, "synth.exclude": synth.exclude}
    for key, specs in sources.items():
        yield from ((key, spec.source) for spec in specs)
    single = {
        "eval.prompts": config.eval.prompts,
        "eval.head": config.eval.head,
        "train.start_from": config.train.start_from,
        "synth.head": synth.head if synth else None,
    }
    yield from ((key, path) for key, path in single.items() if path)
    if config.target.source.startswith((".", "~")):
        yield "target.source", config.target.source


def _is_relative(path: str) -> bool:
    elsewhere = path.startswith(("package:", "hub:")) or "://" in path
    return not elsewhere and not path.startswith("/")


def _require_disk(config: RunConfig) -> None:
    for stage in stages_of(config):
        disk = size_of(config, stage).disk_gib
        if config.run.cache_bytes > disk << 30:
            key = f"jobs.{stage}.disk_gib"
            fix = f"raise it, or set run.cache_bytes to at most {disk << 30}"
            raise ConfigError(f"{disk} GiB do not hold run.cache_bytes", where=key, fix=fix)


def _require_salt(config: RunConfig) -> None:
    """Each pod would make a salt of its own, and they could not continue each other's work."""
    if not config.synth or not config.synth.pii.enabled:
        return
    variable = config.synth.pii.salt_variable
    secret = config.jobs.secrets.get(variable)
    if secret is None or secret.optional:
        fix = f"jobs.secrets: {{{variable}: {{name: SECRET, key: KEY}}}}, not optional"
        raise ConfigError(f"{variable} comes from no Secret", where="jobs.secrets", fix=fix)
