"""A block drafter with a Markov head: drafts as it was trained, its tree is a beam over conditional
scores, its confidence moves nodes, and whatever it proposes the output is the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import DrafterSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.round import draft_tree
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError
from pipeline.heads.dflash.blocks import BlockObjective, DflashModel, cut_blocks
from pipeline.heads.dflash.drafter import DflashDrafter
from pipeline.heads.dflash.shape import DflashHead
from pipeline.learning.batches import TrainBatch
from pipeline.target.open import Target
from pipeline.tuning.verification import draw_gap
from tests.decoder.conftest import load_model, open_rows, poisoned_planes
from tests.decoder.parity import worst_block_difference
from tests.decoder.test_dflash import BLOCK, block_head, replies, requests_of

DEEP = TreeSection(top_k=3, steps=BLOCK, nodes=12)  # a block predicts as many tokens as it has


def dspark_head(model: DecoderModel, **options: Any) -> DflashHead:
    return block_head(model, **{"markov_rank": 4, "confidence": True, **options})


@pytest.fixture
def head(model: DecoderModel) -> DflashHead:
    return dspark_head(model)


@pytest.mark.parametrize("ops", [None, TorchOps, EagerOps], ids=["picked", "torch", "eager"])
@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_a_chain_s_logits_equal_training_s(
    make_target: Callable[[str], Path], layers: int, ops: Any
) -> None:
    """Training sees a text that goes on with the chain that was drafted."""
    model = load_model(make_target("llama"), ops=ops and ops())
    head = dspark_head(model, layers=layers)
    assert worst_block_difference(model, head, prefix=17) < 1e-4


@torch.no_grad()
def test_a_bias_of_another_token_is_seen(
    model: DecoderModel, head: DflashHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = DflashDrafter._propose

    def planted(self: Any, state: Any, logits: Any, before: Tensor, *rest: Any) -> Any:
        return propose(self, state, logits, torch.zeros_like(before), *rest)

    monkeypatch.setattr(DflashDrafter, "_propose", planted)
    assert worst_block_difference(model, head, prefix=17) > 1e-2


def drafted(drafter: DflashDrafter, model: DecoderModel, tree: TreeSection) -> Candidates:
    """By a row of a few tokens."""
    planes = poisoned_planes(model, 3, drafter)
    batch = open_rows(model, 1, pages=2, drafter=drafter)
    batch.roots.fill_(9)
    return drafter.candidates(batch, planes, tree)


def beams_by_definition(head: DflashHead, model: DecoderModel, k: int, weight: float) -> set[Any]:
    """(path, score) of every candidate of a block after root 9 and no context, token by token."""
    states = block_states(head, model, 9)
    ids, markov, sure = head.target_ids().tolist(), head.markov_head, head.confidence_head
    assert markov is not None and sure is not None
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    every = set()
    for state in states:
        grown = []
        for path, score in beams:
            latent = markov.markov_w1.weight[path[-1] if path else 9]
            logits = head.lm_head.weight @ state + markov.markov_w2.weight @ latent
            odds = sure.proj(torch.cat((state, latent)))[0]
            best = logits.log_softmax(-1).topk(k)
            for gained, index in zip(best.values, best.indices, strict=True):
                total = score + float(gained) + weight * float(F.logsigmoid(odds))
                grown.append(((*path, ids[int(index)]), total))
        every |= {(path, round(score, 3)) for path, score in grown}
        beams = sorted(grown, key=lambda each: -each[1])[:k]
    return every


def block_states(head: DflashHead, model: DecoderModel, root: int) -> Tensor:
    """What lm_head reads in training [b, H] behind a root that begins its text."""
    tokens, label = torch.full((9,), root), torch.tensor([1])
    aux = torch.zeros(9, 3 * model.config.hidden_size)
    batch = TrainBatch(("x",), (9,), tokens, aux, label, label, aux[:1, : aux.shape[1] // 3])
    fixed = model.embedding, model.embedding, BlockObjective(1, 4.0, 0)
    trained = DflashModel(head, *fixed, max_length=9, dtype=torch.float32)
    return trained.draft(batch, cut_blocks(batch, torch.tensor([0]), BLOCK + 1))[0]


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("k", [1, 3])
@torch.no_grad()
def test_a_tree_is_a_beam_over_conditional_scores(
    model: DecoderModel, head: DflashHead, k: int, weight: float
) -> None:
    tree = TreeSection(top_k=k, steps=BLOCK, nodes=12 if k > 1 else BLOCK + 1)
    drafter = DflashDrafter(head, model, tree, confidence_weight=weight)
    tokens, parents, scores, depths = drafted(drafter, model, tree)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens[0].tolist(), parents[0].tolist(), strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), token))
    assert [len(path) for path in paths] == depths.tolist()
    ours = {(path, round(float(score), 3)) for path, score in zip(paths, scores[0], strict=True)}
    expected = beams_by_definition(head, model, k, weight)
    assert {path for path, _ in ours} == {path for path, _ in expected}
    theirs = dict(expected)
    assert all(abs(score - theirs[path]) < 2e-3 for path, score in ours)


@torch.no_grad()
def test_where_the_drafter_is_unsure_a_tree_has_no_nodes(
    model: DecoderModel, head: DflashHead
) -> None:
    """After one token, which the confidence knows, nothing will be accepted."""
    drafter = DflashDrafter(head, model, DEEP)
    likeliest = int(drafted(drafter, model, DEEP).tokens[0, 0])
    markov, sure = head.markov_head, head.confidence_head
    assert markov is not None and sure is not None
    sure.proj.weight.zero_()
    latent = markov.markov_w1.weight[likeliest]
    sure.proj.weight[0, -len(latent) :] = -200 * latent / latent.square().sum()
    sure.proj.bias.fill_(100.0)
    depths, nodes = [], []
    for weight, threshold in ((0.0, 0.0), (1.0, 0.0), (0.0, 0.5)):
        drafter = DflashDrafter(
            head, model, DEEP, confidence_weight=weight, confidence_threshold=threshold
        )
        planes = poisoned_planes(model, 3, drafter)
        batch = open_rows(model, 1, pages=2, drafter=drafter)
        batch.roots.fill_(9)
        tree, *_ = draft_tree(model.ops, drafter, batch, planes, DEEP)
        own = tree.tokens[0].tolist().index(likeliest)
        depths.append(tree.parents[0].tolist().count(own))
        nodes.append(tree.tokens.shape[1])
    assert depths[0] > 0 == depths[1] == depths[2]
    sure.proj.weight.zero_()
    sure.proj.bias.fill_(-0.1)  # below the threshold everywhere: the round is a plain one
    planes = poisoned_planes(model, 3, drafter)
    batch = open_rows(model, 1, pages=2, drafter=drafter)
    drafter = DflashDrafter(head, model, DEEP, confidence_threshold=0.5)
    tree, *_ = draft_tree(model.ops, drafter, batch, planes, DEEP)
    assert tree.tokens.shape[1] == 1 < nodes[0] == nodes[1] == DEEP.nodes


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    "tree",
    [DEEP, TreeSection.chain(BLOCK), TreeSection(top_k=8, steps=1, nodes=9)],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_speculation_changes_nothing(
    model: DecoderModel, head: DflashHead, slots: int, tree: TreeSection, threshold: float
) -> None:
    requests = requests_of(11)
    free = replies(Engine(model), requests)
    stop = free["5"][3]
    requests += [
        replace(each, request_id=f"s{each.request_id}", stop_ids=(stop,)) for each in requests
    ]
    drafter = DflashDrafter(head, model, tree, confidence_threshold=threshold)
    engine = Engine(model, drafter=drafter, slots=slots)
    assert replies(engine, requests) == replies(Engine(model), requests)
    assert engine.pools.shared.free_pages == engine.pools.shared.capacity


@pytest.mark.parametrize("slots", [1, 3])
def test_a_seed_draws_the_same_tokens_with_and_without(
    model: DecoderModel, head: DflashHead, slots: int
) -> None:
    requests = [
        replace(request, temperature=0.8, top_p=0.9, top_k=20, seed=index)
        for index, request in enumerate(requests_of(7))
    ]
    drafter = DflashDrafter(head, model, DEEP)
    drawn = replies(Engine(model, drafter=drafter, slots=slots), requests)
    for request in requests:
        assert draw_gap(model, request, drawn[request.request_id]) < 1e-4


def test_settings_are_those_of_its_own_drafter(model: DecoderModel, head: DflashHead) -> None:
    section = DrafterSection.model_validate({"name": "dspark", "confidence_weight": 0.5})
    factory = load_drafter(section, model, cast("Target", None), head)
    assert factory is not None and factory.depths == (1, 2, 3, 4, 5)
    for each in (factory, *factory.choices):
        drafter = each(TreeSection.chain(max(each.depths)))
        assert isinstance(drafter, DflashDrafter) and drafter.confidence_weight == 0.5
        assert drafter.block_size == max(each.depths) == each.settings["block_size"]
    with pytest.raises(ConfigError, match="6 is more than the 5 tokens that a block predicts"):
        factory(TreeSection.chain(6))
    unsure = dspark_head(model, confidence=False)
    plain, weighed = (
        drafted(DflashDrafter(unsure, model, DEEP, confidence_weight=weight), model, DEEP)
        for weight in (0.0, 1.0)
    )
    assert torch.equal(plain.scores, weighed.scores), "there is no confidence to weigh by"
