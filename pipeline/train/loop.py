"""Optimiser steps, from wherever the last run stopped to the end.

step n of W processes with A micro-batches each:  batches n·W·A … (n+1)·W·A - 1,  process r takes every W-th
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from pipeline.config import TrainSection
from pipeline.console import Bar, progress_bar
from pipeline.train.batches import Batch, read_batch
from pipeline.train.checkpoints import Checkpoints, Progress, Window
from pipeline.train.corpus import Corpus
from pipeline.train.engine import Engine
from pipeline.train.loss import StepResult
from pipeline.train.metrics import Metrics, summarise
from pipeline.train.schedule import Schedule

#: The learning rate ends at this share of its peak.
FINAL_RATE = 0.05


def total_steps(section: TrainSection, batches: int, world: int) -> int:
    """Optimiser steps of the whole run. A last group of fewer than W·A batches is left out."""
    steps = max(1, batches // (world * section.accumulate))
    return min(steps, section.max_steps or steps)


def rate_at(step: int, steps: int, section: TrainSection) -> float:
    """Learning rate of optimiser step `step` (0-based): linear warm-up, then a cosine to 5 % of the peak."""
    warm = math.ceil(section.warmup_share * steps)
    if step < warm:
        return section.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - 1 - warm)
    return section.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def run_loop(
    engine: Engine,
    corpus: Corpus,
    schedule: Schedule,
    section: TrainSection,
    *,
    progress: Progress,
    metrics: Metrics | None,
    checkpoints: Checkpoints,
) -> Progress:
    """Train until the last step. `metrics` is None on every process but the first."""
    steps = total_steps(section, len(schedule), engine.world)
    mark = time.perf_counter()
    with progress_bar("train", unit="step", total=steps, done=progress.step) as bar:
        for step in range(progress.step, steps):
            rate = rate_at(step, steps, section)
            taken = list(engine.step(_batches(engine, corpus, schedule, section, step), rate))
            progress = _count(progress, engine, taken)
            if progress.step % section.log_every == 0 or progress.step == steps:
                now = time.perf_counter()
                progress = _log(progress, schedule, step, rate, now - mark, engine, section, metrics)
                mark = now
            _show(bar, progress)
            if progress.step % section.checkpoint_every == 0 or progress.step == steps:
                epoch, index = schedule.locate(progress.step * engine.world * section.accumulate)
                checkpoints.save(engine, progress, epoch=epoch, index=index)
    return progress


def _batches(engine: Engine, corpus: Corpus, schedule: Schedule, section: TrainSection, step: int) -> Iterator[Batch]:
    group = engine.world * section.accumulate
    for number in range(step * group + engine.rank, (step + 1) * group, engine.world):
        # Fewer batches than one group only happens in runs shorter than one step; they start over.
        yield read_batch(corpus, schedule.batch(number % len(schedule)))


def _count(progress: Progress, engine: Engine, taken: list[tuple[Batch, StepResult]]) -> Progress:
    window = progress.window
    hits = torch.stack([result.hits.cpu() for _, result in taken]).sum(0)
    rows = torch.stack([result.rows.cpu() for _, result in taken]).sum(0)
    counts = torch.tensor([sum(batch.tokens for batch, _ in taken), sum(len(batch.labels) for batch, _ in taken)])
    sums = engine.total(torch.cat((hits, rows, counts))).tolist()
    losses = engine.total(torch.stack([result.loss.double().cpu() for _, result in taken])) / engine.world
    steps = len(hits)
    before = (window.hits or (0,) * steps, window.rows or (0,) * steps)
    return Progress(
        step=progress.step + 1,
        tokens=progress.tokens + sums[-2],
        labels=progress.labels + sums[-1],
        window=Window(
            losses=(*window.losses, *losses.tolist()),
            hits=tuple(a + b for a, b in zip(before[0], sums[:steps], strict=True)),
            rows=tuple(a + b for a, b in zip(before[1], sums[steps : 2 * steps], strict=True)),
            tokens=window.tokens + sums[-2],
        ),
        last=progress.last,
    )


def _log(
    progress: Progress, schedule: Schedule, step: int, rate: float, seconds: float, engine: Engine, section: TrainSection, metrics: Metrics | None
) -> Progress:
    epoch, _ = schedule.locate(step * engine.world * section.accumulate)
    measured = summarise(progress.window)
    budget = len(progress.window.losses) * engine.world * section.batch_tokens
    line = {"step": progress.step, "epoch": epoch, **measured, "lr": rate, "tokens": progress.tokens, "fill": progress.window.tokens / budget}
    if metrics is not None:
        metrics.write({**line, "tokens_per_second": round(progress.window.tokens / seconds, 1)})
    return progress.model_copy(update={"window": Window(), "last": {**measured, "tokens_per_second": progress.window.tokens / seconds}})


def _show(bar: Bar, progress: Progress) -> None:
    last = progress.last
    bar.advance(1, f"loss {last['loss']:.3f}  acc_0 {last['acc_0']:.1%}  {last['tokens_per_second']:,.0f} tokens/s" if last else None)
