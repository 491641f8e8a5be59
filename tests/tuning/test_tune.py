"""Choosing a tree: replayed rounds are the engine's own rounds, and costs decide as they should."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.request import Request, Statistics, pool_acceptance
from pipeline.errors import DataError, TargetError
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.tuning.cost import Costs
from pipeline.tuning.trace import (
    Traces,
    acceptance,
    accepted_at,
    continuation_ranks,
    draft_margins,
    known_margins,
    replay,
    replay_counters,
    trace,
)
from pipeline.tuning.tune import BEAM_WIDTHS, CANDIDATE_SHAPES, WIDEST, best_shapes
from tests.decoder.conftest import eight_tokens

NEW_TOKENS = 40
PROMPTS = [
    [(3 * index + 5 * step * step) % 8 for step in range(2 + 9 * index)] for index in range(7)
]
_SIZES = [
    (1, 1, 2),
    (1, 5, 6),
    (2, 3, 6),
    (3, 1, 4),
    (3, 4, 12),
    (4, 5, 24),
    (6, 6, 64),
    (8, 2, 9),
    (8, 6, 48),
]
SHAPES = [TreeSection(top_k=top_k, steps=steps, nodes=nodes) for top_k, steps, nodes in _SIZES]
Pair = tuple[DecoderModel, Eagle3Head]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target that knows eight tokens, so that a random head often guesses one of them right."""
    return eight_tokens(tmp_path_factory.mktemp("target"), max_length=160)


@pytest.fixture(scope="module")
def traces(pair: Pair) -> Traces:
    model, head = pair
    drafter = Eagle3Drafter(head, model, WIDEST)
    return trace(model, drafter, PROMPTS, NEW_TOKENS, WIDEST, widths=BEAM_WIDTHS, slots=4)


def _decode(pair: Pair, shape: TreeSection, stop_ids: tuple[int, ...] = ()) -> list[Statistics]:
    """What the engine itself makes of the prompts."""
    model, head = pair
    requests = [
        Request(str(index), tuple(prompt), NEW_TOKENS, stop_ids)
        for index, prompt in enumerate(PROMPTS)
    ]
    engine = Engine(model, drafter=Eagle3Drafter(head, model, shape), slots=3)
    done = {each.request_id: each.statistics for each in engine.generate(requests)}
    return [done[request.request_id] for request in requests]


def _costs(*, node: float, step: float) -> Costs:
    """A token of plain decoding takes 1; each further node and draft step what is given."""
    return Costs(
        verify={1: 1.0, 64: 1.0 + 63 * node},
        draft={1: step, 8: step},
        extend={1: step},
        other={2: 0.0},
    )


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda each: f"{each.top_k}-{each.steps}-{each.nodes}"
)
def test_replayed_rounds_are_the_engines(pair: Pair, traces: Traces, shape: TreeSection) -> None:
    measured = _decode(pair, shape)
    assert replay(traces, shape) == [each.rounds for each in measured]
    assert replay_counters(traces, shape) == [each.counters() for each in measured]
    assert list(traces.lengths) == [each.round_tokens for each in measured]
    assert acceptance(traces, shape) == pool_acceptance(measured).tau > 1.1


def test_shapes_differ_in_what_they_accept(traces: Traces) -> None:
    """Else the test above could pass with any shape's figures."""
    taus = [acceptance(traces, shape) for shape in SHAPES]
    assert len(set(taus)) == len(SHAPES)
    assert max(taus) > 2


def test_replies_end_at_stop_tokens(pair: Pair) -> None:
    model, head = pair
    shape = TreeSection(top_k=4, steps=4, nodes=16)
    drafter = Eagle3Drafter(head, model, shape)
    stopped = trace(
        model, drafter, PROMPTS, NEW_TOKENS, shape, widths=(4,), slots=3, stop_ids=(6, 4)
    )
    measured = _decode(pair, shape, stop_ids=(6, 4))
    assert replay(stopped, shape) == [each.rounds for each in measured]
    assert replay_counters(stopped, shape) == [each.counters() for each in measured]
    assert list(stopped.lengths) == [each.round_tokens for each in measured]
    assert len(set(stopped.lengths)) > 3


def test_a_bigger_budget_never_accepts_less(traces: Traces) -> None:
    """Of the same draft a larger tree holds a superset, so every round gets at least as far."""
    by_draft: dict[tuple[int, int], list[TreeSection]] = {}
    for shape in CANDIDATE_SHAPES:
        by_draft.setdefault((shape.top_k, shape.steps), []).append(shape)
    for shapes in by_draft.values():
        held = [
            traces.ranks[shape.top_k][:, : shape.steps, shape.steps - 1] < shape.nodes - 1
            for shape in shapes
        ]
        for smaller, larger in pairwise(held):
            assert (smaller <= larger).all()


def test_ranks_are_the_places_in_the_tree() -> None:
    """Against real trees of every size, grown and walked; many scores are equal halves."""
    generator = torch.Generator().manual_seed(5)
    rows, beams, depth, vocabulary = 300, 3, 4, 4
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    scores: list[Tensor] = []
    # The beams' candidates and scores.
    above, total, first = torch.full((rows, 1), -1), torch.zeros(rows, 1), 0
    for _ in range(depth):
        width = above.shape[1]
        gains = -torch.randint(0, 3, (rows, width, beams), generator=generator).sort(-1).values / 2
        likely = torch.rand(rows, width, vocabulary, generator=generator)
        tokens.append(likely.topk(beams).indices.flatten(1))
        parents.append(above.repeat_interleave(beams, dim=1))
        scores.append((total[:, :, None] + gains).flatten(1))
        total, best = scores[-1].topk(beams)
        above, first = first + best, first + scores[-1].shape[1]
    deeper = [torch.full((part.shape[1],), depth) for depth, part in enumerate(tokens, 1)]
    proposed_all = torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1)
    drafts = Candidates(*proposed_all, torch.cat(deeper))
    wanted = torch.randint(0, vocabulary, (rows, depth), generator=generator)
    ranks = continuation_ranks([drafts], wanted[:, None])[:, 0]  # [B, D, D]
    roots, deepest = torch.zeros(rows, dtype=torch.int64), 0
    for steps in range(1, depth + 1):
        proposed = beams + (steps - 1) * beams**2
        for nodes in range(2, proposed + 2):
            cut = [part[:, :proposed] for part in proposed_all]
            tree = TorchOps().grow_tree(roots, cut[0], cut[1], cut[2], nodes)
            predicted = torch.cat((wanted, wanted[:, -1:]), 1).gather(1, tree.depth)
            accepted = TorchOps().verify(tree, predicted, steps).counts - 1
            assert ((ranks[:, :steps, steps - 1] < nodes - 1).sum(1) == accepted).all()
            deepest = max(deepest, int(accepted.max()))
    assert deepest == depth


def test_replay_by_hand() -> None:
    """Two replies; a draft of one beam and two steps that is right 2, 0, 1 | 1 times."""
    never = 1 << 30
    twice = [[0, 0], [never, 1]]
    once = [[0, 0], [never, never]]
    not_once = [[never, never], [never, never]]
    traces = Traces(
        (3, 1), {1: torch.tensor([twice, not_once, once, once])}, {}, {}, torch.empty(0)
    )
    two, one = (TreeSection(top_k=1, steps=steps, nodes=steps + 1) for steps in (2, 1))
    assert replay(traces, two) == [1, 1]
    assert replay(traces, one) == [2, 1]  # two tokens, then two of which one is left
    assert acceptance(traces, one) == 4 / 3
    with pytest.raises(ValueError, match="wider and deeper"):
        replay(traces, TreeSection(top_k=1, steps=3, nodes=4))


def test_costs_decide(traces: Traces) -> None:
    planted = {
        32: _costs(node=0.2, step=0.01),
        1: _costs(node=0.0, step=0.0),
        64: _costs(node=1.0, step=0.0),
        8: _costs(node=0.0, step=1.0),
    }
    chosen = best_shapes(planted, traces)
    assert list(chosen) == [1, 8, 32, 64]
    best = max(acceptance(traces, shape) for shape in CANDIDATE_SHAPES)
    assert chosen[1].acceptance_length == chosen[1].speedup == best > 2
    assert chosen[1].shape.nodes >= 32
    assert chosen[8].shape.steps == 1, "each step costs as much as a token"
    assert chosen[32].shape.nodes < 8, "each node costs a fifth of a token"
    assert chosen[64].shape == TreeSection(top_k=1, steps=1, nodes=2)
    assert chosen[64].speedup == chosen[64].acceptance_length / 2 < 1


def test_choices_make_a_drafter(pair: Pair, traces: Traces) -> None:
    model, head = pair
    chosen = best_shapes({1: _costs(node=0.0, step=0.0), 4: _costs(node=1.0, step=0.0)}, traces)
    drafter = Eagle3Drafter(head, model, {rows: choice.shape for rows, choice in chosen.items()})
    few, many = chosen[1].shape, chosen[4].shape
    assert [drafter.shape_for(rows) for rows in (1, 3, 4, 9)] == [few, few, many, many]


def test_only_covered_shapes_are_chosen(pair: Pair) -> None:
    model, head = pair
    drafter, limit = Eagle3Drafter(head, model, WIDEST), TreeSection(top_k=3, steps=2, nodes=4)
    narrow = trace(model, drafter, PROMPTS[:2], 8, limit, widths=BEAM_WIDTHS, slots=2)
    shape = best_shapes({1: _costs(node=0.0, step=0.0)}, narrow)[1].shape
    assert (shape.top_k, shape.steps) <= (3, 2)
    with pytest.raises(ValueError, match="covered"):
        best_shapes({1: _costs(node=0.0, step=0.0)}, narrow, [WIDEST])


def test_candidate_shapes_are_distinct_and_sensible() -> None:
    assert len(set(CANDIDATE_SHAPES)) == len(CANDIDATE_SHAPES) > 100
    assert [shape for shape in CANDIDATE_SHAPES if shape.top_k == 1] == [
        TreeSection(top_k=1, steps=steps, nodes=steps + 1) for steps in range(1, 7)
    ]
    assert {shape.top_k for shape in CANDIDATE_SHAPES} == {1, 2, 3, 4, 6, 8}
    for shape in CANDIDATE_SHAPES:
        most = 1 + shape.top_k + (shape.steps - 1) * shape.top_k**2
        assert max(shape.top_k, shape.steps) < shape.nodes <= most


def test_what_cannot_be_traced(pair: Pair) -> None:
    model, head = pair
    shape = TreeSection(top_k=2, steps=2, nodes=4)
    drafter, widths = Eagle3Drafter(head, model, shape), (1, 2)
    with pytest.raises(DataError, match="prompt 1: prompt_ids is empty"):
        trace(model, drafter, [[1], []], 4, shape, widths=widths)
    with pytest.raises(DataError, match="no reply is longer"):
        trace(model, drafter, [[1], [2]], 1, shape, widths=widths)
    with pytest.raises(ValueError, match="the drafter was made for 2"):
        trace(model, drafter, [[1]], 4, WIDEST, widths=widths)
    spoilt = DecoderModel.__new__(DecoderModel)
    spoilt.__dict__.update(model.__dict__)
    spoilt.embedding = model.embedding * float("nan")
    with pytest.raises(TargetError, match="NaN"):
        trace(spoilt, drafter, [[1]], 4, shape, widths=widths)


def test_what_a_round_accepts_at_every_token(traces: Traces) -> None:
    """Walking over it gives the rounds."""
    chain = TreeSection.chain(3)
    for accepted, counters in zip(
        accepted_at(traces, chain), replay_counters(traces, chain), strict=True
    ):
        position, taken = 0, list[int]()
        while position < len(accepted):
            taken.append(accepted[position])
            position += accepted[position] + 1
        assert (len(taken), sum(taken)) == (counters.rounds, counters.accepted_tokens)


@pytest.mark.parametrize("seed", range(5))
def test_margins_of_a_chains_drafts(seed: int) -> None:
    """Against a walk from child to child, over candidates of two beams and two steps."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[0, 1, 0, 1, 0, 1]])  # siblings propose different tokens
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1]])
    steps = -torch.rand(1, 6, generator=generator)
    scores = steps.clone()
    scores[0, 2:4] += steps[0, 0]
    scores[0, 4:] += steps[0, 1]
    draft = Candidates(tokens, parents, scores, torch.tensor([1, 1, 2, 2, 2, 2]))
    for continuation in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2)):
        following = torch.tensor([[continuation]])  # [B, P, D]
        first, *rest = draft_margins([draft], following)[0, 0].tolist()
        lead = abs(float(scores[0, 0] - scores[0, 1]))
        assert first == pytest.approx(lead)
        right = continuation[0] == int(scores[0, 1] > scores[0, 0])
        below = scores[0, 2 + 2 * min(continuation[0], 1) :][:2]
        expected = float(below.max() - below.min()) if right else 0.0
        assert rest == pytest.approx([expected], abs=1e-6)


def test_margins_are_known_up_to_the_first_wrong_draft(traces: Traces) -> None:
    """In most drafts; of wide ones, as a beam may be pushed out of the narrower."""
    accepted = [each for reply in accepted_at(traces, TreeSection.chain(3)) for each in reply]
    known = [each for reply in known_margins(traces) for each in reply]
    assert len(known) == len(accepted)
    deep = [len(row) > hits for row, hits in zip(known, accepted, strict=True) if hits < 3]
    assert sum(deep) > 0.9 * len(deep)
    assert all(each >= 0 for row in known for each in row)
