"""What the engine counts of a request is what its rounds proposed and accepted, one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.config import NgramSection, TreeSection
from pipeline.decoder import graphs
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.request import Completion, Request
from pipeline.decoder.round import count_proposed, decode_round
from pipeline.drafters.ngram import NgramDrafter
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.reports import RoundCounters
from tests.decoder.conftest import eight_tokens, random_tokens
from tests.decoder.drafting import no_values, tokens_of

VOCABULARY = 8
TREE = TreeSection(top_k=3, steps=4, nodes=10)
#: Matches of two tokens are rare at first: many rounds of a batch propose for some rows only.
SECTION = NgramSection(min_match=2, max_match=5, matches=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderModel, Eagle3Head]:
    """A target of eight tokens, that often says what fills the nodes of an empty draft: 0."""
    return eight_tokens(tmp_path_factory.mktemp("target"), max_length=200)


class Round(NamedTuple):
    """A round of one request, from what its draft was made of."""

    drafted: int
    deepest: int
    accepted: int


def _kept(candidates: Candidates, row: int, nodes: int) -> list[int]:
    """Depths of the candidates that are proposed and among the best."""
    scores, parents = (part[row].tolist() for part in (candidates.scores, candidates.parents))
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: nodes - 1]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [depths[index] for index in best if scores[index] > -math.inf]


class Recorder:
    """Notes every round of an engine's requests, which it tells apart by their seeds."""

    def __init__(self, patch: pytest.MonkeyPatch, drafter: Drafter) -> None:
        self.rounds: defaultdict[str, list[Round]] = defaultdict(list)
        self._drafted: Candidates | None = None
        original = drafter.candidates

        def candidates(*arguments: Any) -> Candidates:
            self._drafted = original(*arguments)
            return self._drafted

        patch.setattr(drafter, "candidates", candidates)
        patch.setattr(graphs, "decode_round", self._round)

    def _round(self, *arguments: Any, **named: Any) -> None:
        batch = arguments[3]
        assert isinstance(batch, DecodeBatch)
        active, self._drafted = batch.active.tolist(), None
        decode_round(*arguments, **named)
        for row, seed in enumerate(batch.seeds.tolist()):
            if active[row]:
                kept: list[int] = _kept(self._drafted, row, TREE.nodes) if self._drafted else []
                accepted = int(batch.counts[row]) - 1
                assert accepted <= max(kept, default=0), "a node that pads a tree was accepted"
                self.rounds[str(seed)].append(Round(len(kept), max(kept, default=0), accepted))

    def counters(self, done: Completion) -> RoundCounters:
        """From the rounds until all tokens are there; those behind the end are not its own."""
        rounds, tokens = self.rounds[done.request_id], len(done.token_ids) - 1
        after = list(accumulate(1 + each.accepted for each in rounds))
        rounds = rounds[: next(n for n, sum_ in enumerate([0, *after]) if sum_ >= tokens)]
        deepest = max((each.deepest for each in rounds), default=0)
        lengths = [each.accepted for each in rounds]
        return RoundCounters(
            rounds=len(rounds),
            tokens=tokens,
            drafted=sum(each.drafted for each in rounds),
            accepted_lengths=tuple(map(lengths.count, range(max(lengths, default=-1) + 1))),
            proposed=tuple(
                sum(each.deepest >= k for each in rounds) for k in range(1, deepest + 1)
            ),
        )


def _requests(temperature: float, stop: tuple[int, ...]) -> list[Request]:
    """Their ids are their seeds."""
    return [
        Request(
            str(seed),
            tuple((random_tokens(5 + 9 * seed, seed=seed) % VOCABULARY).tolist()),
            30 + 7 * seed,
            stop if seed % 2 else (),
            temperature=temperature,
            seed=seed,
        )
        for seed in range(7)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["eagle3", "ngram"])
def test_counters_are_those_of_the_rounds(
    small: tuple[DecoderModel, Eagle3Head],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    slots: int,
    overlap: bool,
    temperature: float,
) -> None:
    model, head = small
    if name == "eagle3":
        drafter: Drafter = Eagle3Drafter(head, model, TREE)
    else:
        drafter = NgramDrafter(model, TREE, SECTION)
    requests = _requests(temperature, stop=(6,))
    plain = {each.request_id: each for each in Engine(model).generate(requests)}
    recorder = Recorder(monkeypatch, drafter)
    engine = Engine(model, drafter=drafter, slots=slots, overlap=overlap)
    done = {each.request_id: each for each in engine.generate(requests)}
    assert tokens_of(done) == tokens_of(plain)
    counters = {key: each.statistics.counters() for key, each in done.items()}
    assert counters == {key: recorder.counters(each) for key, each in done.items()}
    total = RoundCounters.total(counters.values())
    assert total.accepted_tokens > 10, "the example needs accepted tokens"
    cut = total.rounds + total.accepted_tokens - total.tokens
    assert cut > 0, "the example needs replies that end in mid-round"
    if name == "ngram":
        assert 0 < total.proposed[0] < total.rounds, "the example needs rounds without a draft"
    else:
        assert total.proposed[0] == total.rounds
        assert total.drafted == total.rounds * (TREE.nodes - 1)


def test_plain_decoding_proposes_nothing(small: tuple[DecoderModel, Eagle3Head]) -> None:
    model, head = small
    mixed = Eagle3Drafter(head, model, {1: TREE, 2: None})
    for drafter, slots in ((None, 2), (mixed, 2)):
        engine = Engine(model, drafter=drafter, slots=slots)
        done = list(engine.generate(_requests(0.0, stop=())[:2]))
        total = RoundCounters.total(each.statistics.counters() for each in done)
        if drafter is None:
            assert total.accepted_lengths == (total.rounds,)
            assert (total.drafted, total.proposed) == (0, ())
        else:  # the longer one ends alone, with trees
            assert 0 < total.proposed[0] < total.rounds
            assert total.drafted == total.proposed[0] * (TREE.nodes - 1)


def test_nothing_is_looked_at(small: tuple[DecoderModel, Eagle3Head]) -> None:
    """The count is part of a round, which a CUDA graph may hold."""
    model, _ = small
    roots = torch.zeros(2, dtype=torch.int64)
    scores = torch.tensor([[-1.0, -2.0, -math.inf, -3.0], [-math.inf] * 4])
    tokens, parents = torch.ones_like(scores).long(), torch.tensor([[-1, 0, 0, 1]]).expand(2, -1)
    candidates = Candidates(tokens, parents, scores, torch.tensor([1, 2, 2, 3]))
    for nodes, counted in ((5, [[3, 3], [0, 0]]), (3, [[2, 2], [0, 0]]), (2, [[1, 1], [0, 0]])):
        tree = model.ops.grow_tree(roots, tokens, parents, scores, nodes)
        with no_values():
            proposed = count_proposed(candidates, tree)
        assert proposed.tolist() == counted
