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

from torch import Tensor

from pipeline.config import TrainSection
from pipeline.console import notice, progress_bar
from pipeline.learning.batches import ReadAhead
from pipeline.learning.corpus import Corpus
from pipeline.learning.schedule import Schedule
from pipeline.train.acceptance import Evaluator, advise
from pipeline.train.checkpoints import Checkpoints
from pipeline.train.grace import Grace
from pipeline.train.group import broadcast_from_rank0
from pipeline.train.metrics import Clock, Metrics
from pipeline.train.progress import Best, Decoded, Progress, StoredFile, Window
from pipeline.train.trainer import Trainer, TrainingState

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
    done = min(1.0, (step - warm) / max(1, steps - 1 - warm))
    cosine = 0.5 * (1 + math.cos(math.pi * done))
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
        """Train until the last step.

        Raises KeyboardInterrupt, on all processes, after a SIGTERM to one of them.
        """
        section, steps, clock = self.section, self.steps, Clock(self.progress.tokens)
        if self._ended_unawares():
            self.progress = self.progress.model_copy(update={"unmeasured": True})
        with (
            Grace(section.grace_seconds) as grace,
            progress_bar("train", unit="steps", total=steps, done=self.progress.step) as bar,
            ReadAhead(self.corpus, self.schedule, self._batch_numbers()) as reader,
        ):
            while self._goes_on():
                if not self.progress.unmeasured:
                    self._step(reader, grace)
                self._measure(clock, reader)
                bar.advance(1, self._status())
                last = self.progress.step == steps
                if last or self.progress.step % section.checkpoint_every == 0:
                    with clock.paused():
                        self._save()
            if self.progress.best and not self.progress.reported:
                self._report(self.progress.best)
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

    def _goes_on(self) -> bool:
        return self.progress.unmeasured or self.progress.step < self.steps

    def _ended_unawares(self) -> bool:
        """Whether the step before was the last, but is not measured as such: fewer batches are left
        than one step takes of the processes that there are now."""
        progress = self.progress
        unevaluated = self.section.evaluate_every and progress.evaluated < progress.step
        unlogged = bool(progress.window.losses or unevaluated)
        return progress.step == self.steps and not progress.reported and unlogged

    def _step(self, reader: ReadAhead, grace: Grace) -> None:
        """One optimiser step, and what it adds up to over all processes.

        When one of them is asked to end, all do, with a checkpoint.
        """
        batches = [reader.take() for _ in range(self.section.accumulate)]
        rate = self._rate(self.progress.step)
        sums = self.trainer.step(batches, rate, asked_to_end=grace.begun)
        group = self.trainer.world * self.section.accumulate
        window = self.progress.window.extended(
            sums, batches=group, clipped=sums.gradient_norm > self.section.clip_norm
        )
        self.progress = self.progress.after_step(
            batches=group, tokens=sums.tokens, labels=sums.labels, window=window
        )
        if sums.asked_to_end:
            self._save()
            notice("train", f"SIGTERM: ended with a checkpoint after step {self.progress.step:,}")
            raise KeyboardInterrupt

    def _measure(self, clock: Clock, reader: ReadAhead) -> None:
        """Evaluate and log the step just taken, if that is due."""
        section, step = self.section, self.progress.step
        last, decoded = step == self.steps, None
        if section.evaluate_every and (last or step % section.evaluate_every == 0):
            with clock.paused():
                decoded = self._evaluate()
        if decoded or last or step % section.log_every == 0:
            self._log(decoded, clock.lap(reader.waited, self.progress.tokens))
        self.progress = self.progress.model_copy(update={"unmeasured": False})

    def _evaluate(self) -> Decoded:
        """Decode with the head as it is, on the first process while the others wait.

        Keep it when it is the one to export so far.
        """
        weights = self.trainer.weights()
        decoded, file = broadcast_from_rank0(lambda: self._decode(weights))
        self.progress = self.progress.after_evaluation(decoded, file)
        return decoded

    def _decode(self, weights: dict[str, Tensor]) -> tuple[Decoded, StoredFile | None]:
        """What a head's evaluation counted, and its file if it is kept."""
        assert self.evaluator is not None, "the first process has an evaluator"
        decoded, file = self.evaluator.select(weights), None
        if not self.progress.evaluations:
            advise(decoded)
        if self.progress.keeps(decoded):
            file = self.checkpoints.keep_best(self.progress.step, weights)
        return decoded, file

    def _report(self, best: Best) -> None:
        """Decode the other half with the head to export; a checkpoint holds what that counted."""
        reported = broadcast_from_rank0(lambda: self._decode_best(best))
        self.progress = self.progress.model_copy(update={"reported": reported})
        self._save()

    def _decode_best(self, best: Best) -> Decoded:
        assert self.evaluator is not None, "the first process has an evaluator"
        return self.evaluator.report(self.checkpoints.read_best(best))

    def _log(self, decoded: Decoded | None, lap: tuple[float, float]) -> None:
        """Write a line over all steps since the one before, and begin a new window."""
        progress, window, (speed, waiting) = self.progress, self.progress.window, lap
        group = self.trainer.world * self.section.accumulate
        means, acceptance = progress.means(), decoded.named() if decoded else {}
        sums: dict[str, float] = {}
        if window.losses:  # else the steps have their line, and τ comes after it
            budget = window.batches * self.section.batch_tokens
            sums = {**window.gradients(), "fill": window.tokens / budget}
        line = {
            "step": progress.step,
            "epoch": self.schedule.locate(progress.batches - group)[0],
            **means,
            **acceptance,
            **sums,
            "lr": self._rate(progress.step - 1),
            "tokens": progress.tokens,
            "tokens_per_second": round(speed, 1),
            "data_wait_share": round(waiting, 4),
            "peak_memory_gb": round(self.trainer.peak_memory(), 3),
        }
        if self.metrics:
            self.metrics.write(line)
        known = progress.last | acceptance
        taus = {name: known[name] for name in ("tau", "tau_se") if name in known}
        last = means | taus | {"tokens_per_second": speed}
        self.progress = progress.model_copy(update={"window": Window(), "last": last})

    def _status(self) -> str | None:
        """For the progress bar: the last line of metrics, once there is one."""
        last = self.progress.last
        if not last:
            return None
        tau = f"  τ {last['tau']:.2f} ± {last['tau_se']:.2f}" if "tau" in last else ""
        measured = f"loss {last['loss']:.3f}  acc_0 {last['acc_0']:.1%}{tau}"
        return f"{measured}  {last['tokens_per_second']:,.0f} tokens/s"

    def _rate(self, step: int) -> float:
        return rate_at(step, self.steps, self.section)

    def _save(self) -> None:
        """A checkpoint; every process takes part, and the first one writes it."""
        state = self.trainer.state()
        broadcast_from_rank0(lambda: self._write(state))

    def _write(self, state: TrainingState | None) -> None:
        assert state is not None and self.metrics is not None, "the first process has both"
        epoch, index = self.schedule.locate(self.progress.batches)
        lines = self.metrics.publish()
        self.checkpoints.save(state, self.progress, epoch=epoch, index=index, metrics=lines)
