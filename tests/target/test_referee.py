"""The figures of replies against plain sums in float64."""

from __future__ import annotations

import pytest
import torch

from pipeline.records import Sample, SamplingParams
from pipeline.target.agreement import Agreement, problem_of
from pipeline.target.referee import Referee
from tests.features.conftest import sample_of

VOCABULARY, HIDDEN = 300, 16


def sample(ids: list[int], sampling: SamplingParams, name: str = "a") -> Sample:
    return sample_of(0, ids, [(1, len(ids))], sampling=sampling, sample_id=name)


def referee(rows: torch.Tensor, scale: float = 1.0) -> Referee:
    return Referee(rows, scale=scale, parameters=10**6, stop_ids=(VOCABULARY,), shards=1)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 0),
        (0.6, 0.9, 0),
        (2.0, 1.0, 20),
        (0.6, 0.3, 20),
        (1.0, 0.9, VOCABULARY),
        (2.0, 0.3, 1),
    ],
)
def test_drawn_tokens_against_float64(temperature: float, top_p: float, top_k: int) -> None:
    """Top-k first, then top-p of what is left, as the decoder and servers draw."""
    generator = torch.Generator().manual_seed(top_k + int(10 * top_p))
    rows = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    final = torch.randn(40, HIDDEN, generator=generator)
    ids = torch.randint(0, VOCABULARY, (40,), generator=generator)
    log_p, expected, variance, outside = 0.0, 0.0, 0.0, 0
    for state, token in zip(final.double(), ids.tolist(), strict=True):
        p = (rows.double() @ state * 0.5 / temperature).softmax(0)
        order = p.argsort(descending=True)[: top_k or None]
        p = p[order] / p[order].sum()
        kept = order[(p.cumsum(0) - p) < top_p]
        q = p[: len(kept)] / p[: len(kept)].sum()
        if token not in kept.tolist():
            outside += 1
            continue
        log_p += float(q[kept.tolist().index(token)].log())
        expected += float((q * q.log()).sum())
        variance += float((q * q.log().square()).sum() - (q * q.log()).sum().square())
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=64)
    (own,) = referee(rows, scale=0.5).score(
        [sample([0, *ids.tolist()], sampling)], [range(1, 41)], final, gap_steps=0.0
    )
    assert (own.drawn, own.outside, own.greedy) == (40, outside, 0)
    sums = own.log_probability, own.expected, own.variance
    assert sums == pytest.approx((log_p, expected, variance), rel=1e-4, abs=1e-4)


def test_greedy_tokens_by_their_gap() -> None:
    """The best one, one within the gap, and one beyond it."""
    rows = torch.eye(4, HIDDEN)
    final = torch.tensor([[10.0, 9.99, 5.0, 0.0]]).repeat(3, 1)
    final = torch.cat((final, torch.zeros(3, HIDDEN - 4)), dim=1)
    greedy = SamplingParams(temperature=0, top_p=1, top_k=0, max_new_tokens=8)
    (own,) = referee(rows).score([sample([3, 0, 1, 2], greedy)], [[1, 2, 3]], final, gap_steps=6.0)
    assert (own.greedy, own.best, own.near, own.beyond) == (3, 1, 1, 1)


def test_which_tokens_are_scored_does_not_depend_on_the_reply() -> None:
    """A place is scored or not whatever comes after it, or the mean would be biased."""
    judge = referee(torch.zeros(VOCABULARY, HIDDEN))
    warm = SamplingParams(temperature=1, top_p=1, top_k=0, max_new_tokens=64)
    long, short = sample([0] * 60, warm), sample([0] * 25, warm)
    places = judge.positions(long, 7)
    assert judge.positions(short, 7) == [place for place in places if place < 25]
    others = [judge.positions(sample([0] * 60, warm, str(n)), 7)[0] for n in range(40)]
    assert set(others) == set(range(1, 8))


@pytest.mark.parametrize(
    ("pooled", "says"),
    [
        (Agreement(greedy=1000, best=990, near=6), ""),
        (Agreement(greedy=1000, best=990, near=2), "0.8% of 1,000 greedy"),
        (Agreement(drawn=1000, outside=9, variance=900.0), "0.9% of 1,000 drawn"),
        (Agreement(drawn=1000, log_probability=-900, expected=-1000, variance=300.0), "colder"),
        (Agreement(drawn=1000, log_probability=-1100, expected=-1000, variance=300.0), "hotter"),
        (Agreement(drawn=1000, log_probability=-1080, expected=-1000, variance=300.0), ""),
        (Agreement(greedy=10, best=10, unended=1), "do not end where"),
    ],
)
def test_what_pooled_figures_prove(pooled: Agreement, says: str) -> None:
    problem = problem_of(pooled)
    assert (says in problem) if says else not problem
    assert pooled.unended or not problem_of(pooled, most_beyond=1.0)
