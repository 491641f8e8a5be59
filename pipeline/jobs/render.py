"""From a configuration to the files of a scheduler; nothing is read but the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.jobs import kubernetes, slurm

#: Scheduler → what writes its files.
_FILES: dict[str, Callable[[RunConfig], dict[str, str]]] = {
    "kubernetes": kubernetes.files,
    "slurm": slurm.files,
}


def render(config: RunConfig, scheduler: str) -> dict[str, str]:
    """File name → text; the last is the script that starts everything. Raises ConfigError."""
    return _FILES[scheduler](config)


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
