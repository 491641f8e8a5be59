"""metrics.jsonl, and the same numbers in Weights & Biases.

One line every `train.log_every` steps and at every evaluation:

    step epoch loss acc_0…acc_(K-1)    optimiser steps so far; means since the line before
    lr tokens fill                     learning rate, tokens so far, share of the budget they fill
    gradient_norm gradient_norm_max    before clipping: mean and greatest since the line before
    clipped_share coarse_rows_share    of steps; of aux states that int8 holds badly
    tau tau_se alpha_1…                of the head at this step, when it was evaluated
    tokens_per_second data_wait_share  since the line before, or since a stopped run went on,
                                       without evaluations and checkpoints
    peak_memory_gb                     of the first process, so far
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import MissingPackage, StoreError
from pipeline.store.location import Location

METRICS = "metrics.jsonl"
#: What differs between two runs of the same training.
VOLATILE = frozenset({"tokens_per_second", "data_wait_share", "peak_memory_gb"})


class Clock:
    """Speed of training since the line of metrics before, or since this process began."""

    def __init__(self, tokens: int) -> None:
        """`tokens` are those that were trained on before."""
        self._began = self._mark = time.perf_counter()
        self._waited, self._tokens = 0.0, tokens
        self._paused: dict[str, float] = {}  # seconds

    @contextmanager
    def paused(self, by: str) -> Iterator[None]:
        """What happens inside is not training, but `by`."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._mark += seconds
        self._paused[by] = self._paused.get(by, 0.0) + seconds

    def shares(self) -> str:
        """The time since this attempt began, and what else than training took how much of it."""
        seconds = time.perf_counter() - self._began
        shares = {by: f"{paused / seconds:.0%}" for by, paused in self._paused.items()}
        named = [f"{by} {share}" for by, share in shares.items() if share != "0%"]
        return ", ".join([f"{seconds:,.0f} s", *named])

    def lap(self, waited: float, tokens: int) -> tuple[float, float]:
        """(tokens per second, share of the time spent waiting for data).

        Seconds of waiting and tokens count from the beginning.
        """
        now = time.perf_counter()
        seconds = now - self._mark
        speed, share = (tokens - self._tokens) / seconds, (waited - self._waited) / seconds
        self._mark, self._waited, self._tokens = now, waited, tokens
        return speed, share


class Metrics:
    """Lines of `directory`/metrics.jsonl, of which `stage` gets a copy when it is elsewhere."""

    def __init__(
        self,
        directory: Path,
        stage: Location,
        config: RunConfig,
        *,
        before: bytes,
        run_id: str,
        require_own: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` are the lines up to the step that a resumed run goes on from.

        Lines beyond it, of steps that are taken again, are removed. `run_id` is the run's name in
        Weights & Biases, the same when it is resumed. `require_own` is called before anything is
        written, and raises where that is no longer this process's to do.
        """
        self._path, self._stage, self._require_own = directory / METRICS, stage, require_own
        self._require_own()
        Location(str(directory)).write(METRICS, before)
        disabled = config.train.wandb == "disabled"
        goes_on = bool(before)
        self._wandb = None if disabled else _start_wandb(directory, config, run_id, goes_on)

    def write(self, line: Mapping[str, float]) -> None:
        """Append one line to both. Raises StoreError when the disk refuses."""
        self._require_own()
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            fix = "free some space and run the same command again"
            raise StoreError(problem, where=str(self._path), fix=fix) from error
        if self._wandb is not None:
            self._wandb.log(dict(line), step=int(line["step"]))

    def publish(self) -> bytes:
        """All lines so far, once the stage's directory has them."""
        self._require_own()
        data = self._path.read_bytes()
        if not self._stage.is_local:
            self._stage.write(METRICS, data)
        return data

    def close(self) -> None:
        """End the Weights & Biases run."""
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(directory: Path, config: RunConfig, run_id: str, goes_on: bool) -> Any:
    """A run that goes on keeps the lines that it has there; one that begins anew replaces them."""
    section = config.train
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
    except ImportError as error:
        problem = f"train.wandb={section.wandb} needs wandb: {error}"
        fix = "pip install 'eagle3[train]', or set train.wandb=disabled"
        raise MissingPackage(problem, where="train.wandb", fix=fix) from error
    return wandb.init(
        project=section.wandb_project,
        id=run_id,
        mode=section.wandb,
        resume="allow" if goes_on else None,
        dir=str(directory),
        config=config.model_dump(mode="json", include={"train", "target", "run"}),
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
