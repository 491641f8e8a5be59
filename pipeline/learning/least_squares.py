"""Ridge regression on batches, its strength chosen on labels that were not solved on.

    batches    0  1  2  3  4  5  6  7 │ 8  9 …
               ·  h  ·  ·  ·  ·  ·  · │ ·  h        h  held out: 1, 9, 17, …

    1  sums of the others, a solution for each strength
    2  the held-out ones: the error of each solution; then they join the sums
    3  the best strength once more, on all

Σ x xᵀ is symmetric, so it is summed above its diagonal alone. Where many numbers are predicted,
steps 1 and 2 look at some of them, evenly spread: a strength is one for all.

In-sample error says little: with 131,072 tokens a regression of four times 4,096 numbers explains
two thirds of what it was solved on and half of what it was not.

Shapes: R rows of a batch, P regressors, Q numbers to predict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.errors import DataError
from pipeline.learning.batches import Schedule, TrainBatch, read_batch
from pipeline.learning.corpus import Corpus

#: Labels for each regressor of the linear part: with fewer, it is too much that of the sample.
ROWS_PER_REGRESSOR = 30


def labels_needed(hidden_size: int) -> int:
    """Labels that the linear part is solved on, if there are as many: it has 4·H regressors."""
    return ROWS_PER_REGRESSOR * 4 * hidden_size


class FirstBatches:
    """The batches that training begins with, until they have so many tokens, or labels.

    Of the first pass only: the next one's labels are the same. Read anew each time.
    """

    def __init__(
        self, corpus: Corpus, schedule: Schedule, *, tokens: int | None = None, labels: int = 0
    ) -> None:
        self._corpus, self._schedule = corpus, schedule
        self._tokens, self._labels = tokens, labels

    def __iter__(self) -> Iterator[TrainBatch]:
        tokens = labels = 0
        first, _ = self._schedule.locate(0)
        for number in range(len(self._schedule)):
            enough = labels >= self._labels if self._tokens is None else tokens >= self._tokens
            if enough or self._schedule.locate(number)[0] > first:
                break
            batch = read_batch(self._corpus, self._schedule.batch(number))
            tokens, labels = tokens + batch.trained_tokens, labels + len(batch.labels)
            yield batch


#: labels → the first batches of the training that hold so many.
BatchesOf = Callable[[int], FirstBatches]


#: Strengths that are tried, in shares of a regressor's mean square times the rows. The last leaves
#: next to nothing of a solution that only holds for its own rows.
STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0)


#: The one where nothing can be held out.
DEFAULT_STRENGTH = 1e-2


#: One batch of so many is held out.
_HELD_OUT = 8


#: Share of a sum of squares above which a variance is more than rounding.
_VARIES = 1e-6


#: Numbers to predict that strengths are compared by, at most.
_COMPARED = 1024


#: Rows of Σ x xᵀ that are summed, and columns that are solved, at one time.
_BLOCK = 1024


#: Regressors [R, P] and what they are to predict [R, Q], of a batch.
Rows = Callable[[TrainBatch], tuple[Tensor, Tensor]]


class Ridge(NamedTuple):
    """A solution."""

    weights: Tensor  # [P, Q]: prediction = x @ weights
    moments: Tensor  # [P, P], mean of x xᵀ
    rows: int
    held_out: int  # rows of them; 0: there was one batch only, and what follows is in-sample
    strength: float
    explained: float  # share of the variance, of held-out rows
    cosine: float  # between prediction and truth, over held-out rows together


class _Sums:
    """Σ x xᵀ, above its diagonal alone, and Σ x yᵀ, in the rows' own type."""

    def __init__(self) -> None:
        self.gram, self.cross = torch.zeros(()), torch.zeros(())
        self.rows = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """With more rows."""
        if not self.rows:
            self.gram = x.new_zeros(x.shape[1], x.shape[1])
            self.cross = x.new_zeros(x.shape[1], y.shape[1])
        for rows in self._blocks():
            right = slice(rows.start, None)
            self.gram[rows, right].addmm_(x[:, rows].T, x[:, right])
        self.cross.addmm_(x.T, y)
        self.rows += len(x)

    def solve(self, strength: float, columns: slice = slice(None)) -> Tensor:
        """Weights [P, those columns of Q]. Each regressor is scaled to a mean square of about 1.

        One P by P in float64 is all that this takes: by columns, LAPACK factors where the numbers
        lie.
        """
        spread = (self.gram.diagonal().double() / self.rows).sqrt() + 1e-3  # [P]
        # Now below the diagonal. Widened first: else both operands would be, beside the result.
        factor = self.gram.double().div_(spread).mT.div_(spread)
        factor.diagonal().add_(strength * self.rows)
        torch.linalg.cholesky(factor, out=factor)  # L
        cross = self.cross[:, columns]
        weights = torch.empty_like(cross)
        # One block in float64, by columns and solved where it lies. What divides or multiplies
        # float32 by float64 would widen all of it, the result as well.
        block = factor.new_empty(min(_BLOCK, cross.shape[1]), len(cross))
        for start in range(0, cross.shape[1], _BLOCK):
            some = slice(start, start + _BLOCK)
            right = block[: cross[:, some].shape[1]].copy_(cross[:, some].mT).div_(spread).mT
            torch.linalg.solve_triangular(factor, right, upper=False, out=right)
            torch.linalg.solve_triangular(factor.mT, right, upper=True, out=right)
            weights[:, some].copy_(right.mT.div_(spread).mT)
        return weights

    def moments(self) -> Tensor:
        """Mean of x xᵀ, whole, in the place of its sum."""
        for rows in self._blocks():
            self.gram[rows.stop :, rows] = self.gram[rows, rows.stop :].T
        return self.gram.div_(self.rows)

    def _blocks(self) -> list[slice]:
        return [slice(start, start + _BLOCK) for start in range(0, len(self.gram), _BLOCK)]


class _Error:
    """How well one solution predicts rows."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.squares = self.product = self.predicted = 0.0  # Σ |y|², Σ <y, p>, Σ |p|²
        self.total, self.rows = torch.zeros(()), 0  # Σ y [Q]

    def add(self, x: Tensor, y: Tensor) -> None:
        prediction = x @ self.weights
        self.squares += float(y.square().sum())
        self.product += float((y * prediction).sum())
        self.predicted += float(prediction.square().sum())
        self.total = self.total.to(y) + y.sum(0)
        self.rows += len(x)

    @property
    def rest(self) -> float:
        """Σ |y - p|²."""
        return self.squares - 2 * self.product + self.predicted

    @property
    def explained(self) -> float:
        """Share of the variance; none where what is to be predicted does not vary."""
        variance = self.squares - float(self.total.square().sum()) / max(1, self.rows)
        return 1 - self.rest / variance if variance > _VARIES * self.squares else 0.0

    @property
    def cosine(self) -> float:
        size = math.sqrt(self.squares * self.predicted)
        return self.product / size if size else 0.0


def solve_ridge(batches: Iterable[TrainBatch], rows_of: Rows) -> Ridge:
    """The regression with the least error on held-out rows; `batches` are gone through twice.

    Raises DataError for states that are not finite, and without rows.
    """
    sums = _sum_others(batches, rows_of)
    compared = slice(None, None, -(-sums.cross.shape[1] // _COMPARED))
    errors = {strength: _Error(sums.solve(strength, compared)) for strength in STRENGTHS}
    held_out = _add_held_out(batches, rows_of, sums, errors.values(), compared)
    if held_out:
        strength = min(STRENGTHS, key=lambda strength: errors[strength].rest)
    else:
        strength = DEFAULT_STRENGTH
        for batch in batches:
            x, y = rows_of(batch)
            errors[strength].add(x, y[:, compared])
    chosen, weights, moments = errors[strength], sums.solve(strength), sums.moments()
    return Ridge(weights, moments, sums.rows, held_out, strength, chosen.explained, chosen.cosine)


def _sum_others(batches: Iterable[TrainBatch], rows_of: Rows) -> _Sums:
    """The rows that are not held out.

    A function of its own, so that the last batch is gone before the first P by P in float64.
    """
    sums = _Sums()
    for number, batch in enumerate(batches):
        if not _is_held_out(number):
            sums.add(*_finite(batch, rows_of))
    if not sums.rows:
        fix = "train on longer replies, or with a random start: train.head_config.init_layer=random"
        raise DataError("no label teaches one of the heads", where="train, least squares", fix=fix)
    return sums


def _add_held_out(
    batches: Iterable[TrainBatch],
    rows_of: Rows,
    sums: _Sums,
    errors: Iterable[_Error],
    compared: slice,
) -> int:
    """The rows that were held out: each solution's error, then their part of the sums.

    A function of its own, as above.
    """
    rows = 0
    for number, batch in enumerate(batches):
        if _is_held_out(number):
            x, y = _finite(batch, rows_of)
            for error in errors:
                error.add(x, y[:, compared])
            sums.add(x, y)
            rows += len(x)
    return rows


def _finite(batch: TrainBatch, rows_of: Rows) -> tuple[Tensor, Tensor]:
    x, y = rows_of(batch)
    if not bool(torch.isfinite(x.sum() + y.sum())):
        fix = "look at these samples, and run `eagle3 features --force`"
        raise DataError("states are not finite", where=batch.where, fix=fix)
    return x, y


def _is_held_out(number: int) -> bool:
    return number % _HELD_OUT == 1
