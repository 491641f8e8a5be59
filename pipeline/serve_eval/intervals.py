"""Acceptance of a group of requests from their counters, with intervals.

    pooled       Σ tokens / Σ rounds            conditional   accepted[k] / accepted[k-1]
    by request   mean of tokens / rounds        joint         accepted[k] / rounds

Intervals draw *prompts* with replacement, not requests: the turns of a prompt, or its replies at
several temperatures, are alike, and counting them as independent would make intervals too small.
The draws are the same in every call with the same prompts, in whatever order their replies came
in, so that figures of the same prompts can be compared draw by draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.reports import AcceptanceFigures, Estimate, Percentiles, RoundCounters

DRAWS = 2_000
_SEED = 0
#: 97.5 % of the normal distribution lie below.
_Z = 1.959964

_Floats = npt.NDArray[np.float64]


def percentiles(values: Sequence[float]) -> Percentiles:
    """Mean and percentiles; zeros without values."""
    if not values:
        return Percentiles(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
    return Percentiles(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


def acceptance_figures(
    counters: Sequence[RoundCounters], prompts: Sequence[str]
) -> AcceptanceFigures | None:
    """Acceptance over requests, given the prompt of each; None where none has rounds."""
    rows = [(each, name) for each, name in zip(counters, prompts, strict=True) if each.rounds]
    if not rows:
        return None
    depth = max(len(each.accepted) for each, _ in rows)
    # Of a request: rounds, tokens, 1, τ, accepted at 1…depth.
    table = [
        (each.rounds, each.tokens, 1, each.acceptance_length, *each.accepted) for each, _ in rows
    ]
    padded = [[*row, *[0] * (4 + depth - len(row))] for row in table]
    sums = drawn_sums(np.array(padded, float), [name for _, name in rows])  # [1 + DRAWS, 4 + D]
    rounds, tokens, requests, ratios = sums[:, :4].T
    reached = np.hstack([rounds[:, None], sums[:, 4:]])  # [1 + DRAWS, 1 + D]
    drawn = len({name for _, name in rows})
    drafted = sum(each.drafted for each, _ in rows)
    accepted = sum(each.accepted_tokens for each, _ in rows)
    return AcceptanceFigures(
        requests=len(rows),
        rounds=int(rounds[0]),
        acceptance_length=estimate(tokens / rounds, drawn),
        request_acceptance_length=estimate(ratios / requests, drawn),
        conditional=tuple(
            _ratio(reached[:, k], reached[:, k - 1], drawn) for k in range(1, depth + 1)
        ),
        joint=tuple(_ratio(reached[:, k], rounds, drawn) for k in range(1, depth + 1)),
        accept_rate=accepted / drafted if drafted else 0.0,
    )


def drawn_sums(rows: _Floats, prompts: Sequence[str]) -> _Floats:
    """Sums of `rows` [R, C] over all requests, and below over draws of prompts: [1 + DRAWS, C]."""
    names = sorted(set(prompts))
    place = {name: index for index, name in enumerate(names)}
    by_prompt = np.zeros((len(names), rows.shape[1]))
    np.add.at(by_prompt, [place[name] for name in prompts], rows)
    random = np.random.default_rng(_SEED)
    weights = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=DRAWS)
    return np.vstack([by_prompt.sum(0), weights @ by_prompt])


def estimate(figures: _Floats, prompts: int) -> Estimate:
    """The figure, which is the first entry, and the middle 95 % of its draws, the others.

    Draws of few prompts vary too little: the ends are moved out as Student's t lies outside of the
    normal distribution, and as a sample's deviation does outside of its draws'.
    """
    value = float(figures[0])
    low, high = (float(end) for end in np.quantile(figures[1:], (0.025, 0.975)))
    wider = _wider(prompts)
    return Estimate(
        value=value, low=value - wider * (value - low), high=value + wider * (high - value)
    )


def student(free: int) -> float:
    """t at 97.5 % with `free` degrees of freedom, by its series in 1 / free (Abramowitz and Stegun,
    26.7.5)."""
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return float(_Z + first / free + second / free**2 + third / free**3)


def _wider(prompts: int) -> float:
    """t / z · sqrt(n / (n - 1)) at 97.5 %."""
    free = max(prompts - 1, 1)
    return float(student(free) / _Z * np.sqrt((free + 1) / free))


def _ratio(above: _Floats, below: _Floats, prompts: int) -> Estimate:
    """A share with its interval; draws without a case to count are left out."""
    known = below > 0
    share = estimate(above[known] / below[known], prompts)
    return Estimate(value=share.value, low=max(share.low, 0.0), high=min(share.high, 1.0))
