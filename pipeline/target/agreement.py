"""How far replies agree with the teacher: sums over their tokens, and what they prove.

`referee.py` scores the tokens. There is no torch here: a stage finishes without it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

#: Allowed gap, in steps of bfloat16 (`referee.py`): so many times what noise of one step at every
#: layer moves the final states by, and no less than so many.
GAP_PER_GAIN, LEAST_GAP = 2.5, 6.0
#: Share of the greedy tokens beyond the gap, or of the drawn ones outside top-p and top-k, above
#: which replies are another model's: of dense targets, and of mixtures of experts, where a near-tie
#: between experts changes a whole layer. And how many there must be at least.
MOST_BEYOND, MOST_BEYOND_OF_CHAOTIC, LEAST_BEYOND = 0.005, 0.15, 3
#: A target with a larger gap amplifies noise so much that its tails are long.
CHAOTIC_GAP = 40.0
#: The mean log-probability of drawn tokens may differ from the expected one by so many standard
#: errors, or by so many nats at temperature 1; noise of logits enters as its square over T².
MOST_ERRORS, LEAST_NATS = 5.0, 0.03
#: Fewer drawn tokens have no mean that could be trusted.
_LEAST_DRAWN = 64
#: One sample by itself is refused for far coarser differences only: there are many of them.
_SAMPLE_LEAST, _SAMPLE_BEYOND, _SAMPLE_NATS, _SAMPLE_ERRORS = 16, 0.3, 1.5, 8.0
#: What makes replies another model's than the teacher, as errors say it.
CAUSES = (
    "check what answered: its weights (other revision, LoRA, quantisation), chat template, rope "
    "settings, end tokens and sampling settings; or a target whose files have changed since; then "
    "make the samples again with `eagle3 synth --force`"
)


@dataclass(frozen=True)
class Agreement:
    """Sums over scored reply tokens: of a sample, a shard or a stage."""

    greedy: int = 0
    best: int = 0  # of them the teacher's best token
    near: int = 0  # of them not the best, within the gap
    drawn: int = 0
    outside: int = 0  # of them below top-k or top-p, by more than the gap
    log_probability: float = 0.0  # of the drawn tokens inside, at their temperature and top-p
    expected: float = 0.0  # what draws from the teacher would have
    variance: float = 0.0  # of that sum
    allowance: float = 0.0  # nats that arithmetic may move the sum by
    unended: int = 0  # replies that go on after an end token, or claim to have ended without one

    def __add__(self, other: Agreement) -> Agreement:
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in _SUMS}
        return Agreement(**{name: a + b for name, (a, b) in pairs.items()})

    @classmethod
    def read(cls, values: dict[str, Any]) -> Agreement:
        """From `as_tally`."""
        return cls(**{each.name: values[each.name] for each in _SUMS if each.name in values})

    def as_tally(self) -> dict[str, Any]:
        """As JSON, rounded so that it is short."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
            if value
        }

    @property
    def beyond(self) -> int:
        """Greedy tokens beyond the gap."""
        return self.greedy - self.best - self.near

    @property
    def excess(self) -> float:
        """Mean log-probability of the drawn tokens above what is expected, in nats."""
        inside = self.drawn - self.outside
        return (self.log_probability - self.expected) / inside if inside else 0.0

    @property
    def standard_error(self) -> float:
        """Of `excess`, in nats."""
        inside = self.drawn - self.outside
        return self.variance**0.5 / inside if inside else 0.0

    @property
    def distance(self) -> float:
        """How far from the teacher, to compare samples with one another."""
        greedy = self.beyond / self.greedy if self.greedy else 0.0
        outside = self.outside / self.drawn if self.drawn else 0.0
        return self.unended + greedy + outside + abs(self.excess)

    def figures(self) -> dict[str, Any]:
        """What manifest, audit and report say."""
        figures: dict[str, Any] = {}
        if self.greedy:
            figures |= {
                "greedy_tokens": self.greedy,
                "best_share": round(self.best / self.greedy, 6),
                "within_gap_share": round((self.best + self.near) / self.greedy, 6),
            }
        if self.drawn:
            inside = max(1, self.drawn - self.outside)
            figures |= {
                "drawn_tokens": self.drawn,
                "outside_share": round(self.outside / self.drawn, 6),
                "mean_log_probability": round(self.log_probability / inside, 4),
                "expected_log_probability": round(self.expected / inside, 4),
                "standard_error": round(self.standard_error, 4),
            }
        return figures


_SUMS = fields(Agreement)
COLUMNS = [each.name for each in _SUMS if each.name != "unended"]
REAL = ("log_probability", "expected", "variance", "allowance")


def problem_of(pooled: Agreement, most_beyond: float = MOST_BEYOND) -> str:
    """Why pooled replies are not the teacher's, with a figure; empty where they are.

    `most_beyond` is a share as MOST_BEYOND; at 1 only ends of replies are judged.
    """
    if pooled.unended:
        return f"{pooled.unended} replies do not end where an end token is"
    if pooled.beyond >= LEAST_BEYOND and pooled.beyond > most_beyond * pooled.greedy:
        share = pooled.beyond / pooled.greedy
        return (
            f"{share:.1%} of {pooled.greedy:,} greedy reply tokens lie below the teacher's best by "
            f"more than arithmetic explains (at most {most_beyond:.1%}); "
            f"{pooled.best / pooled.greedy:.1%} are its best"
        )
    if pooled.outside >= LEAST_BEYOND and pooled.outside > most_beyond * pooled.drawn:
        share = pooled.outside / pooled.drawn
        return (
            f"{share:.1%} of {pooled.drawn:,} drawn reply tokens lie outside the top-p and top-k "
            f"that the sample names (at most {most_beyond:.1%})"
        )
    excess, error, inside = pooled.excess, pooled.standard_error, pooled.drawn - pooled.outside
    allowed = max(pooled.allowance / max(1, inside), MOST_ERRORS * error)
    if inside >= _LEAST_DRAWN and abs(excess) > allowed and most_beyond < 1:
        mean, expected = pooled.log_probability / inside, pooled.expected / inside
        return (
            f"{inside:,} drawn reply tokens have a mean log-probability of {mean:.3f} where "
            f"{expected:.3f} ± {error:.3f} is expected: "
            + ("colder" if excess > 0 else "hotter")
            + " than the sampling that the sample names, or of another model"
        )
    return ""


def problem_of_sample(sums: Agreement, most_beyond: float = MOST_BEYOND) -> str:
    """As `problem_of` for one sample, where differences of a few tokens prove nothing."""
    if sums.unended:
        return "a reply does not end where an end token is"
    if most_beyond >= 1:
        return ""
    most = max(_SAMPLE_BEYOND, 3 * most_beyond)
    if sums.greedy >= _SAMPLE_LEAST and sums.beyond > most * sums.greedy:
        return (
            f"{sums.beyond} of {sums.greedy} greedy reply tokens lie below the teacher's best by "
            "more than arithmetic explains"
        )
    if sums.drawn >= _SAMPLE_LEAST and sums.outside > most * sums.drawn:
        return (
            f"{sums.outside} of {sums.drawn} drawn reply tokens lie outside the top-p and top-k "
            "that the sample names"
        )
    error = sums.standard_error
    if sums.drawn >= _SAMPLE_LEAST and -sums.excess > max(_SAMPLE_NATS, _SAMPLE_ERRORS * error):
        return (
            f"the mean log-probability of {sums.drawn} drawn reply tokens is {-sums.excess:.2f} "
            f"nats below what is expected (± {error:.2f})"
        )
    return ""
