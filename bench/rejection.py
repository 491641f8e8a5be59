"""Verification by rejection, with the probabilities that drafts were drawn with: the rival of
drafts that share the target's noise (docs/decoder.md, "Losslessness"), see `bench.sampling`.

V is the vocabulary; p, q [V] are the target's and the head's distribution after the same tokens.
Nothing here is drawn: a verdict is the chance of every outcome, so tests add up the law of the
emitted tokens, exactly.

    tree      root ─┬─ b ── a     siblings are drawn from q without replacement, and verified in
                    └─ a          the order of the draw; a slot is where one may be drawn
    chain     root ── b ── a      verified as a whole
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """n + 1 outcomes: the chance of each [n + 1], and what the next token is drawn from [n + 1, V].

    Of n siblings: one of them is accepted, which decides nothing after it yet, or, last, none. Of a
    chain of n: exactly so many are accepted.
    """

    chances: Tensor
    following: Tensor


def verify_siblings(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    """Recursive rejection (SpecInfer, arXiv:2305.09781; without replacement as in Sequoia,
    arXiv:2402.12374): a sibling is accepted by min(1, p / q); otherwise p becomes the rest of p
    that q did not offer, and q what it is without the sibling."""
    chances, left = [], torch.ones((), dtype=p.dtype)
    for token in drawn:
        accepted = (p[token] / q[token]).clamp(max=1)
        chances.append(left * accepted)
        left = left * (1 - accepted)
        p = normalised((p - q).clamp(min=0))
        q = normalised(q.index_fill(0, token, 0))
    return Verdict(torch.stack([*chances, left]), p.expand(len(drawn) + 1, -1))


def verify_chain(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv:2403.10444, algorithm 2) of n drafts `drawn`:
    p [n + 1, V], q [n, V]. The longest prefix whose test passes is accepted.

    A prefix carries the ratio r = min(1, r of the shorter one · p / q of its last token). What the
    drafts after it do not offer is the rest max(r · p - q, 0) of mass s; it passes by s / (s + 1 -
    r), the whole chain by r, and the empty prefix always.
    """
    ratio, tests, following = torch.ones((), dtype=p.dtype), [], []
    for index, token in enumerate(drawn):
        rest = (ratio * p[index] - q[index]).clamp(min=0)
        mass = rest.sum()
        tests.append(
            mass / (mass + 1 - ratio).clamp(min=1e-300) if index else torch.ones_like(mass)
        )
        following.append(normalised(rest))
        ratio = (ratio * p[index, token] / q[index, token]).clamp(max=1)
    tests, chances, left = [*tests, ratio], [], torch.ones_like(ratio)
    for test in reversed(tests):
        chances.append(left * test)
        left = left * (1 - test)
    return Verdict(torch.stack(chances[::-1]), torch.stack([*following, p[len(drawn)]]))


def slot_scores(reached: Tensor, q: Tensor, drawn: Tensor) -> Tensor:
    """How much it is worth to draw each of a node's siblings [.., k], in logs: `reached` [..] + the
    mass that q [.., V] has without the siblings before it.

    A tree of the best slots is lossless, one of the likeliest tokens is not: whether a slot is kept
    must not depend on what is drawn there. Whatever is drawn later beside or below it is worth
    less, and what is drawn elsewhere is independent of it.
    """
    own = q.gather(-1, drawn)
    mass = 1 - (own.cumsum(-1) - own)
    return reached[..., None] + mass.clamp(min=1e-12).log()


def normalised(mass: Tensor) -> Tensor:
    """mass [V] as a distribution; zeros stay zeros: nothing is drawn from them."""
    return mass / mass.sum().clamp(min=torch.finfo(mass.dtype).tiny)
