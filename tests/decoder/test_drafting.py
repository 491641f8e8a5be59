"""What a draft takes and leaves: operations a step, plain rounds in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import DrafterSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps
from pipeline.decoder.request import Request
from pipeline.decoder.round import decode_round, draft_tree, prefill_prompt
from pipeline.drafters.registry import load_drafter
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from tests.decoder.conftest import CAPTURE, load_model, open_rows, poisoned_planes, random_tokens
from tests.decoder.random_drafters import in_float8

TREE = TreeSection(top_k=3, steps=4, nodes=10)
#: What a backend launches as one kernel, or few.
OPERATIONS = (
    *("linear", "add_rms_norm", "gate_mul", "embed_concat", "rope_write", "tree_attention"),
    *("propose", "select_beams", "grow_tree"),
)


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts a backend's operations, and torch's own outside of them; views are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._inside = 0
        for name in OPERATIONS:
            monkeypatch.setattr(TorchOps, name, self._counted(name, getattr(TorchOps, name)))

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def call(*arguments: Any, **named: Any) -> Any:
            self.counts[name] += self._inside == 0
            self._inside += 1
            try:
                return operation(*arguments, **named)
            finally:
                self._inside -= 1

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside == 0 and not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_draft_step_is_thirteen_operations(
    make_target: Callable[[str], Path], head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, dtype = torch.device("cpu"), torch.float32
    model = DecoderModel.load(
        make_target("llama"), CAPTURE, device=cpu, dtype=dtype, max_length=64, ops=TorchOps(dtype)
    )
    drafter = Eagle3Drafter(head, model, TREE)
    planes = poisoned_planes(model, 5, drafter)
    batch = open_rows(model, 2, pages=2, drafter=drafter)
    for row in range(2):
        prefill_prompt(model, planes, drafter, batch.rows(row, row + 1), random_tokens(9, seed=row))

    def launches(steps: int) -> Counter[str]:
        with monkeypatch.context() as patch:
            counted = _Launches(patch)
            with counted:
                drafter.candidates(batch, planes, TreeSection(top_k=3, steps=steps, nodes=10))
        return counted.counts

    step = launches(6) - launches(5)
    assert step == {
        **{"embed_concat": 1, "linear": 5, "rope_write": 1, "tree_attention": 1},
        **{"add_rms_norm": 2, "gate_mul": 1, "propose": 1, "select_beams": 1},
    }


@torch.inference_mode()
def test_plain_rounds_leave_the_drafter_ready(model: DecoderModel, head: Eagle3Head) -> None:
    """After six rounds without a tree it stands where a prompt of the same tokens leaves it."""
    plain = Eagle3Drafter(head, model, {1: None})
    assert (plain.depth, plain.nodes, plain.shape_for(1)) == (0, 1, None)
    batch, planes = open_rows(model, 1, pages=2, drafter=plain), poisoned_planes(model, 3, plain)
    prompt = random_tokens(20, seed=4)
    prefill_prompt(model, planes, plain, batch, prompt)
    tokens = batch.emitted[0, :1].tolist()
    for _ in range(6):
        decode_round(model, planes, plain, batch, sampling=False)
        assert batch.counts.tolist() == [1]
        tokens += batch.emitted[0, :1].tolist()
    whole, others = open_rows(model, 1, pages=2, drafter=plain), poisoned_planes(model, 3, plain)
    prefill_prompt(model, others, plain, whole, torch.cat((prompt, torch.tensor(tokens[:-1]))))
    assert torch.equal(batch.roots, whole.roots) and torch.equal(batch.seq_lens, whole.seq_lens)
    torch.testing.assert_close(batch.drafter_state, whole.drafter_state, atol=1e-4, rtol=1e-4)
    drafting = Eagle3Drafter(head, model, TREE)
    ours, theirs = (
        draft_tree(model.ops, drafting, rows, plane, TREE)[0]
        for rows, plane in ((batch, planes), (whole, others))
    )
    assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.parents, theirs.parents)


def test_batches_without_a_shape_are_decoded_plainly(
    model: DecoderModel, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(str(index), tuple(range(4 + 5 * index)), 6 + 6 * index, ()) for index in range(5)
    ]
    plain = {done.request_id: done.token_ids for done in Engine(model).generate(requests)}
    drafter = Eagle3Drafter(head, model, {1: TREE, 3: None})
    drafted: list[int] = []
    original = drafter.candidates

    def recording(batch: Any, *rest: Any) -> Any:
        drafted.append(len(batch))
        return original(batch, *rest)

    monkeypatch.setattr(drafter, "candidates", recording)
    engine = Engine(model, drafter=drafter, slots=4)
    assert {done.request_id: done.token_ids for done in engine.generate(requests)} == plain
    assert set(drafted) == {1, 2}, "batches of 3 and 4 draft nothing"


@pytest.mark.parametrize("norm_output", [False, True])
@torch.inference_mode()
def test_a_head_in_training_stays_as_it_is(
    model: DecoderModel, head: Eagle3Head, norm_output: bool
) -> None:
    """And a drafter keeps the weights that it was made from."""
    trained = Eagle3Head(head.shape.model_copy(update={"norm_output": norm_output}))
    trained.load_state_dict(head.state_dict())
    drafter = Eagle3Drafter(trained, model, TREE)
    batch, planes = (
        open_rows(model, 1, pages=2, drafter=drafter),
        poisoned_planes(model, 3, drafter),
    )
    prefill_prompt(model, planes, drafter, batch, random_tokens(9, seed=1))
    before = drafter.candidates(batch, planes, TREE)
    for parameter in trained.parameters():
        parameter.mul_(-3)
    after = drafter.candidates(batch, planes, TREE)
    for ours, theirs in zip(before, after, strict=True):
        assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_a_window_at_decode_time_is_that_of_a_head_which_was_trained_with_it(
    make_target: Callable[[str], Path], head: Eagle3Head
) -> None:
    model = DecoderModel.load(
        make_target("llama"),
        CAPTURE,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=250,
    )
    windowed = Eagle3Head(head.shape.model_copy(update={"draft_window": 70}))
    windowed.load_state_dict(head.state_dict())
    prompt, scores = random_tokens(240, seed=3), []
    for drafter in (
        Eagle3Drafter(head, model, TREE, draft_window=70),
        Eagle3Drafter(windowed, model, TREE),
        Eagle3Drafter(head, model, TREE),
    ):
        planes = poisoned_planes(model, 6, drafter)
        batch = open_rows(model, 1, pages=5, drafter=drafter)
        prefill_prompt(model, planes, drafter, batch, prompt)
        scores.append(drafter.candidates(batch, planes, TREE).scores)
    assert torch.equal(scores[0], scores[1]) and not torch.allclose(scores[0], scores[2])


@pytest.mark.parametrize("ops", [None, EagerOps(), TorchOps()], ids=["picked", "eager", "torch"])
@torch.inference_mode()
def test_a_head_in_float8_drafts_as_one_that_was_rounded_beforehand(
    make_target: Callable[[str], Path], head: Eagle3Head, ops: TorchOps | None
) -> None:
    model = load_model(make_target("llama"), ops=ops)
    prompt, scores = random_tokens(40, seed=3), []
    target: Any = None
    make = load_drafter(DrafterSection(name="eagle3", weights="fp8"), model, target, head)
    assert make is not None
    drafters: list[Any] = [
        make(TREE),
        Eagle3Drafter(in_float8(head), model, TREE),
        Eagle3Drafter(head, model, TREE),
    ]
    for drafter in drafters:
        planes = poisoned_planes(model, 3, drafter)
        batch = open_rows(model, 1, pages=2, drafter=drafter)
        prefill_prompt(model, planes, drafter, batch, prompt)
        scores.append(drafter.candidates(batch, planes, TREE).scores)
    assert torch.equal(scores[0], scores[1]) and not torch.allclose(scores[0], scores[2], rtol=0.01)
    request = Request("a", tuple(prompt.tolist()), 20, ())
    plain, drafted = (
        [done.token_ids for done in Engine(model, drafter=each).generate([request])]
        for each in (None, drafters[0])
    )
    assert plain == drafted
