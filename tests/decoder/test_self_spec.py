"""The target over a part of its cache: what it reads, what it keeps, and that the text stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import DrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import PAGE
from pipeline.decoder.round import decode_round, prefill_prompt
from pipeline.drafters.self_spec import SnapKvDrafter, StreamingDrafter
from pipeline.errors import Eagle3Error
from pipeline.tuning.cost import measure_costs
from pipeline.tuning.trace import replay, trace
from tests.decoder.conftest import CAPTURE, open_rows, poisoned_planes, random_tokens
from tests.decoder.drafting import decode, no_values, requests_of, tokens_of

CHAIN = TreeSection(top_k=1, steps=3, nodes=4)
TREE = TreeSection(top_k=3, steps=3, nodes=9)
#: Of SnapKV: ring, selected entries, observing tokens, pooled neighbours.
RECENT, SELECTED, OBSERVING, POOL = 16, 24, 8, 3
MakeTarget = Callable[[str], Path]
LONG = (200, 161, 40, 190, 70, 128, 15, 129)

MAKERS: dict[str, Callable[[DecoderModel, TreeSection], Drafter]] = {
    "streaming": lambda model, tree: StreamingDrafter(model, tree, budget=PAGE + 20),
    "snapkv": lambda model, tree: SnapKvDrafter(
        model, tree, budget=RECENT + SELECTED, recent=RECENT, window=OBSERVING, pool=POOL
    ),
}
#: Budgets that no request here exceeds.
ALL: dict[str, Callable[[DecoderModel, TreeSection], Drafter]] = {
    "streaming": lambda model, tree: StreamingDrafter(model, tree, budget=320),
    "snapkv": lambda model, tree: SnapKvDrafter(
        model, tree, budget=256, recent=RECENT, window=OBSERVING, pool=POOL
    ),
}
KINDS = sorted(MAKERS)


@pytest.fixture
def target(make_target: MakeTarget) -> DecoderModel:
    return _load(make_target("qwen3"))


def _load(directory: Path, ops: TorchOps | None = None) -> DecoderModel:
    return DecoderModel.load(
        directory,
        CAPTURE,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=250,
        ops=ops,
    )


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("tree", [CHAIN, TREE])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_plain_decodings(
    target: DecoderModel, kind: str, slots: int, tree: TreeSection
) -> None:
    requests = requests_of(LONG)
    plain = tokens_of(decode(target, None, requests, slots))
    done = decode(target, MAKERS[kind](target, tree), requests, slots)
    assert tokens_of(done) == plain
    assert max(each.statistics.acceptance_length for each in done.values()) > 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_plain_decodings(target: DecoderModel, kind: str) -> None:
    requests = requests_of(LONG, temperature=0.8)
    sampled = tokens_of(decode(target, MAKERS[kind](target, TREE), requests, 3))
    assert sampled == tokens_of(decode(target, None, requests, 3))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_with_everything_visible_it_is_always_right(
    target: DecoderModel, kind: str, slots: int
) -> None:
    """Across page borders, chunks of prompts, and rows that join and leave."""
    requests = requests_of((1, 3, 15, 16, 17, 60, 64, 65, 127, 130), new_tokens=31)
    for each in decode(target, ALL[kind](target, CHAIN), requests, slots).values():
        tokens = len(each.token_ids) - 1
        assert each.statistics.rounds == -(-tokens // (CHAIN.steps + 1))


class _Row:
    """One request, after its prompt and some rounds."""

    def __init__(self, model: DecoderModel, kind: str, length: int, rounds: int) -> None:
        self.model, self.drafter = model, MAKERS[kind](model, TREE)
        self.planes: Planes = poisoned_planes(model, 10, self.drafter)
        rows = open_rows(model, 2, pages=4, drafter=self.drafter)
        self.batch: DecodeBatch = rows.rows(1, 2)
        prompt = random_tokens(length, seed=length)
        prefill_prompt(model, self.planes, self.drafter, self.batch, prompt)
        for _ in range(rounds):
            decode_round(model, self.planes, self.drafter, self.batch, sampling=False)
        self.length = int(self.batch.seq_lens)

    def entries(self, plane: Tensor, table: Tensor) -> Tensor:
        """[2, layers, G, S, d] in their order."""
        return plane[:, :, table[0]].transpose(2, 3).flatten(3, 4).transpose(0, 1)


@pytest.mark.parametrize("rounds", [0, 1, 7])
@pytest.mark.parametrize("length", [5, 16, 17, 39, 40, 41, 100, 200])
@torch.inference_mode()
def test_slots_hold_the_entries_that_they_should(
    target: DecoderModel, length: int, rounds: int
) -> None:
    row = _Row(target, "snapkv", length, rounds)
    whole = row.entries(row.planes.target, row.batch.block_table)
    private = row.entries(row.planes.drafter_kv[0], row.batch.drafter_block_table)
    total = row.length
    for slot in range(min(total, RECENT)):
        entry = next(entry for entry in range(total - 1, -1, -1) if entry % RECENT == slot)
        assert torch.equal(private[..., slot, :], whole[..., entry, :])
    if length <= RECENT + SELECTED:
        for entry in range(min(SELECTED, max(0, total - RECENT))):
            assert torch.equal(private[..., RECENT + entry, :], whole[..., entry, :])


@pytest.mark.parametrize("length", [41, 64, 65, 150])
@torch.inference_mode()
def test_what_the_end_of_the_prompt_attends_to_is_kept(
    make_target: MakeTarget, target: DecoderModel, length: int
) -> None:
    row = _Row(target, "snapkv", length, rounds=0)
    whole = row.entries(row.planes.target, row.batch.block_table)
    private = row.entries(row.planes.drafter_kv[0], row.batch.drafter_block_table)
    attentions = _attentions(make_target("qwen3"), random_tokens(length, seed=length))
    groups, differ = target.kv_heads, 0
    for layer, weights in enumerate(attentions):  # [Q, S, S]
        weight = weights[:, -OBSERVING:].sum(1).view(groups, -1, length).sum(1)  # [G, S]
        pooled = [
            weight[:, max(0, entry - POOL // 2) : entry + POOL // 2 + 1].max(-1).values
            for entry in range(length)
        ]
        pooled = pooled[: length - RECENT]
        for group in range(groups):
            best = sorted(range(len(pooled)), key=lambda e: -float(pooled[e][group]))[:SELECTED]
            kept = private[:, layer, group, RECENT : RECENT + SELECTED]  # [2, E, d]
            # Neighbours share a maximum: of equals any is right, so weights are compared.
            same = (kept[0][:, None] == whole[0, layer, group, : len(pooled)]).all(-1)  # [E, S]
            held = same.int().argmax(1).tolist()
            assert same.any(1).all() and len(set(held)) == SELECTED and held == sorted(held)
            ours, theirs = (
                sorted(float(pooled[entry][group]) for entry in some) for some in (held, best)
            )
            assert ours == pytest.approx(theirs, rel=1e-3)
            assert torch.equal(kept[1], whole[1, layer, group][held])
            differ += held != list(range(len(pooled) - SELECTED, len(pooled)))
    assert differ, "the latest entries are not simply the best"


def _attentions(directory: Path, tokens: Tensor) -> list[Tensor]:
    """Of transformers' own model: softmax weights [Q, S, S] of each layer."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    output = model.float()(tokens[None], output_attentions=True)
    return [weights[0] for weights in output.attentions]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "rounds"), [(30, 0), (200, 0), (200, 3), (130, 9)])
@torch.inference_mode()
def test_the_root_attends_to_what_is_visible_and_to_nothing_else(
    make_target: MakeTarget, kind: str, length: int, rounds: int
) -> None:
    """Against attention over the visible keys, gathered and computed in float64."""
    row = _Row(_load(make_target("qwen3"), TorchOps()), kind, length, rounds)
    if kind == "snapkv":
        visible = row.entries(row.planes.drafter_kv[0], row.batch.drafter_block_table)
        visible = visible[..., : min(row.length, RECENT + SELECTED), :]
    else:
        entries = row.entries(row.planes.target, row.batch.block_table)[..., : row.length, :]
        hidden = max(0, (row.length - 20) // PAGE - 1) * PAGE
        visible = torch.cat((entries[..., :PAGE, :], entries[..., PAGE + hidden :, :]), -2)
        assert (hidden > 0) == (length > 128)
    wanted = _root_scores(row, visible.double()).topk(3)
    drafted = row.drafter.candidates(row.batch, row.planes, TREE)
    assert drafted.tokens[0, :3].tolist() == wanted.indices.tolist()
    torch.testing.assert_close(drafted.scores[0, :3].double(), wanted.values, atol=1e-4, rtol=0)


def _root_scores(row: _Row, visible: Tensor) -> Tensor:
    """Log-probabilities [V] behind the root over keys and values `visible` [2, layers, G, S, d]."""
    model, position = row.model, row.batch.seq_lens
    hidden = model.embedding[row.batch.roots].double()  # [1, H]
    cos, sin = (table[position].double() for table in model.rotary)  # [1, d]
    eps, norm, groups = model.stack.eps, model.input_norm, model.kv_heads

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return torch.as_tensor(F.rms_norm(x, (x.shape[-1],), weight.double(), eps))

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.as_tensor(x * cos + torch.cat((-second, first), -1) * sin)

    for index, (layer, following) in enumerate(
        zip(model.stack.layers, model.stack.norms, strict=True)
    ):
        qkv = (normed(hidden, norm) @ layer.qkv.double().T).view(-1, model.head_dim)
        query, key, value = qkv.split([len(qkv) - 2 * groups, groups, groups])
        if layer.head_norms:
            query, key = (normed(x, w) for x, w in zip((query, key), layer.head_norms, strict=True))
        keys = torch.cat((visible[0, index], turned(key)[:, None]), 1)  # [G, S + 1, d]
        values = torch.cat((visible[1, index], value[:, None]), 1)
        grouped = turned(query).view(groups, -1, model.head_dim)  # [G, Q/G, d]
        weights = (grouped @ keys.mT * model.head_dim**-0.5).softmax(-1)
        hidden = hidden + (weights @ values).flatten()[None] @ layer.output.double().T
        gate, up = (normed(hidden, layer.post_norm) @ layer.gate_up.double().T).chunk(2, -1)
        hidden = hidden + (F.silu(gate) * up) @ layer.down.double().T
        norm = following
    logits = normed(hidden, norm) @ model.lm_head.double().T
    return torch.as_tensor(logits[0].log_softmax(-1))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_round_looks_at_no_value(make_target: MakeTarget, kind: str) -> None:
    """In torch's own operations but for attention, which is a kernel on CUDA."""
    row = _Row(_load(make_target("qwen3"), ops := TorchOps()), kind, 100, rounds=1)
    ops.tree_attention = lambda query, *rest: query  # type: ignore[method-assign]
    with no_values():
        drafted = row.drafter.candidates(row.batch, row.planes, TREE)
    assert drafted.tokens.shape == (1, 3 + 2 * 9)


@pytest.mark.parametrize("kind", KINDS)
def test_an_abandoned_stream_gives_its_pages_back(target: DecoderModel, kind: str) -> None:
    engine = Engine(target, drafter=MAKERS[kind](target, TREE), slots=3, prefill_tokens=48)
    stream = engine.stream(requests_of(LONG))
    for _ in range(9):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    for pool in (engine.pools.shared, engine.pools.drafter_pages):
        assert pool.free_pages == pool.capacity
    assert (engine.pools.drafter_pages.capacity > 0) == (kind == "snapkv")


@pytest.mark.parametrize("kind", KINDS)
def test_traces_and_costs(target: DecoderModel, kind: str) -> None:
    prompts = [random_tokens(length, seed=length).tolist() for length in (30, 150, 190)]
    drafter = MAKERS[kind](target, TREE)
    traces = trace(target, drafter, prompts, 20, TREE, widths=(1, 3), slots=2)
    for shape in (TREE, CHAIN):
        requests = [
            each.__class__(each.request_id, tuple(prompt), 20, ())
            for each, prompt in zip(requests_of(), prompts, strict=False)
        ]
        done = decode(target, MAKERS[kind](target, shape), requests, 2)
        assert replay(traces, shape) == [done[str(row)].statistics.rounds for row in range(3)]
    costs = measure_costs(target, drafter, 2, 160, (4,), beam_counts=(1,), step_counts=(2,))
    assert costs.draft_seconds(1) > 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"budget": 64}, "budget"),
        ({"budget": 128, "recent": 128}, "set it below 128"),
        ({"window": 65}, "set it to at most 64"),
        ({"pool": 4}, "pool is even"),
        ({"kv": "h2o"}, "streaming"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, Eagle3Error), match=problem):
        DrafterSection(name="self_spec", **settings)
