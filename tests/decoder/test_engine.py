"""The engine: speculative output equals plain output, whatever the drafter proposes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import TreeSection
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Completion, Engine, Request
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.tree import Tree, grow
from pipeline.decoder.verify import sample
from pipeline.eagle3.head import Eagle3Head
from tests.decoder.conftest import VOCABULARY


def _requests(count: int, stop_ids: tuple[int, ...] = ()) -> list[Request]:
    """Prompts of 3 to 40 tokens, limits of 1 to 36."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3 + (11 * index) % 38 for index in range(count)]
    prompts = [tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]
    return [Request(str(index), prompt, 1 + (17 * index) % 36, stop_ids) for index, prompt in enumerate(prompts)]


def _run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    return {done.id: done for done in engine.generate(requests)}


class OracleDrafter:
    """Knows the answers: proposes the true continuation among distractors, right up to a depth that varies."""

    depth, nodes = 4, 13

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], right: int) -> None:
        self._answers, self._right = answers, right

    def allocate(self, slots: int, length: int) -> None:
        self._seen: list[list[int]] = [[] for _ in range(slots)]

    def prefill(self, row: int, tokens: Tensor, aux: Tensor) -> None:
        assert len(aux) == len(tokens) - 1
        self._seen[row] = tokens.tolist()

    def extend(self, tokens: Tensor, aux: Tensor, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            self._seen[row] += tokens[row, :count].tolist()

    def move(self, source: int, target: int) -> None:
        self._seen[target] = self._seen[source]

    def draft(self, roots: Tensor) -> Tree:
        tokens = []
        for row, root in enumerate(roots.tolist()):
            assert self._seen[row][-1] == root
            future = self._future(self._seen[row])
            guesses = [future[depth] if depth < self._right else (future[depth] + 1) % VOCABULARY for depth in range(4)]
            tokens.append([token for guess in guesses for token in ((guess + 2) % VOCABULARY, guess, (guess + 3) % VOCABULARY)])
        parents = torch.tensor([-1] * 3 + [1] * 3 + [4] * 3 + [7] * 3).expand(len(roots), -1)
        scores = -torch.tensor([1.0] * 3 + [2.0] * 3 + [3.0] * 3 + [4.0] * 3).expand(len(roots), -1)
        return grow(roots, torch.tensor(tokens), parents, scores, self.nodes, self.depth)

    def _future(self, seen: list[int]) -> list[int]:
        (answer,) = [(*prompt, *reply) for prompt, reply in self._answers.items() if (*prompt, *reply)[: len(seen)] == tuple(seen)]
        return [*answer[len(seen) :], 0, 0, 0, 0][:4]


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("tree", [TreeSection(top_k=3, steps=4, nodes=12), TreeSection(top_k=1, steps=3, nodes=4), TreeSection(top_k=8, steps=1, nodes=9)])
def test_speculation_with_a_bad_head_changes_nothing(model: DecoderModel, head: Eagle3Head, slots: int, tree: TreeSection) -> None:
    requests = _requests(11)
    plain = _run(Engine(model), requests)
    speculative = _run(Engine(model, drafter=Eagle3Drafter(head, model.embedding, tree), slots=slots), requests)
    assert {name: done.token_ids for name, done in speculative.items()} == {name: done.token_ids for name, done in plain.items()}


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_speculation_with_a_good_drafter_changes_nothing_but_the_rounds(model: DecoderModel, slots: int, right: int) -> None:
    requests = _requests(11)
    plain = _run(Engine(model), requests)
    answers = {request.prompt_ids: plain[request.id].token_ids for request in requests}
    speculative = _run(Engine(model, drafter=OracleDrafter(answers, right), slots=slots), requests)
    assert {name: done.token_ids for name, done in speculative.items()} == {name: done.token_ids for name, done in plain.items()}
    for request in requests:
        after_prefill = len(plain[request.id].token_ids) - 1
        # The oracle proposes zeros beyond the end of the answer, so only the last round may fall short.
        assert speculative[request.id].statistics.rounds == -(-after_prefill // (right + 1))
        assert speculative[request.id].statistics.round_tokens == after_prefill


def test_plain_decoding_equals_hugging_face(make_target: Callable[[str], Path], model: DecoderModel) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(make_target("llama"))
    done = _run(Engine(model, slots=3), _requests(6))
    for request in _requests(6):
        ids = torch.tensor([request.prompt_ids])
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=None)
        assert done[request.id].token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_requests_stop_at_stop_tokens_and_limits(model: DecoderModel) -> None:
    free = _run(Engine(model), _requests(8))
    stop = free["5"].token_ids[3]
    stopped = _run(Engine(model, slots=4), _requests(8, stop_ids=(stop,)))
    for name, done in stopped.items():
        whole = free[name].token_ids
        cut = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert done.token_ids == cut
        assert done.finish_reason == ("stop" if stop in whole else "length")
    assert stopped["5"].finish_reason == "stop"


def test_statistics_count_rounds_without_prefill(model: DecoderModel) -> None:
    request = Request("a", (1, 2, 3), 9, ())
    statistics = _run(Engine(model), [request])["a"].statistics
    assert (statistics.rounds, statistics.round_tokens, statistics.reached) == (8, 8, [8])
    assert statistics.acceptance_length == 1.0
    assert statistics.first_token_seconds > 0
    assert statistics.decode_seconds > 0


def test_sampling_is_seeded_and_independent_of_the_batch(model: DecoderModel) -> None:
    requests = [Request(str(index), (1 + index, 2, 3), 12, (), temperature=1.0, seed=index) for index in range(5)]
    alone = {request.id: _run(Engine(model), [request])[request.id].token_ids for request in requests}
    together = {name: done.token_ids for name, done in _run(Engine(model, slots=5), requests).items()}
    assert together == alone
    assert len(set(alone.values())) == 5


def test_top_p_and_top_k_keep_exactly_the_most_likely_tokens() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(**limits: float) -> set[int]:
        settings = {"top_p": 1.0, "top_k": 0, **limits}
        return {sample(logits, temperature=1.0, generator=generator, **settings) for _ in range(400)}  # type: ignore[arg-type]

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.6) == {0, 1}
    assert drawn(top_p=0.49) == {0}
    assert sample(logits, temperature=0, top_p=1, top_k=0, generator=None) == 0


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (Request("x", (), 4, ()), "needs a prompt"),
        (Request("x", (1,), 0, ()), "max_new_tokens"),
        (Request("x", (1,) * 150, 20, ()), "160"),
    ],
)
def test_impossible_requests_are_named(model: DecoderModel, request_: Request, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"request x: .*{problem}"):
        list(Engine(model).generate([request_]))
