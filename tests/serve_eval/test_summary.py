"""τ, α, speedups and the verdict, worked out by hand for three prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.config import TreeSection, parse
from pipeline.decoder.request import Completion, Request, Statistics
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.records import Arithmetic
from pipeline.reports import EvalReport, HeadFigures, RoundCounters, TreeChoice, TreeFigures
from pipeline.serve_eval.measure import Measured, _hf_rate
from pipeline.serve_eval.pages import write_html
from pipeline.serve_eval.questions import LeftOut, Question
from pipeline.serve_eval.summary import Measurements, context_bucket, summarise
from pipeline.tuning.tune import Choice
from pipeline.tuning.verification import Gaps
from tests.heads.test_checkpoint import CONTRACT, SHAPE

TREE = TreeSection(top_k=2, steps=3, nodes=6)
ARITHMETIC = Arithmetic(
    dtype="float32",
    kernels="avx2",
    device="cpu",
    processor="avx2",
    threads=2,
    repeatable="always",
)


def _measured(
    name: str, category: str, reached: list[int], rates: dict[str, float], context: int = 1
) -> Measured:
    """`reached[k]` rounds accepted k drafted tokens or more: each entry is a token emitted."""
    statistics = Statistics(
        rounds=reached[0],
        round_tokens=sum(reached),
        reached=reached,
        drafted=3 * reached[0],
        proposed=[reached[0]] * 3,
    )
    alone = Statistics(rounds=2, round_tokens=2, reached=[2])
    return Measured(
        Question(name, category, (1,) * context, "set", 2 if "#" in name else 1),
        Completion(name, (1, 2, 3), "length", alone),
        Completion(name, (1, 2, 3), "length", statistics),
        rates,
        Gaps(tokens=3, near_ties=len(reached) - 2, worst=0.1 * len(reached)),
    )


def _report(predicted_speedup: float, *more: Measured) -> EvalReport:
    measured = [
        _measured("a", "chat", [10, 8, 4], {"speculative": 30.0, "plain": 20.0, "hf": 10.0}),
        _measured("b", "chat", [10, 2], {"speculative": 20.0, "plain": 20.0}),
        _measured("c", "math", [20, 10, 2, 1], {"speculative": 25.0, "plain": 10.0, "hf": 20.0}),
        *more,
    ]
    modes = {"target": {"thinking": True, "date": "today"}, "eval": {"thinking": False}}
    tree = {name: {"chat_template_kwargs": kwargs} for name, kwargs in modes.items()}
    config = parse({"target": {"source": "x", **tree["target"]}, "eval": tree["eval"]})
    identical = [True, False, True, *[True] * len(more)]
    left_out = [LeftOut(name, "not_rendered") for name in ("e", "f")]
    left_out.append(LeftOut("d", "prompt_too_long"))
    measurements = Measurements(
        *(measured, identical, left_out, TREE, Choice(TREE, 1.6, predicted_speedup), ARITHMETIC),
        trees={1: TREE, 8: None},
    )
    card = HeadCard(CONTRACT, {}, {"coverage": 0.9})
    return summarise(config, CONTRACT, (Eagle3Head(SHAPE), card), measurements)


@pytest.fixture
def report() -> EvalReport:
    return _report(1.2)


def test_acceptance(report: EvalReport) -> None:
    assert report.acceptance_length == pytest.approx((22 + 12 + 33) / 40)
    assert report.alpha == pytest.approx((20 / 40, 6 / 20, 1 / 6))
    assert {
        name: row.acceptance_length for name, row in report.by_category.items()
    } == pytest.approx({"chat": 34 / 20, "math": 33 / 20})


def test_speed_is_the_median_of_ratios_on_the_same_prompt(report: EvalReport) -> None:
    assert report.speedup == pytest.approx({"plain": 1.5, "hf": (3.0 + 1.25) / 2})
    assert report.tokens_per_second == pytest.approx(
        {"speculative": 25.0, "plain": 20.0, "hf": 15.0}
    )


def test_a_reply_that_was_not_timed_is_in_no_median() -> None:
    rates = {"speculative": 0.0, "plain": 0.0, "hf": 0.0}
    report = _report(1.2, _measured("d", "chat", [1], rates), _measured("e", "chat", [1], rates))
    assert report.speedup == pytest.approx({"plain": 1.5, "hf": (3.0 + 1.25) / 2})
    assert report.tokens_per_second == pytest.approx(
        {"speculative": 25.0, "plain": 20.0, "hf": 15.0}
    )
    assert report.by_category["chat"].tokens_per_second == 25.0


@pytest.mark.parametrize(
    ("made", "seconds", "rate"),
    [(3, (1.0, 3.0), 0.0), (4, (1.0, 3.0), 1.5), (24, (3.0, 1.0), 0.0), (24, (1.0, 1.0), 0.0)],
)
def test_a_rate_with_hugging_face_is_of_more_than_chance(
    made: int, seconds: tuple[float, float], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of three tokens, nor where prefill alone took as long."""
    clock, left = [0.0], list(seconds)

    class Model:
        def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
            clock[0] += left.pop(0)
            return torch.ones(1, ids.shape[1] + min(made, max_new_tokens), dtype=torch.int64)

    monkeypatch.setattr("pipeline.serve_eval.measure.time.perf_counter", lambda: clock[0])
    hf: Any = SimpleNamespace(model=Model(), device=torch.device("cpu"))
    assert _hf_rate(hf, Request("a", (1, 2), 24, (0,)), warm_up=False) == rate


def test_one_difference_is_enough(report: EvalReport) -> None:
    lossless = report.lossless
    assert not lossless.greedy_fp32 and lossless.different == ("b",)
    assert lossless.prompts_checked == lossless.identical_in_run_dtype == 3
    assert (lossless.tokens_scored, lossless.near_ties) == (9, 1 + 0 + 2)
    assert lossless.worst_log_probability_gap == pytest.approx(0.4)
    assert [prompt.identical_fp32 for prompt in report.prompts] == [True, False, True]
    assert report.settings.left_out == {"prompt_too_long": 1, "not_rendered": 2}
    asked_with = {"thinking": False, "date": "today"}
    assert report.settings.chat_template_kwargs == asked_with, "eval's over the target's"


def test_the_tree_is_the_one_that_was_used(report: EvalReport) -> None:
    assert report.decoding == "speculative" and report.settings.tree == TREE
    assert report.settings.tree_auto == TreeChoice(
        fastest_tree=TREE,
        predicted_acceptance_length=1.6,
        predicted_speedup=1.2,
        settings={},
        tried_on_other_prompts=False,
        by_batch={"1": TREE, "8": None},
    )
    assert EvalReport.model_validate_json(report.model_dump_json()) == report


def test_one_node_is_an_answer_and_the_head_is_judged_beside_it() -> None:
    report = _report(0.97)
    assert report.decoding == "plain" and report.settings.tree is None
    assert report.settings.tree_auto and report.settings.tree_auto.fastest_tree == TREE
    assert report.acceptance_length == 1 and report.speedup["plain"] == 1
    assert report.tokens_per_second["speculative"] == report.tokens_per_second["plain"]
    assert report.unused_tree == TreeFigures(
        tree=TREE, acceptance_length=(22 + 12 + 33) / 40, speedup_plain=1.5
    )
    assert report.alpha == pytest.approx((20 / 40, 6 / 20, 1 / 6)), "the head's own"
    assert {row.acceptance_length for row in report.by_category.values()} == {1}
    page = write_html(report)
    assert "one node, plain decoding: no tree was predicted to be faster" in page
    assert "τ 1.68" in page


def test_the_head(report: EvalReport) -> None:
    parameters = sum(parameter.numel() for parameter in Eagle3Head(SHAPE).parameters())
    assert report.head == HeadFigures(
        parameters=parameters,
        share_of_target=parameters / 100_000,
        draft_vocab_size=SHAPE.draft_vocab_size,
        coverage=0.9,
    )
    assert report.settings.threads == torch.get_num_threads()


def test_requests_are_told_with_their_counters(report: EvalReport) -> None:
    first = report.prompts[0]
    assert (first.source, first.turn, first.context_tokens) == ("set", 1, 1)
    assert (first.finish_reason, first.prompt) == ("length", "a")
    assert first.counters == RoundCounters(
        rounds=10, tokens=22, drafted=30, accepted_lengths=(2, 4, 4), proposed=(10, 10, 10)
    )
    assert first.ttft_seconds == {"speculative": 0.0, "plain": 0.0}
    assert report.acceptance is not None
    assert report.acceptance.acceptance_length.value == report.acceptance_length
    assert [each.value for each in report.acceptance.conditional] == pytest.approx(report.alpha)
    assert set(report.groups["category"]) == {"chat", "math"}
    chat = report.groups["category"]["chat"]
    assert chat.acceptance_length.value == report.by_category["chat"].acceptance_length
    assert (chat.requests, chat.rounds) == (2, 20)


def test_turns_of_a_prompt_stay_together_and_contexts_are_buckets() -> None:
    rates = {"speculative": 1.0, "plain": 1.0}
    items = [
        _measured("a#2", "chat", [10, 5], rates, context=700),
        _measured("a", "chat", [4, 2], rates, context=64),
        _measured("b", "math", [8, 8, 8], rates, context=127),
        _measured("c", "math", [0], rates, context=5),
    ]
    report = summarise(
        parse({"target": {"source": "x"}}),
        CONTRACT,
        None,
        Measurements(items, [True] * 4, [], TREE, None, ARITHMETIC),
    )
    rounds = {
        kind: {name: (each.requests, each.rounds) for name, each in groups.items()}
        for kind, groups in report.groups.items()
    }
    assert rounds == {
        "category": {"chat": (2, 14), "math": (1, 8)},
        "turn": {"2": (1, 10), "1": (2, 12)},
        "context": {"64-127": (2, 12), "512-1023": (1, 10)},
    }, "a request without rounds is in no group"
    assert [each.prompt for each in report.prompts] == ["a", "a", "b", "c"]
    # Both turns of `a` are one request of SPEED-Bench, and the intervals draw them together.
    assert report.names is not None
    lengths = report.names.speed_bench.Request_AL
    assert lengths == {"a": 21 / 14, "b": 3.0}
    chat = report.groups["category"]["chat"].acceptance_length
    assert chat.low == chat.value == chat.high == 1.5, "one prompt, one draw"


def test_context_buckets() -> None:
    names = [context_bucket(tokens) for tokens in (0, 1, 2, 3, 4, 511, 512, 1023, 1024)]
    assert names == ["0-1", "0-1", "2-3", "2-3", "4-7", "256-511", *["512-1023"] * 2, "1024-2047"]
