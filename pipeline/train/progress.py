"""How far training is and what it has measured: what a checkpoint restores beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Field

from pipeline.decoder.request import Acceptance
from pipeline.records import Arithmetic, Record

#: Bytes and SHA-256 of a file.
StoredFile = tuple[int, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


class Sums(Protocol):
    """Of one optimiser step."""

    @property
    def loss(self) -> float: ...
    @property
    def gradient_norm(self) -> float: ...
    @property
    def hits(self) -> Sequence[int]: ...
    @property
    def predicted(self) -> Sequence[int]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def coarse_rows(self) -> int: ...


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

    def extended(self, sums: Sums, *, batches: int, clipped: bool) -> Window:
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

    def gradients(self) -> dict[str, float]:
        """Mean and greatest norm of a step's gradient, share of the steps that were clipped, and
        share of the aux states that int8 holds badly."""
        norms = self.gradient_norms
        return {
            "gradient_norm": sum(norms) / len(norms),
            "gradient_norm_max": max(norms),
            "clipped_share": self.clipped / len(norms),
            "coarse_rows_share": self.coarse_rows / (3 * self.tokens),
        }


class Best(Record):
    """The evaluation with the highest τ so far, the earlier one of two that are equal."""

    step: int
    tau: float
    alpha: tuple[float, ...]  # α_k, k = 1…
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
    stale: int = 0  # evaluations since the best one
    best: Best | None = None
    #: What steps were computed with; several when training was continued on another machine.
    arithmetic: tuple[Arithmetic, ...] = ()

    def computed_with(self, arithmetic: Arithmetic) -> Progress:
        """With what the following steps are computed with."""
        if arithmetic in self.arithmetic:
            return self
        return self.model_copy(update={"arithmetic": (*self.arithmetic, arithmetic)})

    def after_step(self, *, batches: int, tokens: int, labels: int, window: Window) -> Progress:
        """One optimiser step over so many batches, tokens and labels further."""
        changes = {
            "step": self.step + 1,
            "batches": self.batches + batches,
            "tokens": self.tokens + tokens,
            "labels": self.labels + labels,
            "window": window,
            "unmeasured": True,
        }
        return self.model_copy(update=changes)

    def is_best(self, acceptance: Acceptance) -> bool:
        """Whether τ is higher than ever."""
        return self.best is None or acceptance.tau > self.best.tau

    def after_evaluation(self, acceptance: Acceptance, file: StoredFile | None = None) -> Progress:
        """One evaluation further; `file` is that of its head when it is the best so far."""
        changes = {"evaluations": self.evaluations + 1, "stale": self.stale + 1}
        if file is None:
            return self.model_copy(update=changes)
        best = Best(
            step=self.step,
            tau=acceptance.tau,
            alpha=acceptance.alpha,
            measured=self.window.means(),
            file=file,
        )
        return self.model_copy(update={**changes, "stale": 0, "best": best})
