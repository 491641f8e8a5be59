"""Training of one head, from the newest checkpoint or from its first step to the last.

A step of W processes with A micro-batches each takes the next W·A batches of the schedule:

    W = 2, A = 2      batches  b   b+1  b+2  b+3
    process                    0   1    0    1

b counts on from step to step, and from run to run: another W goes on with the batch after the last.

Where training follows features, a step is taken once the states of its last batch's window are
there, and the windows before that of the next batch are given up with the next checkpoint.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from pipeline.config import RunConfig, TrainSection, is_launched, world_size
from pipeline.console import ProgressBar, long_step, notice, progress_bar
from pipeline.decoder.drafter import copy_weights
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request, Statistics, pool_acceptance
from pipeline.errors import ConfigError, TargetError
from pipeline.heads.base import BorrowedRows, DraftingHead, DraftShape
from pipeline.heads.registry import algorithm_of, empty_head, solves_least_squares
from pipeline.learning.batches import ReadAhead
from pipeline.learning.corpus import HeldOut
from pipeline.records import StoredFile, digest
from pipeline.store.manifest import read_begin
from pipeline.store.stage_run import StageRun
from pipeline.target.arithmetic import NOT_NATIVE, resolve_dtype, torch_arithmetic
from pipeline.target.open import Target
from pipeline.train.checkpoints import Checkpoint, Checkpoints, workspace
from pipeline.train.group import broadcast_from_rank0, rank0_only
from pipeline.train.metrics import Clock, Metrics
from pipeline.train.prepare import Data, measure_scale, solve_least_squares
from pipeline.train.progress import Decoded, Progress, Window
from pipeline.train.trainer import Trainer

#: The learning rate ends at this share of its peak.
FINAL_RATE = 0.05
#: A launcher passes a SIGTERM on that its processes may have got as well, from the scheduler or a
#: terminal; within this time it is the same one.
_SAME_SIGNAL = 5.0
#: Requests decoded together. Acceptance does not depend on it.
_SLOTS = 8
#: A standard error of τ that needs no notice.
PRECISE = 0.02


def set_up(
    config: RunConfig, stage_run: StageRun, head: DraftingHead, target: Target, data: Data
) -> TrainingLoop:
    """The training of `head`, resumed from the newest checkpoint if there is one."""
    location, identity = stage_run.location, _identity(stage_run, data.held_out)
    checkpoints = Checkpoints(
        location,
        identity=identity,
        keep=config.train.keep_checkpoints,
        require_own=stage_run.require_own,
    )
    resumed = broadcast_from_rank0(checkpoints.newest)
    before = resumed.marker.progress if resumed else Progress()
    data.corpus.require_after(before.step)
    _check_windows(config, data, before)
    if resumed is None and solves_least_squares(config.train):
        solve_least_squares(config, head, target, data)
    config, why = _for_device(config, resumed, target.device)
    section = config.train
    with long_step("train", "setting up the trainer"):
        scale = measure_scale(config, head, data) if before.fc_scale is None else before.fc_scale
        trainer = _trainer(config, head, target, data, scale)
    _resume(trainer, resumed)
    arithmetic = torch_arithmetic(trainer.dtype, trainer.device)
    stage_run.compute_with(arithmetic, why=why, earlier=before.arithmetic)
    progress = before.computed_with(arithmetic).model_copy(update={"fc_scale": scale})
    steps = total_steps(section, len(data.schedule), trainer.world, before=progress)
    if data.corpus.is_over:  # fewer processes would find batches left for another step
        steps = progress.step
    tokens = section.batch_tokens * section.accumulate * trainer.world
    filled = f"filled to {data.schedule.fill:.1%}, {section.dtype}"
    notice("train", f"{steps:,} steps of {tokens:,} tokens, {filled}")
    evaluator = None
    if held_out := data.held_out:
        count, every = section.evaluate_prompts, f"every {section.evaluate_every:,} steps"
        notice("train", f"{every} {count} held-out samples are decoded, {count} others at the end")
        shape, device = head.shape, trainer.device
        evaluator = rank0_only(lambda: Evaluator(target, shape, section, held_out, device))
    lines, run_id = resumed.metrics() if resumed and trainer.rank == 0 else b"", identity[:12]
    directory = workspace(location)

    def open_metrics() -> Metrics:
        require = stage_run.require_own
        return Metrics(
            directory, location, config, before=lines, run_id=run_id, require_own=require
        )

    metrics = rank0_only(open_metrics)
    return TrainingLoop(trainer, data, section, checkpoints, metrics, evaluator, steps, progress)


def _check_windows(config: RunConfig, data: Data, before: Progress) -> None:
    """Raise ConfigError where one step takes batches of more shards than features leaves in the
    run: each would wait for the other."""
    keep, window, schedule = config.features.keep_shards, data.corpus.window, data.schedule
    if keep is None or window is None:
        return
    group, batches = world_size() * config.train.accumulate, len(schedule)
    # A run of fewer batches than one step has one all the same.
    least = before.batches + (0 if before.step else 1)
    for first in range(before.batches, max(least, batches - group + 1), group):
        last = min(first + group, batches) - 1
        end = min(len(data.corpus), (schedule.window(last) + 1) * window)
        # Before the first step nothing is given up, however little was to be read of it.
        needed = end - (schedule.window(first) * window if first else 0)
        if needed > keep:
            raise ConfigError(
                f"{keep} shards stay, and one step of {group} batches takes those of {needed}",
                where="features.keep_shards",
                fix="raise it, lower train.accumulate, or train with fewer processes",
            )


def _identity(stage_run: StageRun, held_out: tuple[HeldOut, ...]) -> str:
    """Of the work that was begun: a key that came later and has its default does not count.

    Held-out samples do: other ones make other batches.
    """
    begun = read_begin(stage_run.location)
    assert begun is not None, "an open stage has begun"
    others = [[[item.shard, item.sample] for item in held_out]] if held_out else []
    return digest([begun.config_hash, begun.parent_hash, *others])


def _for_device(
    config: RunConfig, resumed: Checkpoint | None, device: torch.device
) -> tuple[RunConfig, str]:
    """`config` with what training computes on `device`, and why in that type.

    A checkpoint's optimiser state is that of its type, so training goes on with it.
    """
    configured, begun = config.train.dtype, resumed and resumed.marker.progress.arithmetic
    dtype = begun[-1].dtype if begun else str(resolve_dtype(configured, device)).split(".")[-1]
    why = ""
    if begun and configured not in ("auto", dtype):
        why = f", which the checkpoint was begun in (train.dtype={configured}: begin with --force)"
    elif configured == "auto" and dtype == "float32":
        why = NOT_NATIVE if not begun else ""
    compiled = device.type == "cuda" if config.train.compile is None else config.train.compile
    section = config.train.model_copy(update={"dtype": dtype, "compile": compiled})
    return config.model_copy(update={"train": section}), why


def _trainer(
    config: RunConfig, head: DraftingHead, target: Target, data: Data, fc_scale: float
) -> Trainer:
    """The head with its loss, ready for its first step."""
    section = config.train
    if not isinstance(head.lm_head, BorrowedRows):
        head.lm_head.weight.requires_grad_(section.train_lm_head)
    model = algorithm_of(head).training.trained_model(
        section,
        head,
        target.weights.embedding(),
        target.weights.lm_head(),
        max_length=max(piece.stop for piece in data.survey.pieces),
        dtype=getattr(torch, section.dtype),
        seed=config.run.seed,
    )
    return Trainer(model, section, target.device, fc_scale=fc_scale)


def _resume(trainer: Trainer, resumed: Checkpoint | None) -> None:
    """Restore the checkpoint's state, if there is one; rank 0 alone reads its files."""
    if resumed is None:
        return
    trainer.restore(resumed.state, where=resumed.name)
    marker = resumed.marker
    computed = "; ".join(map(str, marker.progress.arithmetic))
    where = f"epoch {marker.epoch}, batch {marker.index}; {computed}"
    notice("train", f"continuing from checkpoint {resumed.name} ({where})")


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
    data: Data
    section: TrainSection
    checkpoints: Checkpoints
    metrics: Metrics | None  # on rank 0 only
    evaluator: Evaluator | None  # on rank 0 only, and with train.evaluate_every
    steps: int
    progress: Progress  # replaced as training goes on

    def run(self) -> None:
        """Train to the last step.

        Raises KeyboardInterrupt, on all processes, after a SIGTERM to one of them.
        """
        section, steps, clock = self.section, self.steps, Clock(self.progress.tokens)
        if self._ended_unawares():
            self.progress = self.progress.model_copy(update={"unmeasured": True})
        with (
            closing(self.metrics) if self.metrics else nullcontext(),
            Grace(section.grace_seconds) as grace,
            progress_bar("train", unit="steps", total=steps, done=self.progress.step) as bar,
        ):
            if self.progress.step:
                self._give_up_windows()
            while self.progress.unmeasured or self.progress.step < steps:
                with clock.paused("waiting for states"):
                    self._wait_for_window(grace)
                self._train_window(clock, grace, bar)
            with clock.paused("evaluations"):
                self._report()
        if self.metrics:
            notice("train", f"took {clock.shares()}")

    def _train_window(self, clock: Clock, grace: Grace, bar: ProgressBar) -> None:
        """All steps whose last batch is of the window that is there."""
        section, steps, until = self.section, self.steps, self._last_step_of_window()
        with ReadAhead(self.data.corpus, self.data.schedule, self._numbers(until)) as reader:
            while self.progress.unmeasured or self.progress.step < until:
                window = self.data.schedule.window(self.progress.batches)
                if not self.progress.unmeasured:
                    batches = [reader.take() for _ in range(section.accumulate)]
                    rate = rate_at(self.progress.step, steps, section)
                    sums = self.trainer.step(batches, rate, sigterm=grace.begun)
                    clipped = sums.gradient_norm > section.clip_norm
                    self.progress = self.progress.after_step(
                        sums, batches=self._group, clipped=clipped
                    )
                    if sums.sigterms:
                        self._end_early()
                self._measure(clock, reader.waited)
                bar.advance(1, self._status())
                due = self.progress.step % section.checkpoint_every == 0
                passed = self.data.schedule.window(self.progress.batches) > window
                if due or passed or self.progress.step == steps:
                    with clock.paused("checkpoints"):
                        self._save()

    def _wait_for_window(self, grace: Grace) -> None:
        """Until the states of the next step are there; a SIGTERM meanwhile ends training."""
        schedule = self.data.schedule
        last = min(self.progress.batches + self._group, len(schedule)) - 1
        if not self.data.corpus.wait_for(schedule.window(last), lambda: grace.begun):
            self._end_early()

    def _last_step_of_window(self) -> int:
        """The last step whose batches are all of the window of the next step's last batch, or
        before it."""
        schedule, batches = self.data.schedule, self.progress.batches
        window = schedule.window(min(batches + self._group, len(schedule)) - 1)
        steps = (schedule.window_end(window) - batches) // self._group
        return min(self.steps, self.progress.step + max(1, steps))

    def _give_up_windows(self) -> None:
        """What the checkpoint just stored is past is not read again."""
        step, corpus = self.progress.step, self.data.corpus
        if step == self.steps:
            corpus.consume_all(step=step)
        else:
            corpus.consume(self.data.schedule.window(self.progress.batches), step=step)

    @property
    def _group(self) -> int:
        """Batches of one optimiser step, over all processes."""
        return self.trainer.world * self.section.accumulate

    def _numbers(self, until: int) -> Iterator[int]:
        """Of this process's batches, to step `until`."""
        own = own_batches(
            self.progress.batches,
            until - self.progress.step,
            rank=self.trainer.rank,
            world=self.trainer.world,
            accumulate=self.section.accumulate,
        )
        # Fewer batches than one group only happens in runs shorter than one step; they start over.
        return (number % len(self.data.schedule) for number in own)

    def _ended_unawares(self) -> bool:
        """Whether the step before was the last, but is not measured as such: fewer batches are left
        than one step takes of the processes that there are now."""
        progress = self.progress
        unevaluated = self.section.evaluate_every and progress.evaluated < progress.step
        unlogged = bool(progress.window.losses or unevaluated)
        return progress.step == self.steps and not progress.reported and unlogged

    def _end_early(self) -> None:
        """When one process got a SIGTERM, all end, with a checkpoint if there is a step to keep."""
        if step := self.progress.step:
            self._save()
            notice("train", f"SIGTERM: ended with a checkpoint after step {step:,}")
        else:  # the optimiser has no state yet
            notice("train", "SIGTERM: ended before the first step")
        raise KeyboardInterrupt

    def _measure(self, clock: Clock, waited: float) -> None:
        """Evaluate and log the step just taken, if that is due."""
        section, step = self.section, self.progress.step
        last, decoded = step == self.steps, None
        if section.evaluate_every and (last or step % section.evaluate_every == 0):
            with clock.paused("evaluations"):
                decoded = self._evaluate()
        if decoded or last or step % section.log_every == 0:
            self._log(decoded, *clock.lap(waited, self.progress.tokens))
        self.progress = self.progress.model_copy(update={"unmeasured": False})

    def _evaluate(self) -> Decoded:
        """Decode with the head as it is, on rank 0 while the others wait.

        Its weights are stored if it is the one to export so far.
        """
        weights, progress = self.trainer.weights(), self.progress

        def decode() -> tuple[Decoded, StoredFile | None]:
            assert self.evaluator is not None, "rank 0 has an evaluator"
            decoded, file = self.evaluator.select(weights), None
            if not progress.evaluations:
                advise(decoded)
            if progress.keeps(decoded):
                file = self.checkpoints.keep_best(progress.step, weights)
            return decoded, file

        decoded, file = broadcast_from_rank0(decode)
        self.progress = progress.after_evaluation(decoded, file)
        return decoded

    def _report(self) -> None:
        """Decode the other half with the head to export; a checkpoint holds what that counted."""
        best = self.progress.best
        if best is None or self.progress.reported:
            return

        def decode() -> Decoded:
            assert self.evaluator is not None, "rank 0 has an evaluator"
            return self.evaluator.report(self.checkpoints.read_best(best))

        reported = broadcast_from_rank0(decode)
        self.progress = self.progress.model_copy(update={"reported": reported})
        self._save()

    def _log(self, decoded: Decoded | None, speed: float, waiting: float) -> None:
        """Write a line over all steps since the one before, and begin a new window.

        speed in tokens per second; waiting is the share of the time spent waiting for data.
        """
        progress, window = self.progress, self.progress.window
        means, acceptance = progress.means(), decoded.named() if decoded else {}
        sums: dict[str, float] = {}
        if window.losses:  # else the steps have their line, and τ comes after it
            budget = window.batches * self.section.batch_tokens
            aux_layers = self.trainer.model.head.shape.aux_layers
            sums = {**window.gradients(aux_layers), "fill": window.tokens / budget}
        line = {
            "step": progress.step,
            "epoch": self.data.schedule.locate(progress.batches - self._group)[0],
            **means,
            **acceptance,
            **sums,
            "lr": rate_at(progress.step - 1, self.steps, self.section),
            "tokens": progress.tokens,
            "tokens_per_second": round(speed, 1),
            "data_wait_share": round(waiting, 4),
            "peak_memory_gb": round(self.trainer.peak_memory(), 3),
        }

        def write() -> None:
            if self.metrics is not None:
                self.metrics.write(line)

        rank0_only(write)
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

    def _save(self) -> None:
        """A checkpoint; every process takes part, and rank 0 writes it."""
        state = self.trainer.state()

        def write() -> None:
            assert state is not None and self.metrics is not None, "rank 0 has both"
            epoch, index = self.data.schedule.locate(self.progress.batches)
            lines = self.metrics.publish()
            self.checkpoints.save(state, self.progress, epoch=epoch, index=index, metrics=lines)
            self.checkpoints.require_own()  # so whoever takes over goes on from this one

        broadcast_from_rank0(write)
        self._give_up_windows()


class Grace:
    """SIGTERM, as schedulers send before they kill: training ends with a checkpoint, not at once.

    SIGTERM ──► the step ends ──► all processes agree ──► checkpoint ──► KeyboardInterrupt
       └──────── grace seconds later, or at a second signal: KeyboardInterrupt at once

    While it is open, the first SIGTERM only sets `begun`. Only a main thread gets signals.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._expired = seconds, 0.0, False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def begun(self) -> bool:
        """Whether this process got a SIGTERM."""
        return self._since > 0

    def __enter__(self) -> Grace:
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGTERM: self._end_soon, signal.SIGALRM: self._end_now}
            self._before = {number: signal.signal(number, handlers[number]) for number in handlers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in self._before.items():
                signal.signal(number, handler or signal.SIG_DFL)
        if self._expired:
            limit = f"train.grace_seconds={self._seconds:g}"
            notice("train", f"no checkpoint within {limit}; the one before it remains")

    def _end_soon(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.begun:
            self._since = now
            signal.setitimer(signal.ITIMER_REAL, self._seconds)
        elif not is_launched() or now - self._since > _SAME_SIGNAL:
            raise KeyboardInterrupt

    def _end_now(self, number: int, frame: FrameType | None) -> None:
        self._expired = True
        raise KeyboardInterrupt


class Evaluator:
    """Acceptance during training: fixed held-out samples decoded with the head of each call.

        held-out sample    <user> What is 2+2? <assistant> | 4 <end>
                           └──────── request ────────────┘   the stored reply is not needed

        selecting half     decoded every train.evaluate_every steps: which head is exported
        reporting half     decoded once, with that head, after training: the τ on its card

    Decoding is greedy, so the replies are the target's own whatever the head proposes; only the
    number of rounds changes, and τ of the same head is the same number every time.

    The round in which a reply ends may emit more than the reply takes. It counts with all of it:

        limit of 8 tokens    1 │ 2 3 4 │ 5 6 │ 7 8 9 10     prefill's token, then three rounds
                                                   └──┘     beyond the limit: τ is 9 / 3, not 7 / 3

    A round is drafted and verified before the reply is known to end in it, so short replies then
    have the τ of long ones, 1 + α₁ + α₁α₂ + …; counting only what the reply takes would make every
    last round too short, by more the better the head. What follows a stop token is the target's own
    choice.
    """

    def __init__(
        self,
        target: Target,
        shape: DraftShape,
        section: TrainSection,
        held_out: Sequence[HeldOut],
        device: torch.device,
    ) -> None:
        """Load the target; the first half of `held_out` selects.

        Raises UnsupportedModel for what the decoder does not run.
        """
        contract, stop_ids = target.contract, target.template().stop_ids
        most = section.evaluate_tokens
        self._tree = section.evaluate_tree
        requests = [
            Request(f"{number} {item.sample_id}", item.prompt_ids, most, stop_ids)
            for number, item in enumerate(held_out)
        ]
        self._selecting = requests[: len(requests) // 2]
        self._reporting = requests[len(requests) // 2 :]
        self._model = DecoderModel.load(
            target.directory,
            contract.capture_layers,
            device=device,
            dtype=target.dtype,
            max_length=max(len(item.prompt_ids) for item in held_out) + most,
        )
        self._head = empty_head(shape)
        self._slots = min(_SLOTS, max(map(len, (self._selecting, self._reporting))))
        self._engine: Engine | None = None

    def select(self, weights: Mapping[str, Tensor]) -> Decoded:
        """Decode the selecting half with a head of these weights (names as in its directory)."""
        return self._decode(self._selecting, weights)

    def report(self, weights: Mapping[str, Tensor]) -> Decoded:
        """Decode the reporting half."""
        return self._decode(self._reporting, weights)

    def _decode(self, requests: Sequence[Request], weights: Mapping[str, Tensor]) -> Decoded:
        """With the weights as a head's directory stores them."""
        stored = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in weights.items()
        }
        self._head.load_state_dict(stored)
        drafting = algorithm_of(self._head).drafting
        drafter = drafting.make_drafter(self._head, self._model, self._tree)
        if self._engine is None:
            self._engine = Engine(self._model, drafter=drafter, slots=self._slots)
        else:  # on a GPU another engine would capture all its rounds anew
            assert self._engine.drafter is not None
            copy_weights(drafter, self._engine.drafter)
        done: dict[str, Statistics] = {}
        for completion in self._engine.generate(requests):
            if error := completion.error:
                sample_id = completion.request_id.partition(" ")[2]
                raise TargetError(error.what, where=f"held-out sample {sample_id}", fix=error.fix)
            done[completion.request_id] = completion.statistics
        return count([done[request.request_id] for request in requests])


def count(statistics: Sequence[Statistics]) -> Decoded:
    """What requests emitted, a last round's tokens beyond the end included."""
    return Decoded(
        tokens=tuple(sum(each.reached) for each in statistics),
        rounds=tuple(each.rounds for each in statistics),
        alpha=pool_acceptance(statistics).alpha,
    )


def advise(decoded: Decoded) -> None:
    """Print how many samples a precise τ takes, if this one is not; errors fall as 1/√samples."""
    error, samples = decoded.tau_error, len(decoded.rounds)
    if error > PRECISE:
        needed = math.ceil(samples * (error / PRECISE) ** 2)
        tau = f"τ of {samples} held-out samples is {decoded.tau:.2f} with a standard error of"
        fix = f"train.evaluate_prompts of about {needed:,} would make it {PRECISE}"
        notice("train", f"{tau} {error:.2f}; {fix}")
