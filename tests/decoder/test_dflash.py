"""The block drafter: drafts as it was trained, its tree is the best of its marginals, and whatever
it proposes the output is the target's own."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import DrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import join_marginals
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.request import Request
from pipeline.decoder.round import draft_tree, prefill_prompt
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError, HeadError
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.dflash.init import dflash_shape_for
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.init import random_init
from pipeline.tuning.verification import draw_gap
from tests.decoder.conftest import (
    VOCABULARY,
    load_model,
    open_rows,
    poisoned_planes,
    random_tokens,
    states_of,
)
from tests.decoder.drafting import read_both_ways
from tests.decoder.parity import BlockDrafting, block_trained_on

BLOCK, PREFIX = 5, 17
TREE = TreeSection(top_k=3, steps=4, nodes=12)


def block_head(
    model: DecoderModel,
    *,
    layers: int = 2,
    seed: int = 3,
    proposed: Tensor | None = None,
    **options: Any,
) -> DflashHead:
    """A random drafter of 60 tokens, or of those `proposed`: its guesses are bad, which
    losslessness must survive."""
    if proposed is None:
        chosen = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:60]
        proposed = chosen.sort().values
    shape = dflash_shape_for(
        model.config,
        layers=layers,
        block_size=BLOCK,
        mask_token_id=7,
        draft_vocab_size=len(proposed),
        intermediate_size=64,
        num_attention_heads=None,
        num_key_value_heads=None,
        **options,
    )
    head = DflashHead(shape)
    random_init(head, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:  # ones would hide a missing one
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif parameter.dim() == 1:
                parameter.zero_()
            else:
                parameter.mul_(40 if "markov" in name else 12)
    head.set_vocabulary(proposed)
    return head


@pytest.fixture
def head(model: DecoderModel) -> DflashHead:
    return block_head(model)


def requests_of(count: int, stop_ids: tuple[int, ...] = ()) -> list[Request]:
    """Prompts of 3 to 40 tokens, limits of 1 to 36."""
    generator = torch.Generator().manual_seed(7)
    prompts = [
        tuple(torch.randint(0, VOCABULARY, (3 + 11 * each % 38,), generator=generator).tolist())
        for each in range(count)
    ]
    return [
        Request(str(index), prompt, 1 + (17 * index) % 36, stop_ids)
        for index, prompt in enumerate(prompts)
    ]


def replies(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.generate(requests)}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("extended", [0, 1, 4])
@torch.no_grad()
def test_draft_logits_equal_training_logits(
    model: DecoderModel, layers: int, extended: int
) -> None:
    """The drafter knows PREFIX tokens, as a prompt and what a round has accepted of it; training
    sees a text that goes on behind them."""
    head = block_head(model, layers=layers)
    tokens = random_tokens(PREFIX + 9, seed=5)
    aux = states_of(model, tokens).aux
    drafting, read = BlockDrafting(head, model, 2), PREFIX - extended
    drafting.read(1, aux[9:20], 11)  # a neighbour, which must not matter
    drafting.read(0, aux[:read], read)
    if extended:
        padding = torch.full((2, aux.shape[1]), 9.0)
        drafting.logits(3)  # what an earlier block has left
        drafting.read(0, torch.cat((aux[read:PREFIX], padding)), extended)
    drafted = drafting.logits(int(tokens[PREFIX]))
    expected = block_trained_on(head, model, tokens, aux, PREFIX)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(drafted, expected, atol=1e-4, rtol=0)
    late = block_trained_on(head, model, tokens, aux, PREFIX + 1)
    assert float((drafted - late).abs().max()) > 1e-2


#: Fields of drafters of other trainers.
FOREIGN: dict[str, dict[str, Any]] = {
    "five states": {"aux_layers": 5},
    "biases": {"attention_bias": True},
    "causal": {"causal_layers": (0, 1, 2)},
    "z-lab's windows": {"sliding_window": 64, "sliding_layers": (0, 1), "causal_layers": (0, 1)},
    "MiMo's windows": {"sliding_window": 64, "sliding_layers": (0, 1, 2)},
}


@pytest.mark.parametrize("ops", [None, TorchOps, EagerOps], ids=["picked", "torch", "eager"])
@pytest.mark.parametrize("fields", FOREIGN.values(), ids=FOREIGN)
@torch.no_grad()
def test_heads_of_other_trainers_draft_as_they_are_trained(
    make_target: Callable[[str], Path], fields: dict[str, Any], ops: Any
) -> None:
    model = load_model(make_target("llama"), ops=ops and ops())
    model.stack = replace(model.stack, captured=tuple(range(fields.get("aux_layers", 3))))
    shape = block_head(model, layers=3).shape
    head, plain = (DflashHead(shape.model_copy(update=each)) for each in (fields, {}))
    generator = torch.Generator().manual_seed(6)
    for name, tensor in head.state_dict().items():
        if name not in ("d2t", "t2d"):
            random = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(random * 0.2 + ("norm" in name))
    head.set_vocabulary(torch.arange(shape.draft_vocab_size))
    hidden = "sliding_window" in fields
    for prefix in (100, 59, 63):
        tokens = random_tokens(prefix + 9, seed=5)
        aux = states_of(model, tokens).aux
        drafting = BlockDrafting(head, model, 2)
        drafting.read(1, aux[9:20], 11)  # a neighbour, which must not matter
        drafting.read(0, aux[: prefix - 4], prefix - 4)
        drafting.read(0, aux[prefix - 4 : prefix + 2], 4)
        drafted = drafting.logits(int(tokens[prefix]))
        expected = block_trained_on(head, model, tokens, aux, prefix)
        torch.testing.assert_close(drafted, expected, atol=1e-4, rtol=0)
        if not hidden and "causal_layers" not in fields:
            continue
        plain.load_state_dict(head.state_dict())
        other = block_trained_on(plain, model, tokens, aux, prefix)
        seen = hidden and "causal_layers" not in fields and prefix + BLOCK <= 64
        assert (float((drafted - other).abs().max()) > 1e-3) != seen


@torch.no_grad()
def test_a_planted_shift_of_the_context_is_seen(model: DecoderModel, head: DflashHead) -> None:
    tokens = random_tokens(PREFIX + 5, seed=5)
    aux = states_of(model, tokens).aux
    drafting = BlockDrafting(head, model, 1)
    drafting.read(0, aux[:PREFIX].roll(1, 0), PREFIX)
    expected = block_trained_on(head, model, tokens, aux, PREFIX)
    assert float((drafting.logits(int(tokens[PREFIX])) - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(
    "tree",
    [
        TREE,
        TreeSection(top_k=1, steps=3, nodes=4),
        TreeSection(top_k=8, steps=1, nodes=9),
        TreeSection(top_k=15, steps=4, nodes=16),
    ],
    ids=str,
)
def test_speculation_changes_nothing(
    model: DecoderModel, head: DflashHead, slots: int, tree: TreeSection
) -> None:
    requests = requests_of(11)
    free = replies(Engine(model), requests)
    stop = free["5"][3]
    requests += [
        replace(each, request_id=f"s{each.request_id}", stop_ids=(stop,)) for each in requests
    ]
    engine = Engine(model, drafter=DflashDrafter(head, model, tree), slots=slots)
    assert replies(engine, requests) == replies(Engine(model), requests)
    assert engine.pools.shared.free_pages == engine.pools.shared.capacity


def test_tokens_that_are_drafted_right_are_accepted(
    model: DecoderModel, head: DflashHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that always says one token, and a drafter that always proposes it first."""
    with torch.no_grad():
        head.norm.weight.zero_()  # equal logits: the first of the draft vocabulary
    drafter = DflashDrafter(head, model, TreeSection(top_k=1, steps=4, nodes=5))
    proposed = int(head.target_ids()[0])
    said = lambda logits: torch.full(logits.shape[:-1], proposed)  # noqa: E731
    monkeypatch.setattr(model.ops, "argmax", said)
    (done,) = Engine(model, drafter=drafter).generate([Request("a", (5, 9, 2), 31, ())])
    assert set(done.token_ids[1:]) == {proposed}
    assert done.statistics.rounds == 6, "30 tokens behind the first, five a round"


@pytest.mark.parametrize("slots", [1, 3])
def test_a_seed_draws_the_same_tokens_with_and_without(
    model: DecoderModel, head: DflashHead, slots: int
) -> None:
    requests = [
        replace(request, temperature=0.8, top_p=0.9, top_k=20, seed=index)
        for index, request in enumerate(requests_of(7))
    ]
    drafter = DflashDrafter(head, model, TREE)
    drawn = replies(Engine(model, drafter=drafter, slots=slots), requests)
    for request in requests:
        assert draw_gap(model, request, drawn[request.request_id]) < 1e-4


def test_prompts_read_in_chunks_and_shapes_by_batch_size_change_nothing(
    model: DecoderModel, head: DflashHead
) -> None:
    requests = requests_of(11)
    whole = replies(Engine(model), requests)
    shapes = {1: TREE, 2: None, 4: TreeSection(top_k=2, steps=2, nodes=4)}
    for prefill_tokens in (1, 7):
        drafter = DflashDrafter(head, model, shapes)
        engine = Engine(model, drafter=drafter, slots=5, prefill_tokens=prefill_tokens)
        assert replies(engine, requests) == whole


@torch.inference_mode()
def test_plain_rounds_leave_the_drafter_ready(model: DecoderModel, head: DflashHead) -> None:
    """After rounds with and without a tree it drafts what it drafts behind a prompt of the same
    tokens, up to rounding."""
    drafter, without = (DflashDrafter(head, model, {1: shape}) for shape in (TREE, None))
    opened = partial(_open, model, drafter)
    (batch, planes), (whole, others) = read_both_ways(model, drafter, without, opened)
    drafter.trace = []
    for rows, plane in ((batch, planes), (whole, others)):
        draft_tree(model.ops, drafter, rows, plane, TREE)
    torch.testing.assert_close(*drafter.trace, atol=1e-3, rtol=1e-4)


def _open(model: DecoderModel, drafter: DflashDrafter) -> tuple[DecodeBatch, Planes]:
    planes = poisoned_planes(model, 3, drafter)
    return open_rows(model, 1, pages=2, drafter=drafter), planes


def best_first(scores: Tensor, tokens: Tensor, nodes: int) -> dict[tuple[int, ...], float]:
    """The likeliest branches of marginals [D, k], taken from a heap: path of tokens → score."""
    steps, k = scores.shape
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    best: dict[tuple[int, ...], float] = {}
    order = 0
    while heap and len(best) < nodes:
        negative, _, ranks = heapq.heappop(heap)
        if ranks:
            path = tuple(int(tokens[depth, rank]) for depth, rank in enumerate(ranks))
            best[path] = -negative
        if len(ranks) < steps:
            for rank in range(k):
                order += 1
                score = -negative + float(scores[len(ranks), rank])
                heapq.heappush(heap, (-score, order, (*ranks, rank)))
    return best


def paths_of(
    ops: TorchOps, scores: Tensor, tokens: Tensor, nodes: int
) -> list[set[tuple[int, ...]]]:
    """Branches of each row's tree, from the marginals [B, D, k]."""
    proposed, parents, cumulative, depths = join_marginals(scores, tokens)
    roots = torch.zeros(len(scores), dtype=torch.int64)
    tree = ops.grow_tree(roots, proposed, parents, cumulative, nodes)
    every = []
    for row in range(len(scores)):
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, tree.tokens.shape[1]):
            above = paths[int(tree.parents[row, node])]
            paths.append((*above, int(tree.tokens[row, node])))
        assert [len(path) for path in paths] == tree.depth[row].tolist()
        every.append(set(paths[1:]))
    before = torch.where(parents < 0, 0.0, cumulative.gather(1, parents.clamp(min=0)))
    assert bool((cumulative <= before).all()), "no candidate is likelier than its parent"
    expected = torch.where(parents < 0, 1, depths[parents.clamp(min=0)] + 1)
    assert torch.equal(expected, depths.expand_as(expected))
    return every


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 6.0])
def test_the_tree_of_marginals_is_the_best_first_one(steps: int, sharpness: float) -> None:
    """With as many beams as the tree has nodes below the root: exactly, over the vocabulary."""
    nodes, generator = 10, torch.Generator().manual_seed(steps)
    logits = sharpness * torch.randn(6, steps, 30, generator=generator)
    scores, tokens = TorchOps().propose(logits.flatten(0, 1), nodes - 1)
    scores, tokens = scores.view(6, steps, -1), tokens.view(6, steps, -1)
    every_score, every_token = logits.log_softmax(-1), torch.arange(30).expand(steps, -1)
    for row, paths in enumerate(paths_of(TorchOps(), scores, tokens, nodes)):
        assert paths == set(best_first(every_score[row], every_token, nodes - 1))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_few_beams_are_the_likeliest_branches_of_their_depth(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.randn(4, 4, k, generator=generator).log_softmax(-1).sort(-1, descending=True)[0]
    tokens = torch.arange(k).expand(4, 4, -1)
    _, parents, cumulative, depths = join_marginals(scores, tokens)
    for row in range(4):
        for depth in (2, 3, 4):
            combined = scores[row, 0]
            for other in range(1, depth - 1):
                combined = (combined[:, None] + scores[row, other]).flatten()
            beams = combined.topk(k).values
            continued = parents[row, depths == depth].view(k, k)[:, 0]
            torch.testing.assert_close(cumulative[row, continued], beams)


@torch.inference_mode()
def test_fewer_positions_are_what_a_head_with_smaller_blocks_drafts(
    model: DecoderModel, head: DflashHead
) -> None:
    smaller = DflashHead(head.shape.model_copy(update={"block_size": 3}))
    smaller.load_state_dict(head.state_dict())
    tree = TreeSection(top_k=3, steps=2, nodes=8)
    drafts = []
    for drafter in (
        DflashDrafter(head, model, tree, block_size=3),
        DflashDrafter(smaller, model, tree),
        DflashDrafter(head, model, tree),
    ):
        batch = open_rows(model, 1, pages=2, drafter=drafter)
        planes = poisoned_planes(model, 3, drafter)
        prefill_prompt(model, planes, drafter, batch, random_tokens(PREFIX, seed=5))
        drafts.append(drafter.candidates(batch, planes, tree).scores)
    assert torch.equal(drafts[0], drafts[1])
    assert not torch.equal(drafts[0], drafts[2]), "every position sees all masks"
    requests = requests_of(9)
    drafted = Engine(model, drafter=DflashDrafter(head, model, tree, block_size=3), slots=3)
    assert replies(drafted, requests) == replies(Engine(model), requests)


@torch.inference_mode()
def test_borrowed_rows_draft_as_a_copy_of_them(model: DecoderModel) -> None:
    """A head without an lm_head, beside one that holds the target's rows as its own."""
    every = torch.arange(VOCABULARY)
    borrows = block_head(model, proposed=every, target_lm_head=True)
    copies = block_head(model, proposed=every)
    rows = {"lm_head.weight": model.embedding}
    copies.load_state_dict({**borrows.state_dict(), **rows})
    assert "lm_head.weight" not in borrows.state_dict()
    drafts = []
    for head in (borrows, copies):
        drafter = DflashDrafter(head, model, TREE)
        batch = open_rows(model, 1, pages=2, drafter=drafter)
        planes = poisoned_planes(model, 3, drafter)
        prefill_prompt(model, planes, drafter, batch, random_tokens(PREFIX, seed=5))
        drafts.append(drafter.candidates(batch, planes, TREE))
    assert all(torch.equal(one, other) for one, other in zip(*drafts, strict=True))
    requests = requests_of(9)
    drafted = Engine(model, drafter=DflashDrafter(borrows, model, TREE), slots=3)
    assert replies(drafted, requests) == replies(Engine(model), requests)


def test_what_does_not_fit_is_refused_by_name(model: DecoderModel, head: DflashHead) -> None:
    with pytest.raises(ConfigError, match="5 is more than the 4 tokens") as refused:
        DflashDrafter(head, model, TreeSection(top_k=1, steps=5, nodes=6))
    assert refused.value.where == "tree.steps"
    shallow = DflashDrafter(head, model, TreeSection(top_k=1, steps=1, nodes=2))
    assert shallow.lookahead == BLOCK, "a block is drafted whole"
    foreign = DflashHead(head.shape.model_copy(update={"vocab_size": 99}))
    with pytest.raises(HeadError, match="vocab_size is 99"):
        DflashDrafter(foreign, model, TREE)
    target: Any = None
    with pytest.raises(ConfigError, match="cannot draft with this head, which is one for dflash"):
        load_drafter(DrafterSection(name="eagle3"), model, target, head)
    with pytest.raises(ConfigError, match="needs a trained head"):
        load_drafter(DrafterSection(name="dflash"), model, target, None)
    make = load_drafter(DrafterSection(name="dflash"), model, target, head)
    assert make is not None and isinstance(make(TREE), DflashDrafter)


@torch.inference_mode()
def test_every_backend_of_a_cpu_drafts_the_same(
    torch_model: DecoderModel, model: DecoderModel, head: DflashHead
) -> None:
    """The definition in torch, and whatever this machine picks."""
    tokens = random_tokens(PREFIX, seed=5)
    aux = states_of(model, tokens).aux
    drawn = []
    for target in (model, torch_model):
        drafting = BlockDrafting(head, target, 3)
        for row in range(3):
            drafting.read(row, aux[row:], PREFIX - row)
        drawn.append(drafting.logits(4))
    torch.testing.assert_close(*drawn, atol=1e-4, rtol=0)
