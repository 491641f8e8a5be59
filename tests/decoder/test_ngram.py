"""Drafting from what came before: matches, the tree of them, and what is kept of a row."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.config import NgramSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.lookup import (
    continuations,
    last_tokens,
    longest_matches,
    match_lengths,
    tree_of_chains,
)
from pipeline.decoder.request import Request
from pipeline.decoder.round import decode_round, prefill_prompt
from pipeline.drafters.ngram import CorpusIndex, NgramDrafter
from tests.decoder.conftest import VOCABULARY, open_rows, poisoned_planes, random_tokens
from tests.decoder.drafting import no_values
from tests.decoder.ngrams import (
    SECTION,
    TREE,
    batch_of,
    chains_of,
    match_of,
    nodes_of,
    random_histories,
    row_of_tokens,
    run,
    tree_of,
)

# What matches, and what it proposes.


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_those_of_a_plain_search(seed: int) -> None:
    histories = random_histories(60, seed)
    state, seq_lens = row_of_tokens(histories, 70)
    for max_match in (1, 2, 5, 16):
        lengths = match_lengths(state, seq_lens, max_match)
        for row, history in enumerate(histories):
            expected = [match_of(history, end, max_match) for end in range(len(history) - 1)]
            assert lengths[row].tolist() == expected + [0] * (70 - len(expected))


@pytest.mark.parametrize("least", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_the_longest_and_latest_matches_propose_what_followed(least: int, steps: int) -> None:
    section = NgramSection(min_match=least, max_match=6, matches=5)
    histories = random_histories(80, seed=11)
    state, seq_lens = row_of_tokens(histories, 70)
    lengths, ends = longest_matches(match_lengths(state, seq_lens, 6), least, 5)
    chains = continuations(state, seq_lens, ends, steps)
    for row, history in enumerate(histories):
        expected = chains_of(history, section, steps)
        count = len(expected)
        assert lengths[row].tolist() == [each[0] for each in expected] + [0] * (5 - count)
        assert chains[row, :count].tolist() == [each[1] for each in expected]


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_the_tree_is_that_of_the_chains(model: DecoderModel, top_k: int) -> None:
    histories = random_histories(80, seed=5)
    for section, steps in ((SECTION, 4), (NgramSection(min_match=2, matches=12), 6)):
        shape = TreeSection(top_k=top_k, steps=steps, nodes=30)
        drafter = NgramDrafter(model, shape, section)
        batch = batch_of(drafter, histories)
        candidates = drafter.candidates(batch, Planes(batch.roots), shape)
        assert candidates.tokens.shape == (80, section.matches * steps)
        for row, history in enumerate(histories):
            expected = tree_of(chains_of(history, section, steps), top_k)
            nodes = nodes_of(candidates, row)
            assert nodes.keys() == expected.keys()
            for branch, score in nodes.items():
                assert score == pytest.approx(expected[branch], abs=1e-5)
            first = candidates.scores[row, 0].item()
            assert (first == -math.inf) == (not expected)
            if not expected:
                assert candidates.tokens[row].tolist() == [0] * (section.matches * steps)


def test_where_nothing_matches_a_row_has_the_same_draft_beside_any_other(
    model: DecoderModel,
) -> None:
    drafter = NgramDrafter(model, TREE, SECTION)
    drafts = []
    for histories in ([[4]], [[4], [1, 1, 2, 1]]):
        batch = batch_of(drafter, histories)
        drafts.append(drafter.candidates(batch, Planes(batch.roots), TREE))
        for nodes in (2, 9, 31):
            tree = model.ops.grow_tree(batch.roots, *drafts[-1][:3], nodes)
            assert tree.tokens.shape == (len(histories), nodes)
    for alone, beside in zip(*drafts, strict=True):
        assert torch.equal(alone[:1], beside[:1]) and alone.dtype == beside.dtype


def test_equal_beginnings_are_one_node_and_add_up() -> None:
    tokens = torch.tensor([[[7, 8, 9], [7, 8, 1], [5, 8, 9], [7, 2, 2]]])
    lengths = torch.tensor([[3, 3, 2, 0]])
    nodes = nodes_of(tree_of_chains(tokens, lengths, 4), 0)
    assert set(nodes) == {(7,), (7, 8), (7, 8, 9), (7, 8, 1), (5,), (5, 8), (5, 8, 9)}
    assert nodes[7,] == pytest.approx(math.log(16 / 21))
    assert nodes[7, 8, 9] == pytest.approx(nodes[7, 8] + math.log(8 / 17))
    narrow = nodes_of(tree_of_chains(tokens, lengths, 1), 0)
    assert set(narrow) == {(7,), (7, 8), (7, 8, 9)}, "of equals the earlier"


def test_frequency_outweighs_a_longer_match() -> None:
    tokens = torch.tensor([[[1, 1], [2, 2], [2, 2], [2, 3]]])
    candidates = tree_of_chains(tokens, torch.tensor([[3, 2, 2, 2]]), 1)
    assert set(nodes_of(candidates, 0)) == {(2,), (2, 2)}
    assert candidates.tokens[0, 0] == 2 and candidates.scores[0, 0] > -math.inf


def test_a_loop_goes_on_as_deep_as_the_draft() -> None:
    state, seq_lens = row_of_tokens([[3, 1, 2, 1, 2]], 20)
    lengths, ends = longest_matches(match_lengths(state, seq_lens, 8), 2, 4)
    assert lengths.tolist() == [[2, 0, 0, 0]]
    assert continuations(state, seq_lens, ends, 7)[0, 0].tolist() == [1, 2, 1, 2, 1, 2, 1]


def test_a_deeper_draft_begins_as_a_shallower_one(model: DecoderModel) -> None:
    """Which is what lets a trace of the deepest draft stand for all."""
    drafter = NgramDrafter(model, TreeSection(top_k=2, steps=6, nodes=20), SECTION)
    batch = batch_of(drafter, random_histories(40, seed=8))
    whole = drafter.candidates(batch, Planes(batch.roots), drafter.shapes.drafted[0])
    for steps in (1, 3, 5):
        part = drafter.candidates(
            batch, Planes(batch.roots), TreeSection(top_k=2, steps=steps, nodes=20)
        )
        for few, many in zip(part, whole, strict=True):
            assert torch.equal(few, many[..., : few.shape[-1]])


def test_a_corpus_is_searched_without_looking_at_a_value() -> None:
    generator = torch.Generator().manual_seed(2)
    corpus = CorpusIndex(torch.randint(0, 4, (200,), generator=generator), VOCABULARY, 5)
    state, seq_lens = row_of_tokens(random_histories(5, seed=1), 70)
    with no_values():
        corpus.lookup(last_tokens(state, seq_lens, 5), 1, 6, 4)
    with pytest.raises(AssertionError, match="nonzero"), no_values():
        match_lengths(state, seq_lens, 5)


# What is kept of a row.


def test_the_state_holds_prompt_and_reply(model: DecoderModel) -> None:
    """However the prompt is cut, and over accepted branches of every length."""
    requests = [Request(str(n), tuple(([4, 5, 6, 7] * 9)[n:]), 60, ()) for n in range(3)]
    for prefill_tokens in (5, 512):
        drafter = NgramDrafter(model, TREE, SECTION)
        engine = Engine(model, drafter=drafter, slots=3, prefill_tokens=prefill_tokens)
        whole = {request.request_id: list(request.prompt_ids) for request in requests}
        stream = engine.stream(requests)  # held: what it runs is dropped with it
        for emission in stream:
            whole[emission.request_id] += emission.token_ids
            if emission.completion is not None:
                break
        rows = {each.request.request_id: row for row, each in enumerate(engine._running)}
        assert rows
        for name, row in rows.items():
            seen = engine._batch.history[row, : int(engine._batch.seq_lens[row]) + 1]
            shortest = min(len(seen), len(whole[name]))
            assert seen[:shortest].tolist() == whole[name][:shortest]
            assert seen[-1] == engine._batch.roots[row]
            assert shortest > len(requests[int(name)].prompt_ids) + 20


def test_what_stands_behind_a_row_does_not_matter(model: DecoderModel) -> None:
    drafter = NgramDrafter(model, TREE, SECTION)
    prompt = torch.tensor([9, 1, 2, 3, 9, 1, 2])
    drafts = []
    for garbage in (0, 9, 2):
        batch = open_rows(model, 1, pages=4, drafter=drafter)
        batch.history.fill_(garbage)
        planes = poisoned_planes(model, 5, drafter)
        prefill_prompt(model, planes, drafter, batch, prompt)
        for _ in range(3):
            decode_round(model, planes, drafter, batch, sampling=False)
        drafts.append(drafter.candidates(batch, planes, TREE))
    for other in drafts[1:]:
        assert all(torch.equal(*pair) for pair in zip(drafts[0], other, strict=True))


def test_reused_rows_know_nothing_of_former_requests(model: DecoderModel) -> None:
    drafter = NgramDrafter(model, TREE, SECTION)
    engine = Engine(model, drafter=drafter, slots=2)
    short = [Request(f"short{n}", (n, 40 + n, 3), 12, ()) for n in range(6)]
    alone = [run(Engine(model, drafter=drafter), [each])[each.request_id] for each in short]
    run(engine, [Request(f"long{n}", tuple(random_tokens(60, n).tolist()), 90, ()) for n in (0, 1)])
    after = run(engine, short)
    for done in alone:
        again = after[done.request_id]
        assert again.token_ids == done.token_ids
        assert again.statistics.rounds == done.statistics.rounds
    free = engine.pools.shared
    assert free.free_pages == free.capacity
