"""Blocked attention against a dense mask in float64, and how its memory grows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.learning import flex
from pipeline.learning.attention import KeyValue, UnrolledAttention
from pipeline.learning.window import Seen, hidden_positions
from pipeline.target.rotary import RotaryTable

QUERY_HEADS, KEY_HEADS, SIZE = 4, 2, 4
STEPS = 8


def rotary_of(head: Eagle3Head, length: int = 128) -> RotaryTable:
    rope, cpu = head.shape.rope_config(), torch.device("cpu")
    return RotaryTable(rope, length, device=cpu, dtype=torch.float64)


def inputs(tokens: int, rows: Tensor, steps: int) -> list[list[Tensor]]:
    """Query, key and value of every step."""
    generator = torch.Generator().manual_seed(4)

    def one(count: int, heads: int) -> Tensor:
        drawn = torch.randn(count, heads, SIZE, generator=generator, dtype=torch.float64)
        return drawn.mul_(2).requires_grad_()

    keys = [tokens, *[len(rows)] * (steps - 1)]
    return [
        [one(len(rows), QUERY_HEADS), one(count, KEY_HEADS), one(count, KEY_HEADS)]
        for count in keys
    ]


def dense(
    lengths: tuple[int, ...],
    rows: Tensor,
    rotary: RotaryTable,
    steps: list[list[Tensor]],
    hides: Callable[[int, int], bool] = lambda query, key: False,
) -> list[Tensor]:
    """Every key of every step under one mask, rotated by hand: no function of the trainer."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])

    def turned(x: Tensor, at: Tensor) -> Tensor:
        real, imaginary = x.chunk(2, -1)
        cos, sin = (table[at][:, None, : SIZE // 2] for table in (rotary.cos, rotary.sin))
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)

    keys, values, masks, outputs = [], [], [], []
    for k, (query, key, value) in enumerate(steps):
        at = position[rows]
        own = turned(key, position if k == 0 else at + k)
        keys.append(own.repeat_interleave(QUERY_HEADS // KEY_HEADS, 1))
        values.append(value.repeat_interleave(QUERY_HEADS // KEY_HEADS, 1))
        masks.append(torch.eye(len(rows), dtype=torch.bool))
        causal = (document[rows, None] == document) & (position[rows, None] >= position)
        for number, query_at in enumerate(position[rows].tolist()):
            hidden = [hides(query_at, key_at) for key_at in position.tolist()]
            causal[number] &= ~torch.tensor(hidden)
        mask = torch.cat([causal, *masks[1:]], 1)
        scores = torch.einsum("aqd,tqd->qat", turned(query, at + k), torch.cat(keys)) / SIZE**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("qat,tqd->aqd", weights, torch.cat(values)))
    return outputs


def unrolled(
    lengths: tuple[int, ...],
    rows: Tensor,
    rotary: RotaryTable,
    steps: list[list[Tensor]],
    window: int = 0,
) -> list[Tensor]:
    attention = UnrolledAttention(lengths, rows, rotary, window)
    past, outputs = list[KeyValue](), []
    for k, (query, key, value) in enumerate(steps):
        output, own = attention.attend(k, query, key, value, list(past))
        past.append(own)
        outputs.append(output)
    return outputs


ROWS = {
    "all": torch.arange(38),
    "runs and gaps": torch.tensor([0, 1, 2, 7, 8, 12, 13, 14, 15, 16, 20, 28, 29, 31, 37]),
    "a document without": torch.tensor([3, 4, 5, 6, 36]),
    "none": torch.arange(0),
}


def compare_with_dense(
    lengths: tuple[int, ...], rows: Tensor, rotary: RotaryTable, steps: list[list[Tensor]]
) -> None:
    actual, expected = (kind(lengths, rows, rotary, steps) for kind in (unrolled, dense))
    assert_equal(actual, expected, steps)


def assert_equal(actual: list[Tensor], expected: list[Tensor], steps: list[list[Tensor]]) -> None:
    """Outputs, and the gradients of all inputs."""
    leaves = [leaf for step in steps for leaf in step]
    upper = [
        torch.randn(out.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        for k, out in enumerate(expected)
    ]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(outs, leaves, upper) for outs in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 300, 1 << 20], ids=lambda kept: f"keeps {kept}")
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_equals_a_dense_mask_with_gradients(
    small_head: Eagle3Head, rows: Tensor, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three documents, two query heads a key head, blocks that end inside documents; steps 0…7."""
    monkeypatch.setattr("pipeline.learning.blocked._STORED_WEIGHTS", kept)
    monkeypatch.setattr("pipeline.learning.blocked._MOST_ROWS", 5)
    monkeypatch.setattr("pipeline.learning.blocked._FEWEST_ROWS", 3)
    # So that blocks shrink as documents get longer.
    monkeypatch.setattr("pipeline.learning.blocked._PAIRS", 40)
    lengths, rotary = (9, 19, 10), rotary_of(small_head)
    steps = inputs(sum(lengths), rows, STEPS)
    compare_with_dense(lengths, rows, rotary, steps)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_window_hides_whole_pages_behind_the_first(
    small_head: Eagle3Head, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window 5, pages of 3: of 11 positions those from 3 to 5 are hidden, of 14 those to 8."""
    for module in ("learning.window", "learning.blocked"):
        monkeypatch.setattr(f"pipeline.{module}.WINDOW_STEP", 3)
    lengths, rotary = (9, 19, 10), rotary_of(small_head)
    steps = inputs(38, rows, STEPS)
    firsts = {10: 6, 11: 6, 12: 6, 13: 9, 14: 9, 15: 9, 16: 12, 17: 12, 18: 12}  # by position

    def hides(query: int, key: int) -> bool:
        return 3 <= key < firsts.get(query, 0)

    actual = unrolled(lengths, rows, rotary, steps, window=5)
    expected = dense(lengths, rows, rotary, steps, hides=hides)
    assert_equal(actual, expected, steps)


#: Not the first of its document.
INSTEAD = {name: rows[~torch.isin(rows, torch.tensor([0, 9, 28]))] for name, rows in ROWS.items()}


def replaced(
    rows: Tensor, rotary: RotaryTable, steps: list[list[Tensor]], window: int = 0
) -> list[Tensor]:
    """Step 0 of rows whose own key is another one; of the documents' step 0 only keys are read."""
    lengths = (9, 19, 10)
    (_, key, value), (query, *own), *_ = steps
    every = UnrolledAttention(lengths, torch.arange(sum(lengths)), rotary)
    _, first = every.attend(0, query.new_zeros(sum(lengths), QUERY_HEADS, SIZE), key, value, [])
    attention = UnrolledAttention(lengths, rows, rotary, window, instead=True)
    return [attention.attend(0, query, own[0], own[1], [first])[0]]


@pytest.mark.parametrize("window", [0, 5], ids=["all", "window"])
@pytest.mark.parametrize("rows", INSTEAD.values(), ids=INSTEAD)
def test_rows_that_read_another_token_see_its_key_in_place_of_their_own(
    small_head: Eagle3Head, rows: Tensor, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is a sequence of its own here: what was before it, then the other key."""
    for module in ("learning.window", "learning.blocked"):
        monkeypatch.setattr(f"pipeline.{module}.WINDOW_STEP", 3)
    rotary = rotary_of(small_head)
    (_, key, value), (query, other_key, other_value), *_ = steps = inputs(38, rows, 2)
    expected = [query[:0]]
    for number, row in enumerate(rows.tolist()):
        start = max(begin for begin in (0, 9, 28) if begin <= row)
        own = [
            torch.cat((part[start:row], other[number : number + 1]))
            for part, other in ((key, other_key), (value, other_value))
        ]
        last, alone = torch.tensor([row - start]), (row - start + 1,)
        attention = UnrolledAttention(alone, last, rotary, window)
        expected.append(attention.attend(0, query[number : number + 1], own[0], own[1], [])[0])
    actual = replaced(rows, rotary, steps, window)
    used = [[key, value], [query, other_key, other_value]]
    if len(rows):
        assert_equal(actual, [torch.cat(expected)], used)


@pytest.fixture
def use_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA, uncompiled. It differentiates on a CPU; what refuses that is a check."""
    monkeypatch.setattr("pipeline.learning.flex.has_kernel", lambda device, size: True)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("use_flex")
@pytest.mark.parametrize("window", [0, 5], ids=["all", "window"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_flex_attention_joined_by_log_sum_exp_equals_blocks(
    small_head: Eagle3Head, rows: Tensor, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients; the blocks are compared with a dense mask above."""
    for module in ("learning.window", "learning.blocked", "learning.flex"):
        monkeypatch.setattr(f"pipeline.{module}.WINDOW_STEP", 3)
    lengths, rotary = (9, 19, 10), rotary_of(small_head)
    kernel: Any = UnrolledAttention(lengths, rows, rotary)._kernel
    assert ("mask" in kernel.keywords) == (len(rows) > 0)
    steps = inputs(38, rows, STEPS)
    by_flex = unrolled(lengths, rows, rotary, steps, window=window)
    monkeypatch.setattr("pipeline.learning.flex.has_kernel", lambda device, size: False)
    in_blocks = unrolled(lengths, rows, rotary, steps, window=window)
    assert_equal(by_flex, in_blocks, steps)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("use_flex")
@pytest.mark.parametrize("rows", INSTEAD.values(), ids=INSTEAD)
def test_flex_attention_of_rows_that_read_another_token_equals_blocks(
    small_head: Eagle3Head, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotary, steps = rotary_of(small_head), inputs(38, rows, 2)
    by_flex = replaced(rows, rotary, steps)
    monkeypatch.setattr("pipeline.learning.flex.has_kernel", lambda device, size: False)
    in_blocks = replaced(rows, rotary, steps)
    if len(rows):
        assert_equal(by_flex, in_blocks, [steps[0][1:], steps[1]])


@pytest.mark.parametrize("window", [0, 100], ids=["all", "window"])
def test_no_block_of_the_mask_hides_a_key_or_shows_one(window: int) -> None:
    """Blocks without a mask are seen whole, others that are not listed not at all."""
    lengths = (300, 7, 650, 129)
    every = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(every))[torch.arange(len(every)) % 5 > 1]
    positions = every[rows]
    hidden = hidden_positions(positions + 1, window) if window else None
    mask = flex.block_mask(rows, positions, len(every), Seen(hidden))
    seen = mask.mask_mod(
        *(torch.zeros(()).long(),) * 2, torch.arange(len(rows))[:, None], torch.arange(len(every))
    )
    kinds = torch.zeros(-(-len(rows) // 128), -(-len(every) // 128), dtype=torch.int64)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    listed = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    for kind, (counts, order) in enumerate(listed, 1):
        for block, count in enumerate(counts[0, 0].tolist()):
            kinds[block, order[0, 0, block, :count].long()] += kind
    assert set(kinds.flatten().tolist()) == ({0, 1} if window else {0, 1, 2})
    for block, of_block in enumerate(torch.split(seen, 128)):
        for number, kind in enumerate(kinds[block].tolist()):
            part = of_block[:, 128 * number : 128 * number + 128]
            assert kind == 1 or bool(part.all() if kind else not part.any())


def test_flex_needs_a_kernel() -> None:
    assert not flex.has_kernel(torch.device("cpu"), 64)
    assert not flex.has_kernel(torch.device("cuda"), 100)


def test_blocks_cover_every_row_once(small_head: Eagle3Head) -> None:
    rows = torch.arange(300)[torch.arange(300) % 3 > 0]
    kernel: Any = UnrolledAttention((40, 260), rows, rotary_of(small_head, 300))._kernel
    blocks = kernel.keywords["blocks"]
    starts, stops = ([getattr(block.rows, end) for block in blocks] for end in ("start", "stop"))
    assert starts == [0, *stops[:-1]]
    assert stops[-1] == 200 and len(blocks) >= 3


def test_what_is_kept_for_the_backward_pass_grows_with_the_tokens(
    small_head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements that one step saves, without the first softmaxes, double with the tokens.

    A dense mask's grow fourfold.
    """
    monkeypatch.setattr("pipeline.learning.blocked._STORED_WEIGHTS", 0)
    sizes = []
    for tokens in (128, 256, 512):
        rotary = rotary_of(small_head, tokens)
        attention = UnrolledAttention((tokens,), torch.arange(tokens), rotary)
        ((query, key, value),) = inputs(tokens, torch.arange(tokens), 1)
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = attention.attend(0, query, key, value, [])
        node: Any = out.grad_fn
        assert all(weights is None for weights in node.stored_weights)
        sizes.append(sum(saved))
    assert all(after <= 2 * before for before, after in pairwise(sizes))


def test_flex_attention_fails_at_the_recompile_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch by itself goes on with dense products, which no memory holds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kernel = flex._kernel.__wrapped__("cuda")
    with torch._dynamo.config.patch(recompile_limit=1):
        kernel(*torch.randn(3, 1, 2, 8, 16))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            kernel(*torch.randn(3, 1, 2, 8, 16, dtype=torch.float64))
