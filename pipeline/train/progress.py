"""How far training is and what it has measured: what a checkpoint restores beside the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from pipeline.records import Arithmetic, Record, StoredFile

#: Of one head over another, in standard errors: noise alone gives more in one case of twenty.
SURE = 1.645


class Decoded(Record):
    """What a head's evaluation counted, request by request, in the order of the held-out samples.

        request             1    2    3
        tokens of rounds   47   12   48       τ = 107 / 48, over all rounds
        rounds             20    7   21

    Requests are what was drawn, so errors are reckoned over them: the rounds of one reply are not
    independent. Two heads decode the same requests, and what is hard for one is hard for the other:
    the error of their difference is that of a paired comparison, a fraction of either's own.
    """

    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    alpha: tuple[float, ...]  # α_k, k = 1…, over all rounds

    @property
    def tau(self) -> float:
        """0 without rounds."""
        return sum(self.tokens) / max(1, sum(self.rounds))

    @property
    def tau_error(self) -> float:
        """Standard error of τ, a ratio of sums over the requests (delta method)."""
        return _error(self._influences())

    def surely_beats(self, other: Decoded) -> bool:
        """Whether τ on the same requests is higher by more than chance explains."""
        pairs = zip(self._influences(), other._influences(), strict=True)
        return self.tau - other.tau > SURE * _error(ours - theirs for ours, theirs in pairs)

    def named(self) -> dict[str, float]:
        """tau, tau_se, alpha_1, alpha_2, …: as metrics name them."""
        alphas = {f"alpha_{k}": value for k, value in enumerate(self.alpha, 1)}
        return {"tau": self.tau, "tau_se": self.tau_error, **alphas}

    def _influences(self) -> list[float]:
        """By how much each request moves τ."""
        tau, rounds = self.tau, max(1, sum(self.rounds))
        pairs = zip(self.tokens, self.rounds, strict=True)
        return [(tokens - tau * count) / rounds for tokens, count in pairs]


class StepSums(NamedTuple):
    """One optimiser step, over all processes."""

    loss: float  # of all its labels
    gradient_norm: float  # before clipping
    hits: tuple[int, ...]  # K; labels whose token the head proposes first
    predicted: tuple[int, ...]  # K; labels that step k predicts
    tokens: int
    labels: int
    coarse_rows: int  # states of one token and layer, of which int8 kept less than half
    sigterms: int  # processes that got one


class Window(Record):
    """Sums since the last line of metrics."""

    losses: tuple[float, ...] = ()  # of each optimiser step
    gradient_norms: tuple[float, ...] = ()  # likewise, before clipping
    clipped: int = 0  # steps whose gradient was shortened
    hits: tuple[int, ...] = ()  # per step of the unroll
    rows: tuple[int, ...] = ()  # likewise: labels that the step predicts
    tokens: int = 0
    coarse_rows: int = 0  # states of a token and layer that int8 holds badly
    batches: int = 0  # over all processes, however many there were

    def extended(self, sums: StepSums, *, batches: int, clipped: bool) -> Window:
        """With one more optimiser step."""
        none = (0,) * len(sums.hits)
        return Window(
            losses=(*self.losses, sums.loss),
            gradient_norms=(*self.gradient_norms, sums.gradient_norm),
            clipped=self.clipped + clipped,
            hits=tuple(a + b for a, b in zip(self.hits or none, sums.hits, strict=True)),
            rows=tuple(a + b for a, b in zip(self.rows or none, sums.predicted, strict=True)),
            tokens=self.tokens + sums.tokens,
            coarse_rows=self.coarse_rows + sums.coarse_rows,
            batches=self.batches + batches,
        )

    def means(self) -> dict[str, float]:
        """Mean loss, and accuracy of each step of the unroll: loss, acc_0, acc_1, …"""
        steps = enumerate(zip(self.hits, self.rows, strict=True))
        accuracies = {f"acc_{k}": hits / max(labels, 1) for k, (hits, labels) in steps}
        return {"loss": sum(self.losses) / len(self.losses), **accuracies}

    def gradients(self, aux_layers: int) -> dict[str, float]:
        """Mean and greatest norm of a step's gradient, share of the steps that were clipped, and
        share of the aux states, of so many layers, that int8 holds badly."""
        norms = self.gradient_norms
        return {
            "gradient_norm": sum(norms) / len(norms),
            "gradient_norm_max": max(norms),
            "clipped_share": self.clipped / len(norms),
            "coarse_rows_share": self.coarse_rows / (aux_layers * self.tokens),
        }


class Best(Record):
    """The head to export so far: the latest that none before it surely beats."""

    step: int
    measured: dict[str, float]  # loss and accuracies of the line of metrics that carries it
    file: StoredFile  # its head


class Progress(Record):
    """How far training is."""

    step: int = 0  # optimiser steps taken
    batches: int = 0  # read, over all epochs and processes; the next one has this number
    tokens: int = 0  # read, over all epochs and processes
    labels: int = 0  # of them predicted at step 0
    window: Window = Window()
    last: dict[str, float] = Field(default_factory=dict)  # the last line of metrics
    unmeasured: bool = False  # the last step's evaluation and line of metrics, if due, are to come
    evaluations: int = 0
    evaluated: int = 0  # step of the last one
    best: Best | None = None
    highest: Decoded | None = None  # of all evaluations, by τ
    reported: Decoded | None = None  # of `best`, by samples that took no part in choosing it
    fc_scale: float | None = None  # of the learning rate of `fc`; measured before the first step
    #: What steps were computed with; several when training was continued on another machine.
    arithmetic: tuple[Arithmetic, ...] = ()

    def computed_with(self, arithmetic: Arithmetic) -> Progress:
        """With what the following steps are computed with."""
        if arithmetic in self.arithmetic:
            return self
        return self.model_copy(update={"arithmetic": (*self.arithmetic, arithmetic)})

    def after_step(self, sums: StepSums, *, batches: int, clipped: bool) -> Progress:
        """One optimiser step further, which took so many batches over all processes."""
        changes = {
            "step": self.step + 1,
            "batches": self.batches + batches,
            "tokens": self.tokens + sums.tokens,
            "labels": self.labels + sums.labels,
            "window": self.window.extended(sums, batches=batches, clipped=clipped),
            "unmeasured": True,
        }
        return self.model_copy(update=changes)

    def means(self) -> dict[str, float]:
        """Loss and accuracies since the last line of metrics, or its own when no step was taken."""
        if self.window.losses:
            return self.window.means()
        return {name: self.last[name] for name in self.last if name.startswith(("loss", "acc_"))}

    def keeps(self, decoded: Decoded) -> bool:
        """Whether its head is the one to export so far."""
        return self.highest is None or not self.highest.surely_beats(decoded)

    def after_evaluation(self, decoded: Decoded, file: StoredFile | None = None) -> Progress:
        """One evaluation further; `file` is that of its head when it is kept."""
        higher = self.highest is None or decoded.tau > self.highest.tau
        best = file and Best(step=self.step, measured=self.means(), file=file)
        changes = {
            "evaluations": self.evaluations + 1,
            "evaluated": self.step,
            "best": best or self.best,
            "highest": decoded if higher else self.highest,
        }
        return self.model_copy(update=changes)


def _error(influences: Iterable[float]) -> float:
    """Standard error of a figure that each of two requests or more moves by so much."""
    squares = [each * each for each in influences]
    return math.sqrt(len(squares) / (len(squares) - 1) * math.fsum(squares))
