"""metrics.jsonl, one line every `train.log_every` steps and at every evaluation, and the same numbers in Weights & Biases.

step epoch loss acc_0…acc_(K-1)    optimiser steps so far; means since the line before
lr tokens fill                     learning rate, tokens so far, share of the batches' budget that holds tokens
tau alpha_1…                       of the head at this step, when it was evaluated
tokens_per_second data_wait_share  of the time since the line before, evaluations and checkpoints taken out
peak_memory_gb                     of the first process, so far
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import TrainSection
from pipeline.errors import MissingPackage, StoreError
from pipeline.store.location import Location
from pipeline.train.checkpoints import Window

METRICS = "metrics.jsonl"
#: What differs between two runs of the same training.
VOLATILE = frozenset({"tokens_per_second", "data_wait_share", "peak_memory_gb"})


class Clock:
    """Seconds of training since the line of metrics before."""

    def __init__(self) -> None:
        self._mark, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training."""
        started = time.perf_counter()
        yield
        self._mark += time.perf_counter() - started

    def lap(self, waited: float) -> tuple[float, float]:
        """(seconds, share of them that was spent waiting for data); `waited` counts from the beginning."""
        now = time.perf_counter()
        seconds, share = now - self._mark, (waited - self._waited) / (now - self._mark)
        self._mark, self._waited = now, waited
        return seconds, share


class Metrics:
    """Lines of `directory`/metrics.jsonl. Lines beyond `step`, of steps that a resumed run takes again, are removed."""

    def __init__(
        self,
        directory: Path,
        section: TrainSection,
        *,
        step: int,
        run_id: str,
        config: Mapping[str, Any],
    ) -> None:
        self._path = directory / METRICS
        kept = [json.dumps(line) + "\n" for line in read_lines(self._path) if line["step"] <= step]
        Location(str(directory)).write(METRICS, "".join(kept).encode())
        self._wandb = (
            None
            if section.wandb == "disabled"
            else _start_wandb(directory, section, run_id, config)
        )

    def write(self, line: Mapping[str, float]) -> None:
        """Append one line to both. Raises StoreError when the disk refuses."""
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise StoreError(
                f"cannot be written: {error.strerror}",
                where=str(self._path),
                fix="free some space and run the same command again",
            ) from error
        if self._wandb is not None:
            self._wandb.log(dict(line), step=int(line["step"]))

    def close(self) -> None:
        """End the Weights & Biases run."""
        if self._wandb is not None:
            self._wandb.finish()


def read_lines(path: Path) -> list[dict[str, float]]:
    """All whole lines; a last one that a kill cut short is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n"):
            lines.append(json.loads(text))
    return lines


def summarise(window: Window) -> dict[str, float]:
    """Mean loss and accuracy of each step of the unroll."""
    accuracies = {
        f"acc_{k}": hit / max(row, 1)
        for k, (hit, row) in enumerate(zip(window.hits, window.rows, strict=True))
    }
    return {"loss": sum(window.losses) / len(window.losses), **accuracies}


def _start_wandb(
    directory: Path, section: TrainSection, run_id: str, config: Mapping[str, Any]
) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
    except ImportError as error:
        fix = "pip install 'eagle3[train]', or set train.wandb=disabled"
        raise MissingPackage(
            f"train.wandb={section.wandb} needs wandb: {error}", where="train.wandb", fix=fix
        ) from error
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    return wandb.init(
        project=section.wandb_project,
        id=run_id,
        mode=section.wandb,
        dir=str(directory),
        config=dict(config),
        settings=settings,
    )
