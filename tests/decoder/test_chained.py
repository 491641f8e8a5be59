"""Chained heads draft as they were trained, on every branch; whatever they propose, the output is
the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pipeline.config import DrafterSection, TreeSection
from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.drafter import ReadTokens
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.request import Request
from pipeline.decoder.round import prefill_prompt
from pipeline.drafters.registry import drafter_name, load_drafter
from pipeline.errors import ConfigError, HeadError
from pipeline.heads.init import random_init, shape_for
from pipeline.heads.mtp.drafter import ChainedDrafter
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape
from pipeline.heads.mtp.ttt import unroll_chain
from pipeline.learning.batches import TrainBatch
from pipeline.target.rotary import RotaryTable
from tests.decoder.conftest import (
    VOCABULARY,
    open_rows,
    poisoned_planes,
    random_tokens,
    states_of,
)
from tests.decoder.drafting import decode, no_values, read_both_ways, requests_of, tokens_of

STEPS, PREFIX, PAGES = 5, 17, 2
CPU = torch.device("cpu")
CHAIN = TreeSection(top_k=1, steps=STEPS, nodes=STEPS + 1)
TREE = TreeSection(top_k=3, steps=4, nodes=14)


def chained_head(
    model: DecoderModel,
    heads: int = 3,
    chain_input: Literal["aux", "final"] = "aux",
    *,
    bias: bool = False,
    seed: int = 3,
) -> ChainedHead:
    """Random heads over 60 tokens: their guesses are bad, which losslessness must survive."""
    shape = shape_for(
        ChainedShape,
        model.config,
        heads=heads,
        chain_input=chain_input,
        draft_vocab_size=60,
        intermediate_size=64,
        num_attention_heads=None,
        num_key_value_heads=None,
    )
    head = ChainedHead(shape.model_copy(update={"attention_bias": bias}))
    random_init(head, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1:  # ones would hide a missing norm, zeros a missing bias
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter.mul_(20 if "self_attn" in name else 8)
        if chain_input == "final":
            head.target_norm.copy_(model.stack.norms[-1])
    chosen = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:60]
    head.set_vocabulary(chosen.sort().values)
    return head


@pytest.fixture
def chain(model: DecoderModel) -> ChainedHead:
    return chained_head(model)


def trained_logits(
    head: ChainedHead, model: DecoderModel, tokens: Tensor, aux: Tensor, steps: int
) -> list[Tensor]:
    """The trainer's logits [T, Vd] of every step over a sequence whose end has no aux states."""
    none = torch.zeros(0, dtype=torch.int64)
    padded = torch.cat((aux, torch.full((len(tokens) - len(aux), aux.shape[1]), 1e3)))
    batch = TrainBatch(("x",), (len(tokens),), tokens, padded, none, none, aux[:0])
    length = len(tokens) + STEPS
    rotary = RotaryTable(head.shape.rope_config(), length, device=CPU, dtype=torch.float32)
    every = torch.arange(len(tokens))
    unrolled = unroll_chain(head, model.embedding, batch, rotary, rows=every, steps=steps)
    return [head.logits(output) for output in unrolled.outputs]


class _Drafting:
    """A drafter over its own pages, which hold NaN, and a batch of empty rows."""

    def __init__(self, head: ChainedHead, model: DecoderModel, rows: int = 2) -> None:
        self.drafter = ChainedDrafter(head, model, TREE)
        self.planes = poisoned_planes(model, PAGES * rows + 1, self.drafter)
        self.batch = open_rows(model, rows, pages=PAGES, drafter=self.drafter)
        self.batch.drafter_state.fill_(float("nan"))

    def read(self, row: int, tokens: Tensor, aux: Tensor, count: int) -> None:
        """Give a row tokens [E] and states [E, 3H], `count` of them valid, and commit them."""
        batch, each = self.batch.rows(row, row + 1), TokenRows.even(1, len(tokens), tokens.device)
        read = ReadTokens(each, tokens.roll(1), tokens, aux, torch.tensor([count]))
        self.drafter.extend(batch, self.planes, read)
        batch.seq_lens.add_(count)

    def draft(self, root: int, shape: TreeSection) -> tuple[Candidates, list[Tensor]]:
        """What is proposed, and every step's logits [B, beams, Vd]."""
        self.batch.roots.fill_(root)
        self.drafter.trace = []
        candidates = self.drafter.candidates(self.batch, self.planes, shape)
        return candidates, self.drafter.trace


def beams_of(drafted: Candidates, row: int, k: int, step: int) -> list[list[int]]:
    """Tokens of the beams that were read at a step, each with its ancestors: [] is the root."""
    if step == 0:
        return [[]]
    tokens, parents = drafted.tokens[row].tolist(), drafted.parents[row].tolist()
    start = k + (step - 1) * k * k  # of what the beams of this depth propose
    paths = []
    for beam in range(k):
        node, path = parents[start + beam * k], list[int]()
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        assert len(path) == step
        paths.append(path)
    return paths


def worst(
    head: ChainedHead,
    model: DecoderModel,
    *,
    prefix: int = PREFIX,
    parts: tuple[int, ...] = (),
    shape: TreeSection = CHAIN,
    shift: int = 0,
) -> float:
    """Largest difference, over all steps and beams, between draft and training logits.

    The drafter reads `parts` of the prefix as rounds accept them, behind a prompt; the trainer sees
    the prefix followed by one branch of what was drafted at a time.
    """
    tokens = random_tokens(prefix + 1, seed=5)  # the last one is the root
    aux, read = states_of(model, tokens[:-1]).aux, prefix - sum(parts)
    drafting = _Drafting(head, model)
    drafting.read(1, tokens[:9], states_of(model, tokens[:9]).aux, len(tokens[:9]))  # a neighbour
    drafting.read(0, tokens[1:].roll(shift)[:read], aux[:read], read)
    for count in parts:
        drafting.draft(1, shape)  # what an earlier draft has left
        padding = torch.zeros(2, dtype=torch.int64)
        wide = torch.cat((aux[read : read + count], torch.full((2, aux.shape[1]), 9.0)))
        accepted = tokens[read + 1 : read + count + 1]
        drafting.read(0, torch.cat((accepted, padding)), wide, count)
        read += count
    candidates, logits = drafting.draft(int(tokens[-1]), shape)
    gaps = list[float]()
    for step in range(shape.steps):
        for beam, path in enumerate(beams_of(candidates, 0, shape.top_k, step)):
            whole = torch.cat((tokens, torch.tensor([*path, *[0] * STEPS], dtype=torch.int64)))
            expected = trained_logits(head, model, whole, aux, max(head.shape.heads, step + 1))
            assert float(expected[step][prefix - 1].std()) > 0.1
            gaps.append(float((logits[step][0, beam] - expected[step][prefix - 1]).abs().max()))
    assert len(gaps) == 1 + (shape.steps - 1) * shape.top_k
    return max(gaps)


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [(), (1,), (4,), (1, 2, 1)], ids=str)
@torch.no_grad()
def test_draft_logits_equal_training_logits(
    model: DecoderModel, heads: int, parts: tuple[int, ...]
) -> None:
    assert worst(chained_head(model, heads), model, parts=parts) <= 1e-4


@pytest.mark.parametrize("prefix", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("heads", [2, 3, 4])
@torch.no_grad()
def test_texts_shorter_than_the_chain_are_drafted_as_trained(
    model: DecoderModel, heads: int, prefix: int
) -> None:
    """Heads whose first entries are not there yet, whole and token by token."""
    head = chained_head(model, heads)
    assert worst(head, model, prefix=prefix) <= 1e-4
    assert worst(head, model, prefix=prefix, parts=(1,) * (prefix - 1)) <= 1e-4
    assert worst(head, model, prefix=prefix, shape=TREE) <= 1e-4
    if prefix > 2:
        assert worst(head, model, prefix=prefix, parts=(prefix - 1,), shape=TREE) <= 1e-4


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
@torch.no_grad()
def test_every_beam_of_a_tree_equals_training_on_its_own_branch(
    model: DecoderModel, heads: int
) -> None:
    assert worst(chained_head(model, heads), model, parts=(2,), shape=TREE) <= 1e-4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [(7,), (1, 3, 7), (0, 1, 2, 3, 7)])
@torch.no_grad()
def test_heads_that_read_the_final_state_draft_as_trained(
    make_target: Callable[[str], Path], bias: bool, layers: tuple[int, ...]
) -> None:
    model = DecoderModel.load(
        make_target("llama"), layers, device=CPU, dtype=torch.float32, max_length=160
    )
    head = chained_head(model, 3, "final", bias=bias)
    tokens = random_tokens(PREFIX, seed=5)
    states = states_of(model, tokens)
    torch.testing.assert_close(head.project(states.aux), states.final, atol=1e-5, rtol=1e-5)
    assert worst(head, model, parts=(3,), shape=TREE) <= 1e-4


@torch.no_grad()
def test_planted_mistakes_are_seen(model: DecoderModel, chain: ChainedHead) -> None:
    assert worst(chain, model, shift=1) > 1e-2
    other = chained_head(model)
    other.layers[2].self_attn.k_proj.weight.neg_()
    drafting, plain = _Drafting(chain, model), _Drafting(other, model)
    tokens = random_tokens(PREFIX + 1, seed=5)
    aux = states_of(model, tokens[:-1]).aux
    traces = []
    for each in (drafting, plain):
        each.read(0, tokens[1:], aux, PREFIX)
        each.read(1, tokens[1:], aux, PREFIX)
        traces.append(each.draft(int(tokens[-1]), CHAIN)[1])
    moved = [float((a - b).abs().max()) for a, b in zip(*traces, strict=True)]
    assert moved[:2] == [0.0, 0.0] and min(moved[2:]) > 1e-3, "the third head proposes from depth 3"


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(
    "tree",
    [
        TREE,
        CHAIN,
        TreeSection(top_k=1, steps=2, nodes=3),
        TreeSection(top_k=8, steps=1, nodes=9),
        TreeSection(top_k=10, steps=6, nodes=24),
    ],
    ids=str,
)
def test_speculation_changes_nothing(
    model: DecoderModel, chain: ChainedHead, slots: int, tree: TreeSection
) -> None:
    requests = requests_of()
    drafted = tokens_of(decode(model, ChainedDrafter(chain, model, tree), requests, slots))
    assert drafted == tokens_of(decode(model, None, requests, slots))


@pytest.mark.parametrize("slots", [1, 3])
def test_samples_are_plain_decodings(model: DecoderModel, chain: ChainedHead, slots: int) -> None:
    requests = requests_of(temperature=0.8)
    drafted = tokens_of(decode(model, ChainedDrafter(chain, model, TREE), requests, slots))
    assert drafted == tokens_of(decode(model, None, requests, slots))


def test_prompts_read_in_chunks_and_shapes_by_batch_size_change_nothing(
    model: DecoderModel, chain: ChainedHead
) -> None:
    requests = requests_of()
    whole = {each.request_id: each.token_ids for each in Engine(model).generate(requests)}
    shapes = {1: TREE, 2: None, 4: TreeSection(top_k=2, steps=3, nodes=6)}
    for prefill_tokens in (1, 7):
        drafter = ChainedDrafter(chain, model, shapes)
        engine = Engine(model, drafter=drafter, slots=5, prefill_tokens=prefill_tokens)
        done = {each.request_id: each.token_ids for each in engine.generate(requests)}
        assert done == whole


def test_tokens_that_are_drafted_right_are_accepted(
    model: DecoderModel, chain: ChainedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that always says one token, and heads that always propose it first."""
    with torch.no_grad():
        chain.lm_head.weight.zero_()  # equal logits: the first of the draft vocabulary
    drafter = ChainedDrafter(chain, model, TreeSection(top_k=1, steps=4, nodes=5))
    proposed = int(chain.target_ids()[0])
    said = lambda logits: torch.full(logits.shape[:-1], proposed)  # noqa: E731
    monkeypatch.setattr(model.ops, "argmax", said)
    (done,) = Engine(model, drafter=drafter).generate([Request("a", (5, 9, 2), 31, ())])
    assert set(done.token_ids[1:]) == {proposed}
    assert done.statistics.rounds == 6, "30 tokens behind the first, five a round"


@torch.inference_mode()
def test_plain_rounds_leave_the_drafter_ready(model: DecoderModel, chain: ChainedHead) -> None:
    """After rounds with and without a tree it drafts what it drafts behind a prompt of the same
    tokens, up to rounding."""
    drafter, without = (ChainedDrafter(chain, model, {1: shape}) for shape in (TREE, None))
    opened = partial(_open, model, drafter)
    (batch, planes), (whole, others) = read_both_ways(model, drafter, without, opened)
    torch.testing.assert_close(batch.drafter_state, whole.drafter_state, atol=1e-3, rtol=1e-4)
    drafter.trace = []
    for rows, plane in ((batch, planes), (whole, others)):
        drafter.candidates(rows, plane, TREE)
    first, second = drafter.trace[: TREE.steps], drafter.trace[TREE.steps :]
    torch.testing.assert_close(first, second, atol=1e-3, rtol=1e-4)


def _open(model: DecoderModel, drafter: ChainedDrafter) -> tuple[DecodeBatch, Planes]:
    planes = poisoned_planes(model, PAGES + 1, drafter)
    batch = open_rows(model, 1, pages=PAGES, drafter=drafter)
    batch.drafter_state.fill_(float("nan"))
    return batch, planes


def test_a_draft_and_an_extension_look_at_no_value(
    torch_model: DecoderModel, chain: ChainedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for attention: the definition goes row by row over lengths that it reads."""
    drafter = ChainedDrafter(chain, torch_model, TREE)
    planes = poisoned_planes(torch_model, 3 * PAGES + 1, drafter)
    batch = open_rows(torch_model, 3, pages=PAGES, drafter=drafter)
    for row in range(3):
        prompt = random_tokens(1 + 9 * row, seed=row)
        prefill_prompt(torch_model, planes, drafter, batch.rows(row, row + 1), prompt)
    rows, tokens = TokenRows.even(3, 5, CPU), torch.zeros(15, dtype=torch.int64)
    aux = torch.zeros(15, 3 * torch_model.config.hidden_size)
    read = ReadTokens(rows, tokens, tokens, aux, torch.tensor([1, 2, 5]))
    monkeypatch.setattr(TorchOps, "tree_attention", lambda ops, query, *rest: query)
    with no_values():
        drafter.candidates(batch, planes, TREE)
        drafter.extend(batch, planes, read)


def test_what_does_not_fit_is_refused_by_name(model: DecoderModel, chain: ChainedHead) -> None:
    foreign = ChainedHead(chain.shape.model_copy(update={"vocab_size": 99}))
    with pytest.raises(HeadError, match="vocab_size is 99"):
        ChainedDrafter(foreign, model, TREE)
    target: Any = None
    with pytest.raises(ConfigError, match="cannot draft with this head, which is one for eagle3"):
        load_drafter(DrafterSection(name="dflash"), model, target, chain)
    for setting, value, problem in (
        ("draft_window", 128, "chained heads see the whole text"),
        ("weights", "fp8", "chained heads cannot draft with fp8"),
    ):
        with pytest.raises(ConfigError, match=problem) as refused:
            load_drafter(DrafterSection(name="eagle3", **{setting: value}), model, target, chain)
        assert refused.value.where == f"drafter.{setting}"
    make = load_drafter(DrafterSection(name="eagle3"), model, target, chain)
    assert make is not None and isinstance(make(TREE), ChainedDrafter)
    assert drafter_name(chain) == "eagle3"


@torch.inference_mode()
def test_every_backend_of_a_cpu_drafts_the_same(
    torch_model: DecoderModel, model: DecoderModel, chain: ChainedHead
) -> None:
    """The definition in torch, and whatever this machine picks."""
    tokens = random_tokens(PREFIX + 1, seed=5)
    aux = states_of(model, tokens[:-1]).aux
    drawn = []
    for target in (model, torch_model):
        drafting = _Drafting(chain, target, 3)
        for row in range(3):
            drafting.read(row, tokens[row + 1 :], aux[row:], PREFIX - row)
        drawn.append(drafting.draft(4, TREE)[1])
    torch.testing.assert_close(*drawn, atol=1e-4, rtol=0)


def test_each_head_has_a_plane_and_all_but_the_last_a_state(model: DecoderModel) -> None:
    size = model.config.hidden_size
    for heads, kept in ((1, 1), (2, 1), (4, 3)):
        drafter = ChainedDrafter(chained_head(model, heads), model, TREE)
        assert len(drafter.planes) == heads and drafter.state is not None
        assert drafter.state.size == kept * size
    assert replace(drafter.planes[0]) == drafter.planes[-1]
