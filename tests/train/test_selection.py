"""Which head is exported, by how much its τ may be off, and which figure goes on its card."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request, RunningRequest, Statistics, pool_acceptance
from pipeline.heads.base import DraftingHead
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from pipeline.learning.corpus import HeldOut, hold_out
from pipeline.records import Manifest
from pipeline.store.manifest import stage_location
from pipeline.target.open import open_target
from pipeline.train import loop
from pipeline.train.loop import Evaluator, advise, count
from pipeline.train.prepare import StoredCorpus
from pipeline.train.progress import Decoded, Progress, StepSums
from pipeline.train.stage import run
from tests.train.runs import Configure, Store, head_of

EVALUATION = {
    "evaluate_every": 4,
    "evaluate_prompts": 3,
    "evaluate_tokens": 12,
    "evaluate_tree": {"top_k": 1, "steps": 3, "nodes": 4},
}
CPU = torch.device("cpu")


def drawn(config: RunConfig, parent: Manifest, number: int) -> tuple[HeldOut, ...]:
    corpus = StoredCorpus(stage_location(config.run.uri, "features"), parent.shards)
    return hold_out(corpus, number // 2, seed=config.run.seed, max_prompt=200)


@pytest.fixture
def trained(
    tiny_config: Configure, store_states: Store
) -> tuple[RunConfig, Manifest, DraftingHead]:
    """A head that is right now and then, and what it was trained from."""
    config = tiny_config(**EVALUATION | {"evaluate_every": None}, epochs=20, learning_rate=3e-2)
    parent = store_states(config)
    run(config)
    return config, parent, load_head(head_of(config))[0]


@pytest.mark.parametrize("end", ["length", "stop"])
def test_the_last_round_counts_whole(
    trained: tuple[RunConfig, Manifest, DraftingHead], end: str
) -> None:
    """Replies that end in the middle of a round, beside the same ones that go on."""
    config, parent, head = trained
    target, held_out = open_target(config.target), drawn(config, parent, 6)
    layers = target.contract.capture_layers
    model = DecoderModel.load(
        target.directory, layers, device=CPU, dtype=target.dtype, max_length=60
    )
    assert isinstance(head, Eagle3Head)
    engine = Engine(model, drafter=Eagle3Drafter(head, model, config.train.evaluate_tree), slots=1)
    cut = 0
    for item in held_out:
        request = Request("", item.prompt_ids, 40, ())
        emissions = [emission.token_ids for emission in engine.stream([request])]
        said = [token for emitted in emissions for token in emitted]
        after = list(accumulate(map(len, emissions)))  # tokens after each round
        for number, (before, whole) in enumerate(pairwise(after[:-1]), start=1):
            last = said[before]  # the first token of this round
            if whole - before == 1 or (end == "stop" and last in said[:before]):
                continue  # nothing to cut off, or the reply ends sooner
            shorter = (before + 1, ()) if end == "length" else (40, (last,))
            (completion,) = engine.generate([Request("", item.prompt_ids, *shorter)])
            assert completion.token_ids == tuple(said[: before + 1])
            counted = count([completion.statistics])
            assert (counted.tokens, counted.rounds) == ((whole - 1,), (number,))
            cut += 1
    assert cut > 3, "the example needs rounds that can be cut"


def test_what_is_decoded_is_the_head_as_it_is_stored(
    trained: tuple[RunConfig, Manifest, DraftingHead],
) -> None:
    """An output layer that bfloat16 rounds to ones all over, in a target that is read in fp32."""
    config, parent, head = trained
    target = open_target(config.target.model_copy(update={"dtype": "float32"}))
    held_out, fine = drawn(config, parent, 6), head.state_dict()
    fine["lm_head.weight"] = 1 + 1e-4 * fine["lm_head.weight"]
    rounded = fine | {"lm_head.weight": torch.ones_like(fine["lm_head.weight"])}
    evaluator = Evaluator(target, head.shape, config.train, held_out, CPU)
    swapped = Evaluator(target, head.shape, config.train, held_out[3:] + held_out[:3], CPU)
    assert evaluator.report(fine) == swapped.select(rounded) == swapped.select(fine)


def test_short_replies_have_the_tau_of_long_ones() -> None:
    """Each draft position is accepted with the same probability: τ is known."""
    alpha, depth, limit, generator = 0.7, 4, 20, random.Random(0)
    known = sum(alpha**k for k in range(depth + 1))
    done = list[Statistics]()
    for _ in range(4000):
        running = RunningRequest(Request("", (1,), limit, ()), [], 0.0)
        running.take([1], 0.0)
        while running.finish_reason is None:
            accepted = next((k for k in range(depth) if generator.random() > alpha), depth)
            running.take([1] * (accepted + 1), 0.0)
        done.append(running.statistics)
    decoded = count(done)
    assert abs(decoded.tau - known) < 3 * decoded.tau_error < 0.05
    assert decoded.tau == pytest.approx(
        1 + sum(math.prod(decoded.alpha[:k]) for k in range(1, depth + 1))
    )
    assert pool_acceptance(done).tau < known - 0.15, "what the replies took is biased"


def test_the_standard_error_is_that_of_repeated_draws() -> None:
    """Of 400 draws of 30 requests that differ in how hard they are; and by hand for two."""
    generator = random.Random(1)

    def draw() -> Decoded:
        rounds = [generator.randint(10, 30) for _ in range(30)]
        ease = [generator.uniform(1.2, 2.8) for _ in rounds]
        tokens = [round(count * each) for count, each in zip(rounds, ease, strict=True)]
        return Decoded(tokens=tuple(tokens), rounds=tuple(rounds), alpha=())

    draws = [draw() for _ in range(400)]
    assert fmean(each.tau_error for each in draws) == pytest.approx(
        stdev(each.tau for each in draws), rel=0.1
    )
    two = Decoded(tokens=(30, 10), rounds=(10, 10), alpha=(0.5,))  # τ 2; each moves it by ±0.5
    assert two.named() == {"tau": 2.0, "tau_se": pytest.approx(1.0), "alpha_1": 0.5}


def heads(*gains: int) -> list[Decoded]:
    """Heads that emit so many tokens more than the first one in 320 rounds of 16 requests.

    Requests differ by far more than heads do on the same one.
    """
    generator = random.Random(2)
    ease = [generator.randint(25, 60) for _ in range(16)]
    evaluations = []
    for gain in gains:
        noise = generator.sample([-2, -1, 0, 1, 2, 0, 0, 0] * 2, 16)
        more = [(gain + number) // 16 for number in range(16)]
        tokens = tuple(map(sum, zip(ease, noise, more, strict=True)))
        evaluations.append(Decoded(tokens=tokens, rounds=(20,) * 16, alpha=()))
    return evaluations


def test_a_gain_below_the_standard_error_is_sure_on_the_same_requests() -> None:
    old, equal, better = heads(0, 0, 20)
    assert 0 < better.tau - old.tau < old.tau_error / 2
    assert better.surely_beats(old) and not old.surely_beats(better)
    assert not equal.surely_beats(old) and not old.surely_beats(equal)
    assert not old.surely_beats(old)


def test_an_error_that_is_large_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    rough = Decoded(tokens=(30, 10), rounds=(10, 10), alpha=())
    advise(rough)
    shown = " ".join(capsys.readouterr().out.split())
    assert "τ of 2 held-out samples is 2.00 with a standard error of 1.00" in shown
    assert "train.evaluate_prompts of about 5,000 would make it 0.02" in shown
    advise(Decoded(tokens=rough.tokens * 2500, rounds=rough.rounds * 2500, alpha=()))
    assert not capsys.readouterr().out


def exported_steps(evaluations: list[Decoded]) -> list[int]:
    """Step of the head to export after each evaluation, as training goes on."""
    progress, steps = Progress(), list[int]()
    for decoded in evaluations:
        sums = StepSums(
            1.0, 1.0, hits=(), predicted=(), tokens=1, labels=1, coarse_rows=0, sigterms=0
        )
        progress = progress.after_step(sums, batches=1, clipped=False)
        file = (1, "0" * 64) if progress.keeps(decoded) else None
        progress = progress.after_evaluation(decoded, file)
        progress = Progress.model_validate_json(progress.model_dump_json())  # as when resumed
        assert progress.best is not None
        steps.append(progress.best.step)
    return steps


def test_the_later_of_two_equal_heads_is_exported() -> None:
    low, lucky, level, again, higher, worse = heads(0, 40, 37, 38, 80, 50)
    evaluations = [low, lucky, level, again, higher, worse, worse]
    assert exported_steps(evaluations) == [1, 2, 3, 4, 5, 5, 5]


def test_a_fall_from_a_rise_that_was_not_sure_is_seen() -> None:
    first, higher, lower = heads(0, 10, -6)
    assert not higher.surely_beats(first) and not first.surely_beats(lower)
    assert exported_steps([first, higher, lower]) == [1, 2, 2]


def test_a_slow_rise_is_followed_and_a_slow_fall_is_not() -> None:
    """No step of either is sure by itself."""
    rise = heads(*range(0, 65, 5))
    assert not any(late.surely_beats(early) for early, late in pairwise(rise))
    assert exported_steps(rise)[-1] == 13
    assert exported_steps(rise[::-1])[-1] < 5


def test_an_evaluator_has_one_engine(
    trained: tuple[RunConfig, Manifest, DraftingHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU every engine captures rounds; another head's weights go where the graphs look."""
    config, parent, head = trained
    target, held_out = open_target(config.target), drawn(config, parent, 6)
    fine = head.state_dict()
    other = {name: tensor.flip(0) if "weight" in name else tensor for name, tensor in fine.items()}
    made: list[Engine] = []

    def engine(*arguments: Any, **named: Any) -> Engine:
        made.append(Engine(*arguments, **named))
        return made[-1]

    def evaluator() -> Evaluator:
        return Evaluator(target, head.shape, config.train, held_out, CPU)

    monkeypatch.setattr(loop, "Engine", engine)
    alone = evaluator().select(other), evaluator().select(fine), evaluator().report(fine)
    assert alone[0] != alone[1] and len(made) == 3
    one = evaluator()
    assert (one.select(other), one.select(fine), one.report(fine), one.select(other)) == (
        *alone,
        alone[0],
    )
    assert len(made) == 4
