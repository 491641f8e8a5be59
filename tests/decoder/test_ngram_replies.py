"""Drafting from what came before: the text stays what it was, and what a tree of it brings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.config import NgramSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.lookup import tree_of_chains
from pipeline.decoder.request import Request, pool_acceptance
from pipeline.decoder.round import prefill_prompt
from pipeline.drafters.ngram import CorpusIndex, NgramDrafter
from pipeline.tuning.cost import measure_costs
from pipeline.tuning.trace import (
    acceptance,
    continuation_ranks,
    replay,
    replay_counters,
    trace,
)
from pipeline.tuning.verification import draw_gap
from tests.decoder.conftest import VOCABULARY, open_rows, poisoned_planes, random_tokens
from tests.decoder.ngrams import (
    SECTION,
    TREE,
    mixed_requests,
    nodes_of,
    replies,
    run,
)

# The text stays what it was.


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(
    "tree",
    [TREE, TreeSection(top_k=1, steps=8, nodes=9), TreeSection(top_k=4, steps=2, nodes=64)],
)
def test_greedy_text_is_that_of_plain_decoding(
    model: DecoderModel, slots: int, tree: TreeSection
) -> None:
    corpus = CorpusIndex(random_tokens(300, seed=1), VOCABULARY, SECTION.max_match)
    for given in (None, corpus):
        drafter = NgramDrafter(model, tree, SECTION, given)
        engine = Engine(model, drafter=drafter, slots=slots, prefill_tokens=37)
        assert replies(engine, mixed_requests(11)) == replies(Engine(model), mixed_requests(11))


def test_replies_end_at_stop_tokens(model: DecoderModel) -> None:
    free = replies(Engine(model), mixed_requests(9))
    stops = (free["7"][2], free["8"][3])
    engine = Engine(model, drafter=NgramDrafter(model, TREE, SECTION), slots=3)
    stopped = replies(engine, mixed_requests(9, stops))
    assert stopped == replies(Engine(model), mixed_requests(9, stops)) != free


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("settings", [{"top_p": 1.0}, {"top_p": 0.9, "top_k": 8}])
def test_a_seed_draws_what_it_draws_plainly(
    model: DecoderModel, slots: int, settings: dict[str, Any]
) -> None:
    requests = [
        replace(each, temperature=0.4, seed=index, **settings)
        for index, each in enumerate(mixed_requests(8))
    ]
    engine = Engine(model, drafter=NgramDrafter(model, TREE, SECTION), slots=slots)
    for name, reply in replies(engine, requests).items():
        # Not compared token by token: see test_engine.
        assert draw_gap(model, requests[int(name)], reply) < 1e-4
    long = [each for each in requests if each.max_new_tokens > 10]
    drawn = replies(engine, long)
    gaps = [draw_gap(model, replace(each, seed=99), drawn[each.request_id]) for each in long]
    assert max(gaps) > 1e-2, "other numbers draw other tokens"


@pytest.mark.parametrize("slots", [1, 3])
def test_text_that_repeats_takes_few_rounds(looping: DecoderModel, slots: int) -> None:
    prompts = [tuple(random_tokens(20, seed=n).tolist()) for n in range(4)]
    requests = [Request(str(n), prompt, 100 + n, ()) for n, prompt in enumerate(prompts)]
    drafter = NgramDrafter(looping, TreeSection(top_k=2, steps=8, nodes=16), NgramSection())
    done = run(Engine(looping, drafter=drafter, slots=slots), requests)
    assert pool_acceptance([each.statistics for each in done.values()]).tau > 2
    plain = replies(Engine(looping), requests)
    assert {name: each.token_ids for name, each in done.items()} == plain


def test_a_long_context(looping: DecoderModel) -> None:
    """A phrase that stood at the beginning of two thousand tokens is proposed from again."""
    model, drafter = looping, NgramDrafter(looping, TREE, NgramSection())
    phrase = [91, 92, 93, 94, 95, 96, 97, 98]
    prompt = torch.tensor([*phrase, *(random_tokens(2000, 5) % 90).tolist(), *phrase[:3]])
    planes = poisoned_planes(model, 40, drafter)
    batch = open_rows(model, 1, pages=36, drafter=drafter)
    prefill_prompt(model, planes, drafter, batch, prompt)
    batch.history[0, len(prompt)] = phrase[3]  # as if the target had gone on so
    drafted = drafter.candidates(batch, planes, TREE)
    assert (*phrase[4:],) in nodes_of(drafted, 0)
    requests = [Request("long", tuple(prompt.tolist()), 40, ())]
    assert replies(Engine(model, drafter=drafter), requests) == replies(Engine(model), requests)


# Choosing a tree.


def test_a_trace_replays_the_engines_rounds(looping: DecoderModel) -> None:
    model = looping
    prompts = [[*random_tokens(10 + 5 * n, seed=n).tolist()] for n in range(5)]
    widest = TreeSection(top_k=3, steps=6, nodes=32)
    drafter = NgramDrafter(model, widest, SECTION)
    traces = trace(model, drafter, prompts, 50, widest, widths=(1, 2, 3), slots=2)
    taus = set()
    for top_k, steps, nodes in ((1, 6, 7), (2, 3, 5), (3, 6, 32), (3, 2, 6), (2, 6, 4)):
        shape = TreeSection(top_k=top_k, steps=steps, nodes=nodes)
        engine = Engine(model, drafter=NgramDrafter(model, shape, SECTION))
        requests = [Request(str(n), tuple(prompt), 50, ()) for n, prompt in enumerate(prompts)]
        done = run(engine, requests)
        measured = [done[str(n)].statistics for n in range(len(prompts))]
        assert replay(traces, shape) == [each.rounds for each in measured]
        assert replay_counters(traces, shape) == [each.counters() for each in measured]
        assert acceptance(traces, shape) == pool_acceptance(measured).tau
        taus.add(acceptance(traces, shape))
    assert max(taus) > 1.5 and len(taus) > 2


def test_a_trace_counts_nothing_where_nothing_is_proposed() -> None:
    zeros = torch.zeros(1, 2, 3, dtype=torch.int64)
    nothing = tree_of_chains(zeros, zeros[..., 0], 2)
    ranks = continuation_ranks([nothing], zeros[:, :1])
    assert (ranks > 1 << 20).all()


def test_costs_are_measured(model: DecoderModel) -> None:
    drafter = NgramDrafter(model, TREE, SECTION)
    costs = measure_costs(
        model, drafter, 2, 100, (1, 4, 8), beam_counts=(1, 2), step_counts=(1, 3), repeats=2
    )
    shape = TreeSection(top_k=2, steps=3, nodes=8)
    assert min(costs.plain_seconds, costs.extend_seconds(3), *costs.verify.values()) > 0
    assert costs.round_seconds(shape) > costs.verify[8] + costs.extend_seconds(3)
