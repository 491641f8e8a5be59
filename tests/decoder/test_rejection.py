"""Rejection with draft probabilities is lossless: the law of its tokens, added up exactly.

Every draft that can be drawn is verified, and the chances of all outcomes are summed in float64, so
nothing is sampled: what comes out is the target's law to the last digits, and each planted fault,
of those that are easily made, changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from bench.rejection import Verdict, normalised, slot_scores, verify_chain, verify_siblings

VOCABULARY, DEPTH = 4, 3
WITHIN = 1e-12

Verify = Callable[[Tensor, Tensor, Tensor], Verdict]
#: Distributions of the next token after every text of up to DEPTH tokens.
Law = dict[tuple[int, ...], Tensor]


def _law(seed: int, last: float = 1.0) -> Law:
    generator = torch.Generator().manual_seed(seed)
    texts = (
        text for length in range(DEPTH + 1) for text in product(range(VOCABULARY), repeat=length)
    )
    drawn = {text: torch.rand(VOCABULARY, generator=generator).double() ** 2 for text in texts}
    for mass in drawn.values():
        mass[-1] *= last
    return {text: normalised(mass) for text, mass in drawn.items()}


TARGET = _law(1)
#: The last token is outside the draft vocabulary.
HEAD = _law(2, last=0.0)


def _then(law: Law, text: tuple[int, ...], length: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All texts of `length` tokens that begin with `text`, and their chance after it."""
    for rest in product(range(VOCABULARY), repeat=length - len(text)):
        whole, chance = (*text, *rest), 1.0
        for at in range(len(text), length):
            chance *= float(law[whole[:at]][whole[at]])
        yield whole, chance


def _distance(emitted: dict[tuple[int, ...], float], length: int) -> float:
    exact = dict(_then(TARGET, (), length))
    assert emitted.keys() <= exact.keys()
    return max(abs(emitted.get(text, 0.0) - chance) for text, chance in exact.items())


def _emit(
    emitted: dict[tuple[int, ...], float], text: tuple[int, ...], following: Tensor, chance: float
) -> None:
    """Add `text`, a token drawn from `following`, and plain tokens after it."""
    for token, mass in enumerate(following.tolist()):
        for whole, after in _then(TARGET, (*text, token), max(DEPTH, len(text) + 1)):
            emitted[whole] = emitted.get(whole, 0.0) + chance * mass * after


def _chain_distance(verify: Verify, length: int = DEPTH - 1, drawn_from: Law = HEAD) -> float:
    emitted: dict[tuple[int, ...], float] = {}
    for draft, drawn in _then(drawn_from, (), length):
        if drawn == 0:
            continue
        p = torch.stack([TARGET[draft[:at]] for at in range(length + 1)])
        q = torch.stack([HEAD[draft[:at]] for at in range(length)])
        verdict = verify(p, q, torch.tensor(draft))
        for count, chance in enumerate(verdict.chances.tolist()):
            _emit(emitted, draft[:count], verdict.following[count], drawn * chance)
    return _distance(emitted, DEPTH)


def _one_by_one(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    """A chain as a tree of single children."""
    chances, following, left = [], [], torch.ones((), dtype=p.dtype)
    for index in range(len(drawn)):
        accepted, none = verify_siblings(p[index], q[index], drawn[index : index + 1]).chances
        chances.append(left * none)
        following.append(
            verify_siblings(p[index], q[index], drawn[index : index + 1]).following[-1]
        )
        left = left * accepted
    return Verdict(torch.stack([*chances, left]), torch.stack([*following, p[len(drawn)]]))


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("verify", [verify_chain, _one_by_one])
def test_a_chain_emits_the_targets_tokens(verify: Verify, length: int) -> None:
    assert _chain_distance(verify, length) < WITHIN


def test_a_block_accepts_more_than_its_tokens_one_by_one() -> None:
    def accepted(verify: Verify) -> float:
        total = 0.0
        for draft, drawn in _then(HEAD, (), 2):
            p = torch.stack([TARGET[draft[:at]] for at in range(3)])
            q = torch.stack([HEAD[draft[:at]] for at in range(2)])
            if drawn:
                chances = verify(p, q, torch.tensor(draft)).chances
                total += drawn * float(chances @ torch.arange(3.0).double())
        return total

    assert accepted(verify_chain) > accepted(_one_by_one) + 0.01


def test_a_head_that_is_the_target_is_accepted() -> None:
    p = torch.stack([TARGET[()], TARGET[(1,)], TARGET[(1, 2)]])
    for verify in (verify_chain, _one_by_one):
        assert verify(p, p[:2], torch.tensor([1, 2])).chances.tolist() == pytest.approx([0, 0, 1])


def _resampled_from_p(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    return verify_chain(p, q, drawn)._replace(following=p)


def _ratio_not_carried(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    """The tests of a block, each as if the ratio of the tokens before it were 1."""
    index = torch.arange(len(drawn))
    ratios = (p[index, drawn] / q[index, drawn]).clamp(max=1)
    tests = [torch.ones((), dtype=p.dtype)]
    for at in range(1, len(drawn)):
        mass = (ratios[at - 1] * p[at] - q[at]).clamp(min=0).sum()
        tests.append(mass / (mass + 1 - ratios[at - 1]))
    tests, chances, left = [*tests, ratios[-1]], [], torch.ones_like(tests[0])
    for test in reversed(tests):
        chances.append(left * test)
        left = left * (1 - test)
    return verify_chain(p, q, drawn)._replace(chances=torch.stack(chances[::-1]))


def _of_another_node(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    return verify_chain(p, q.roll(1, 0), drawn)


def _not_clamped(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    rest = torch.stack([normalised((p[at] - q[at]).abs()) for at in range(len(drawn))])
    return _one_by_one(p, q, drawn)._replace(following=torch.cat((rest, p[-1:])))


@pytest.mark.parametrize(
    "fault", [_resampled_from_p, _ratio_not_carried, _of_another_node, _not_clamped]
)
def test_a_fault_in_a_chain_shows(fault: Verify) -> None:
    assert _chain_distance(fault) > 1e-3


def test_probabilities_from_before_the_draft_vocabulary_was_mapped_show() -> None:
    """Drawn tokens are named by the head's rows, which are other tokens of the target."""
    moved = {text: mass.roll(1) for text, mass in HEAD.items()}
    assert _chain_distance(verify_chain, drawn_from=moved) > 1e-3


Siblings = tuple[int, ...]
#: Draws of a node's siblings, and their chance.
Draw = Callable[[Tensor, int], list[tuple[Siblings, float]]]


def _without_replacement(q: Tensor, count: int) -> list[tuple[Siblings, float]]:
    drawn = []
    for siblings in permutations(range(VOCABULARY), count):
        chance, left = 1.0, 1.0
        for token in siblings:
            chance *= float(q[token]) / left if left > 0 else 0.0
            left -= float(q[token])
        drawn.append((siblings, chance))
    return [each for each in drawn if each[1] > 0]


def _with_replacement(q: Tensor, count: int) -> list[tuple[Siblings, float]]:
    every = product(range(VOCABULARY), repeat=count)
    return [(each, float(q[list(each)].prod())) for each in every if q[list(each)].prod() > 0]


def _tree_distance(
    nodes: int,
    verify: Verify = verify_siblings,
    draw: Draw = _without_replacement,
    *,
    by_token: bool = False,
) -> float:
    """Of trees of two siblings at the root, and two below each, of which the best `nodes` slots are
    kept; `by_token`: of the likeliest tokens instead."""
    emitted: dict[tuple[int, ...], float] = {}
    for roots, first in draw(HEAD[()], 2):
        below = [draw(HEAD[(token,)], 2) for token in roots]
        for (one, second), (other, third) in product(*below):
            chance, kept = first * second * third, _kept(roots, (one, other), nodes, by_token)
            children = {(): kept[:1], (roots[0],): kept[1:2], (roots[1],): kept[2:]}
            drawn = {(): roots, (roots[0],): one, (roots[1],): other}
            _walk(
                emitted,
                (),
                chance,
                {at: drawn[at][: each[0]] for at, each in children.items()},
                verify,
            )
    return _distance(emitted, DEPTH)


def _kept(
    roots: Siblings, below: tuple[Siblings, Siblings], nodes: int, by_token: bool
) -> list[int]:
    """How many siblings are kept at the root, and below each of its two."""
    q, tokens = HEAD[()], torch.tensor(roots)
    slots = [slot_scores(torch.zeros((), dtype=q.dtype), q, tokens)]
    own = [q[tokens].log()]
    for token, siblings in zip(roots, below, strict=True):
        q, drawn = HEAD[(token,)], torch.tensor(siblings)
        slots.append(slot_scores(HEAD[()][token].log(), q, drawn))
        own.append(HEAD[()][token].log() + q[drawn].log())
    scores = torch.cat(own if by_token else slots)
    best = set(scores.sort(descending=True, stable=True).indices[:nodes].tolist())
    # Of siblings a prefix is kept in the order in which they were drawn.
    return [int({2 * at, 2 * at + 1} <= best) + int(2 * at in best) for at in range(3)]


def _walk(
    emitted: dict[tuple[int, ...], float],
    text: tuple[int, ...],
    chance: float,
    children: dict[tuple[int, ...], Siblings],
    verify: Verify,
) -> None:
    siblings = children.get(text, ())
    if not siblings:
        _emit(emitted, text, TARGET[text], chance)
        return
    verdict = verify(TARGET[text], HEAD[text], torch.tensor(siblings))
    for token, accepted in zip(siblings, verdict.chances.tolist(), strict=False):
        _walk(emitted, (*text, token), chance * accepted, children, verify)
    _emit(emitted, text, verdict.following[-1], chance * float(verdict.chances[-1]))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6])
def test_a_tree_of_the_best_slots_emits_the_targets_tokens(nodes: int) -> None:
    assert _tree_distance(nodes) < WITHIN


def test_a_tree_of_the_likeliest_tokens_does_not() -> None:
    """What a dynamic tree keeps depends on what was drawn: the choice of it is no stopping rule."""
    assert _tree_distance(3, by_token=True) > 1e-3


def test_siblings_drawn_with_replacement_do_not() -> None:
    def verify(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
        return Verdict(*(each.nan_to_num(0.0) for each in verify_siblings(p, q, drawn)))

    assert _tree_distance(6, verify, _with_replacement) > 1e-3
    assert _tree_distance(6, verify) < WITHIN, "the fault is in the draw"


def _never_renormalised(p: Tensor, q: Tensor, drawn: Tensor) -> Verdict:
    """Of the head's distribution without the siblings that were rejected."""
    chances, left = [], torch.ones((), dtype=p.dtype)
    for token in drawn:
        accepted = (p[token] / q[token]).clamp(max=1)
        chances.append(left * accepted)
        left, p = left * (1 - accepted), normalised((p - q).clamp(min=0))
        q = q.index_fill(0, token, 0)
    return Verdict(torch.stack([*chances, left]), p.expand(len(drawn) + 1, -1))


def test_a_distribution_that_is_not_normalised_again_does_not() -> None:
    assert _tree_distance(6, _never_renormalised) > 1e-3
