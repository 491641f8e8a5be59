"""Optimiser steps, from wherever the last run stopped to the end.

A step of W processes with A micro-batches each takes the next W·A batches of the schedule:

    W = 2, A = 2      batches  b   b+1  b+2  b+3
    process                    0   1    0    1

b counts on from step to step, and from run to run: another W goes on with the batch after the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pipeline.config import TrainSection
from pipeline.console import progress_bar
from pipeline.decoder.request import Acceptance
from pipeline.train.acceptance import Evaluator
from pipeline.train.checkpoints import Checkpoints
from pipeline.train.data.batches import ReadAhead
from pipeline.train.data.corpus import Corpus
from pipeline.train.data.schedule import Schedule
from pipeline.train.metrics import Clock, Metrics
from pipeline.train.progress import Progress, Window
from pipeline.train.trainer import Trainer
from pipeline.train.ttt.model import StepResult

#: The learning rate ends at this share of its peak.
FINAL_RATE = 0.05


def total_steps(
    section: TrainSection, batches: int, world: int, *, before: Progress | None = None
) -> int:
    """Optimiser steps of the whole run, those `before` included.

    A last group of fewer than W·A batches is left out.
    """
    done = before or Progress()
    steps = max(1, done.step + max(0, batches - done.batches) // (world * section.accumulate))
    return min(steps, section.max_steps or steps)


def own_batches(first: int, steps: int, *, rank: int, world: int, accumulate: int) -> Iterator[int]:
    """Numbers of the batches of process `rank` in `steps` steps, the first beginning at `first`."""
    yield from range(first + rank, first + steps * world * accumulate, world)


def rate_at(step: int, steps: int, section: TrainSection) -> float:
    """Learning rate of step `step` (0-based): linear warm-up, then a cosine to 5 % of the peak."""
    warm = math.ceil(section.warmup_share * steps)
    if step < warm:
        return section.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - 1 - warm)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return section.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


@dataclass
class TrainingLoop:
    """Training from `progress` to optimiser step `steps`."""

    trainer: Trainer
    corpus: Corpus
    schedule: Schedule
    section: TrainSection
    checkpoints: Checkpoints
    metrics: Metrics | None  # on the first process only
    evaluator: Evaluator | None  # on the first process only, and with train.evaluate_every
    steps: int
    progress: Progress  # replaced as training goes on

    def run(self) -> Progress:
        """Train until the last step, or until τ has stopped rising."""
        section, steps, clock = self.section, self.steps, Clock()
        with (
            progress_bar("train", unit="steps", total=steps, done=self.progress.step) as bar,
            ReadAhead(self.corpus, self.schedule, self._batch_numbers()) as reader,
        ):
            while self.progress.step < steps and not self._stalled():
                rate = rate_at(self.progress.step, steps, section)
                self._step(reader, rate)
                step = self.progress.step
                last, acceptance = step == steps, None
                if section.evaluate_every and (last or step % section.evaluate_every == 0):
                    with clock.paused():
                        acceptance = self._evaluate()
                if acceptance or last or step % section.log_every == 0:
                    self._log(rate, acceptance, clock.lap(reader.waited))
                bar.advance(1, self._status())
                if last or self._stalled() or step % section.checkpoint_every == 0:
                    with clock.paused():
                        self._save()
        return self.progress

    def _batch_numbers(self) -> Iterator[int]:
        """Of this process, to the end."""
        own = own_batches(
            self.progress.batches,
            self.steps - self.progress.step,
            rank=self.trainer.rank,
            world=self.trainer.world,
            accumulate=self.section.accumulate,
        )
        # Fewer batches than one group only happens in runs shorter than one step; they start over.
        return (number % len(self.schedule) for number in own)

    def _stalled(self) -> bool:
        """Whether `train.early_stop` evaluations in a row were no better than the best."""
        limit = self.section.early_stop
        return limit is not None and self.progress.stale >= limit

    def _step(self, reader: ReadAhead, rate: float) -> None:
        """One optimiser step, and what it adds up to over all processes."""
        batches = (reader.take() for _ in range(self.section.accumulate))
        tokens, labels, results = 0, 0, list[StepResult]()
        for batch, result in self.trainer.step(batches, rate):
            tokens, labels = tokens + batch.tokens, labels + len(batch.labels)
            results.append(result)
        hits = torch.stack([result.hits.cpu() for result in results]).sum(0)
        predicted = torch.stack([result.labels.cpu() for result in results]).sum(0)
        losses = torch.stack([result.loss.double().cpu() for result in results])
        counts = torch.cat((hits, predicted, torch.tensor([tokens, labels])))
        *sums, tokens, labels = self.trainer.all_reduce(counts).tolist()
        losses = self.trainer.all_reduce(losses) / self.trainer.world
        window = self.progress.window.extended(
            losses.tolist(), sums[: len(hits)], sums[len(hits) :], tokens
        )
        group = self.trainer.world * self.section.accumulate
        self.progress = self.progress.after_step(
            batches=group, tokens=tokens, labels=labels, window=window
        )

    def _evaluate(self) -> Acceptance:
        """Decode with the head as it is, on the first process while the others wait.

        Keep it when τ is higher than ever.
        """
        weights = self.trainer.weights()
        acceptance = self.evaluator.measure(weights) if self.evaluator else None
        file = None
        if acceptance and self.progress.is_best(acceptance):
            file = self.checkpoints.keep_best(self.progress.step, weights)
        acceptance, file = self.trainer.broadcast((acceptance, file))
        assert acceptance is not None, "the first process has an evaluator"
        self.progress = self.progress.after_evaluation(acceptance, file)
        return acceptance

    def _log(self, rate: float, acceptance: Acceptance | None, lap: tuple[float, float]) -> None:
        """Write a line over all steps since the one before, and begin a new window."""
        progress, window, (seconds, waiting) = self.progress, self.progress.window, lap
        group = self.trainer.world * self.section.accumulate
        means, decoded = window.means(), acceptance.named() if acceptance else {}
        budget = len(window.losses) * self.trainer.world * self.section.batch_tokens
        speed = window.tokens / seconds
        line = {
            "step": progress.step,
            "epoch": self.schedule.locate(progress.batches - group)[0],
            **means,
            **decoded,
            "lr": rate,
            "tokens": progress.tokens,
            "fill": window.tokens / budget,
            "tokens_per_second": round(speed, 1),
            "data_wait_share": round(waiting, 4),
            "peak_memory_gb": round(self.trainer.peak_memory(), 3),
        }
        if self.metrics:
            self.metrics.write(line)
        tau = decoded.get("tau", progress.last.get("tau"))
        last = means | ({} if tau is None else {"tau": tau}) | {"tokens_per_second": speed}
        self.progress = progress.model_copy(update={"window": Window(), "last": last})

    def _status(self) -> str | None:
        """For the progress bar: the last line of metrics, once there is one."""
        last = self.progress.last
        if not last:
            return None
        tau = f"  τ {last['tau']:.2f}" if "tau" in last else ""
        measured = f"loss {last['loss']:.3f}  acc_0 {last['acc_0']:.1%}{tau}"
        return f"{measured}  {last['tokens_per_second']:,.0f} tokens/s"

    def _save(self) -> None:
        epoch, index = self.schedule.locate(self.progress.batches)
        self.checkpoints.save(self.trainer, self.progress, epoch=epoch, index=index)
