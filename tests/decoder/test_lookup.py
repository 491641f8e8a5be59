"""A lookup beside a drafter: one tree of both, held against plain dictionaries of branches."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from bench.random_target import random_head
from pipeline.config import DrafterSection, NgramSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.lookup import merge_candidates, tree_of_chains
from pipeline.decoder.request import Request
from pipeline.decoder.round import decode_round, prefill_prompt
from pipeline.drafters.lookup import LookupDrafter
from pipeline.drafters.ngram import NgramDrafter
from pipeline.drafters.registry import load_drafter
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.target.open import Target
from tests.decoder.conftest import open_rows, poisoned_planes, random_tokens
from tests.decoder.ngrams import (
    both_of,
    drafted_candidates,
    looked_up_candidates,
    nodes_of,
    replies,
    run,
)

TREE = TreeSection(top_k=3, steps=4, nodes=12)


@pytest.mark.parametrize("seed", range(6))
def test_branches_are_those_of_both(seed: int) -> None:
    rows, steps = 7, 4
    drafted = drafted_candidates(rows, steps, 3, seed)
    looked_up = looked_up_candidates(rows, steps, 5, seed)
    before = [each.clone() for each in (*drafted, *looked_up)]
    merged = merge_candidates(drafted, looked_up, steps)
    shared = 0
    for row in range(rows):
        expected = both_of(drafted, looked_up, row)
        assert nodes_of(merged, row) == pytest.approx(expected)
        shared += len(nodes_of(drafted, row)) + len(nodes_of(looked_up, row)) - len(expected)
    assert shared > 5, "some branches are of both"
    for earlier, now in zip(before, (*drafted, *looked_up), strict=True):
        assert torch.equal(earlier, now), "neither is written to"


def test_nothing_looked_up_leaves_the_draft_as_it_is() -> None:
    drafted = drafted_candidates(3, 4, 3, seed=9)
    nothing = torch.zeros(3, 4, dtype=torch.int64)
    empty = tree_of_chains(torch.ones(3, 4, 4, dtype=torch.int64), nothing, 3)
    merged = merge_candidates(drafted, empty, 4)
    for row in range(3):
        assert nodes_of(merged, row) == nodes_of(drafted, row)


def head_of(model: DecoderModel) -> Eagle3Head:
    """Random weights, for every second token."""
    proposed = torch.arange(0, model.vocabulary, 2)
    return random_head(model.config, proposed, intermediate_size=96, scale=6)


def test_a_target_that_repeats_itself_takes_fewer_rounds(looping: DecoderModel) -> None:
    """And says what it says."""
    prompts = [random_tokens(5, seed).tolist() for seed in range(4)]
    requests = [Request(str(n), tuple(prompt), 60, ()) for n, prompt in enumerate(prompts)]
    plain = replies(Engine(looping, slots=3), requests)
    alone = Eagle3Drafter(head_of(looping), looping, TREE)
    lookup = NgramDrafter(looping, TREE, NgramSection())
    rounds = []
    for drafter in (alone, lookup, LookupDrafter(alone, lookup)):
        done = run(Engine(looping, drafter=drafter, slots=3), requests)
        assert {name: each.token_ids for name, each in done.items()} == plain
        rounds.append(sum(each.statistics.rounds for each in done.values()))
    assert rounds[2] < 0.7 * rounds[0]
    assert rounds[2] <= 1.05 * rounds[1]


def test_prompt_and_reply_are_looked_up(model: DecoderModel) -> None:
    head = Eagle3Drafter(head_of(model), model, TREE)
    drafter = LookupDrafter(head, NgramDrafter(model, TREE, NgramSection()))
    planes, batch = (
        poisoned_planes(model, 5, drafter),
        open_rows(model, 1, pages=4, drafter=drafter),
    )
    text = random_tokens(40, 3).tolist()
    prefill_prompt(model, planes, drafter, batch, torch.tensor(text))
    text.append(int(batch.roots[0]))
    for _ in range(6):
        assert batch.history[0, : len(text)].tolist() == text
        decode_round(model, planes, drafter, batch, sampling=False)
        text += batch.emitted[0, : int(batch.counts[0])].tolist()


def test_a_factory_makes_both(model: DecoderModel) -> None:
    head = head_of(model)
    section = DrafterSection(name="eagle3", lookup={"min_match": 2})
    factory = load_drafter(section, model, cast("Target", None), head)
    assert factory is not None and factory.without_lookup is not None
    drafter = factory(TREE)
    assert isinstance(drafter, LookupDrafter)
    alone = factory.without_lookup(TREE)
    assert isinstance(alone, Eagle3Drafter)
    assert (drafter.state, drafter.planes) == (alone.state, alone.planes)


def test_every_variant_has_one(model: DecoderModel) -> None:
    section = DrafterSection(name="self_spec", budget="auto", lookup={})
    factory = load_drafter(section, model, cast("Target", None), None)
    assert factory is not None
    for each in factory.choices:
        assert isinstance(each(TREE), LookupDrafter) and each.without_lookup is not None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "ngram", "lookup": {}}, "its own settings stand beside the name"),
        ({"name": "none", "lookup": {}}, "leave lookup out"),
        ({"lookup": {"max_matches": 3}}, "max_matches"),
        ({"lokup": {}}, "did you mean 'lookup'"),
    ],
)
def test_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DrafterSection.model_validate(settings)
