"""Optimiser steps, from wherever the last run stopped to the end.

A step of W processes with A micro-batches each takes the next W·A batches of the schedule:

    W = 2, A = 2      batches  b   b+1  b+2  b+3     b counts on from step to step, and from run to run:
    process                    0   1    0    1       another W continues with the batch after the last one
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pipeline.config import TrainSection
from pipeline.console import ProgressBar, progress_bar
from pipeline.decoder.request import Acceptance
from pipeline.train.acceptance import Evaluator
from pipeline.train.checkpoints import Best, Checkpoints, Progress, Window
from pipeline.train.data.batches import ReadAhead
from pipeline.train.data.corpus import Corpus
from pipeline.train.data.schedule import Schedule
from pipeline.train.metrics import Clock, Metrics, summarise
from pipeline.train.trainer import Trainer
from pipeline.train.ttt.model import StepResult

#: The learning rate ends at this share of its peak.
FINAL_RATE = 0.05


class _Taken(NamedTuple):
    """What is kept of a micro-batch."""

    tokens: int
    labels: int
    result: StepResult


def total_steps(
    section: TrainSection, batches: int, world: int, *, before: Progress | None = None
) -> int:
    """Optimiser steps of the whole run, those `before` included. A last group of fewer than W·A batches is left out."""
    done = before or Progress()
    steps = max(1, done.step + max(0, batches - done.batches) // (world * section.accumulate))
    return min(steps, section.max_steps or steps)


def own_batches(first: int, steps: int, *, rank: int, world: int, accumulate: int) -> Iterator[int]:
    """Numbers of the batches that process `rank` trains on in `steps` steps, the first step beginning at batch `first`."""
    yield from range(first + rank, first + steps * world * accumulate, world)


def rate_at(step: int, steps: int, section: TrainSection) -> float:
    """Learning rate of optimiser step `step` (0-based): linear warm-up, then a cosine to 5 % of the peak."""
    warm = math.ceil(section.warmup_share * steps)
    if step < warm:
        return section.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - 1 - warm)
    return section.learning_rate * (
        FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    )


def run_loop(
    engine: Trainer,
    corpus: Corpus,
    schedule: Schedule,
    section: TrainSection,
    *,
    progress: Progress,
    metrics: Metrics | None,
    checkpoints: Checkpoints,
    evaluator: Evaluator | None,
) -> Progress:
    """Train until the last step, or until τ has stopped rising.

    `metrics` and `evaluator` are None on every process but the first; `evaluator` also without train.evaluate_every.
    """
    steps = total_steps(section, len(schedule), engine.world, before=progress)
    group = engine.world * section.accumulate
    mine = own_batches(
        progress.batches,
        steps - progress.step,
        rank=engine.rank,
        world=engine.world,
        accumulate=section.accumulate,
    )
    # Fewer batches than one group only happens in runs shorter than one step; they start over.
    numbers = (number % len(schedule) for number in mine)
    clock = Clock()
    with (
        progress_bar("train", unit="step", total=steps, done=progress.step) as bar,
        ReadAhead(corpus, schedule, numbers) as reader,
    ):
        while progress.step < steps and not has_stalled(progress, section):
            rate = rate_at(progress.step, steps, section)
            batches = (reader.take() for _ in range(section.accumulate))
            taken = [
                _Taken(batch.tokens, len(batch.labels), result)
                for batch, result in engine.step(batches, rate)
            ]
            progress = _count(progress, engine, taken, group)
            last, found = progress.step == steps, None
            if section.evaluate_every and (progress.step % section.evaluate_every == 0 or last):
                with clock.paused():
                    progress, found = _evaluate(progress, engine, evaluator, checkpoints)
            if found or last or progress.step % section.log_every == 0:
                progress = _log(
                    progress,
                    schedule,
                    rate,
                    found,
                    engine,
                    section,
                    clock.lap(reader.waited),
                    metrics,
                )
            _show(bar, progress)
            if (
                last
                or has_stalled(progress, section)
                or progress.step % section.checkpoint_every == 0
            ):
                with clock.paused():
                    epoch, index = schedule.locate(progress.batches)
                    checkpoints.save(engine, progress, epoch=epoch, index=index)
    return progress


def has_stalled(progress: Progress, section: TrainSection) -> bool:
    """Whether `train.early_stop` evaluations in a row were no better than the best."""
    return section.early_stop is not None and progress.stale >= section.early_stop


def _evaluate(
    progress: Progress, engine: Trainer, evaluator: Evaluator | None, checkpoints: Checkpoints
) -> tuple[Progress, Acceptance]:
    """Decode with the head as it is, on the first process while the others wait; keep it when τ is higher than ever."""
    weights = engine.weights()
    found = evaluator.measure(weights) if evaluator else None
    file = None
    if found and (progress.best is None or found.tau > progress.best.tau):
        file = checkpoints.keep_best(progress.step, weights)
    found, file = engine.from_first((found, file))
    assert found is not None, "the first process has an evaluator"
    best, stale = progress.best, progress.stale + 1
    if file:
        best, stale = (
            Best(
                step=progress.step,
                tau=found.tau,
                alpha=found.alpha,
                measured=summarise(progress.window),
                file=file,
            ),
            0,
        )
    return progress.model_copy(
        update={"best": best, "stale": stale, "evaluations": progress.evaluations + 1}
    ), found


def _count(progress: Progress, engine: Trainer, taken: list[_Taken], group: int) -> Progress:
    window = progress.window
    hits = torch.stack([result.hits.cpu() for _, _, result in taken]).sum(0)
    rows = torch.stack([result.rows.cpu() for _, _, result in taken]).sum(0)
    counts = torch.tensor([sum(item.tokens for item in taken), sum(item.labels for item in taken)])
    sums = engine.total(torch.cat((hits, rows, counts))).tolist()
    losses = (
        engine.total(torch.stack([result.loss.double().cpu() for _, _, result in taken]))
        / engine.world
    )
    steps = len(hits)
    before = (window.hits or (0,) * steps, window.rows or (0,) * steps)
    window = Window(
        losses=(*window.losses, *losses.tolist()),
        hits=tuple(a + b for a, b in zip(before[0], sums[:steps], strict=True)),
        rows=tuple(a + b for a, b in zip(before[1], sums[steps : 2 * steps], strict=True)),
        tokens=window.tokens + sums[-2],
    )
    done = {"step": progress.step + 1, "batches": progress.batches + group}
    return progress.model_copy(
        update={
            **done,
            "tokens": progress.tokens + sums[-2],
            "labels": progress.labels + sums[-1],
            "window": window,
        }
    )


def _log(
    progress: Progress,
    schedule: Schedule,
    rate: float,
    found: Acceptance | None,
    engine: Trainer,
    section: TrainSection,
    lap: tuple[float, float],
    metrics: Metrics | None,
) -> Progress:
    """Write a line over all steps since the one before, and begin anew."""
    window, (seconds, waiting) = progress.window, lap
    epoch, _ = schedule.locate(progress.batches - engine.world * section.accumulate)
    measured = summarise(window)
    decoded = found.named() if found else {}
    budget = len(window.losses) * engine.world * section.batch_tokens
    speed = window.tokens / seconds
    line = {
        "step": progress.step,
        "epoch": epoch,
        **measured,
        **decoded,
        "lr": rate,
        "tokens": progress.tokens,
        "fill": window.tokens / budget,
    }
    machine = {
        "tokens_per_second": round(speed, 1),
        "data_wait_share": round(waiting, 4),
        "peak_memory_gb": round(engine.peak_memory(), 3),
    }
    if metrics is not None:
        metrics.write({**line, **machine})
    tau = (
        {"tau": decoded.get("tau", progress.last.get("tau"))}
        if decoded or "tau" in progress.last
        else {}
    )
    return progress.model_copy(
        update={"window": Window(), "last": {**measured, **tau, "tokens_per_second": speed}}
    )


def _show(bar: ProgressBar, progress: Progress) -> None:
    last = progress.last
    if not last:
        bar.advance(1)
        return
    tau = f"  τ {last['tau']:.2f}" if "tau" in last else ""
    bar.advance(
        1,
        f"loss {last['loss']:.3f}  acc_0 {last['acc_0']:.1%}{tau}  {last['tokens_per_second']:,.0f} tokens/s",
    )
