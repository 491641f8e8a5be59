"""Paired comparisons: figures by hand, verdicts as often right as they say, the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.errors import DataError
from pipeline.reports import REPORT, EvalReport, RoundCounters, Verdict
from pipeline.serve_eval.compare import Pair, compare, compare_reports, refresh_verdict
from pipeline.store.manifest import read_report
from pipeline.store.stage_run import open_stage
from tests.serve_eval.test_acceptance import counted
from tests.serve_eval.test_report import made_up_report
from tests.store.conftest import CONTRACT, make_config

NONE: Verdict = "no difference seen"


def rounds(random: np.random.Generator, accept: float, count: int = 15) -> RoundCounters:
    """Rounds of a chain of three whose tokens are accepted with probability `accept` each."""
    hits = random.random((count, 3)) < accept
    return counted(*hits.cumprod(1).sum(1).tolist())


def pairs_of(random: np.random.Generator, prompts: int, gain: float) -> list[Pair]:
    """Prompts of very different difficulty, the same for both; the own drafter accepts more by
    `gain`."""
    ease = random.uniform(0.2, 0.7, size=prompts)
    return [
        Pair(str(index), rounds(random, each + gain), rounds(random, each), 1.0)
        for index, each in enumerate(ease)
    ]


def test_differences_made_by_hand() -> None:
    pairs = [Pair(str(n), counted(2, 1), counted(0, 1), 2.0 if n % 2 else 0.5) for n in range(8)]
    compared = compare(pairs, "other", {"tree": 1}, where="here")
    assert (compared.requests, compared.prompts) == (8, 8)
    assert compared.acceptance_length.value == pytest.approx(3 / 2)
    assert compared.difference.value == pytest.approx(5 / 2 - 3 / 2)
    assert compared.difference.low == compared.difference.high == pytest.approx(1)
    assert compared.verdict == "better"
    assert compared.speed_ratio is not None
    assert compared.speed_ratio.value == pytest.approx(1)
    assert compared.speed_ratio.low < 1 < compared.speed_ratio.high


@pytest.mark.parametrize("prompts", [8, 24])
def test_equal_drafters_are_seldom_called_different(prompts: int) -> None:
    """95 % intervals: of 300 pairs of equal drafters about fifteen are called different.

    Unwidened draws of eight prompts call 35 of them different.
    """
    random, verdicts = np.random.default_rng(5), list[str]()
    for _ in range(300):
        verdicts.append(compare(pairs_of(random, prompts, 0.0), "b", {}, where="x").verdict)
    assert 5 <= 300 - verdicts.count("no difference seen") <= 25


def test_a_real_difference_is_seen_although_prompts_differ_far_more() -> None:
    random, verdicts, unpaired = np.random.default_rng(6), list[str](), 0
    for _ in range(40):
        pairs = pairs_of(random, 24, 0.15)
        compared = compare(pairs, "b", {}, where="x")
        verdicts.append(compared.verdict)
        shuffled = [
            pair._replace(rival=other.rival)
            for pair, other in zip(pairs, np.random.default_rng(0).permutation(24), strict=True)
            for other in [pairs[int(other)]]
        ]
        unpaired += compare(shuffled, "b", {}, where="x").smallest_seen > compared.smallest_seen
    assert verdicts.count("better") >= 36 and "worse" not in verdicts
    assert unpaired >= 38, "what is hard for both cancels out"


def test_a_few_prompts_are_no_ground_for_a_verdict() -> None:
    pairs = [Pair("one", counted(2, 1), counted(0, 1), None)] * 20
    with pytest.raises(DataError, match="1 prompts are decoded by both, a verdict needs 8"):
        compare(pairs, "b", {}, where="x")


def report_of(accepted: int, **changes: Any) -> EvalReport:
    """Ten prompts, each of four rounds that accept `accepted` tokens, or one less."""
    report = made_up_report(**changes)
    prompts = tuple(
        report.prompts[0].model_copy(
            update={
                "id": f"set/{index}",
                "context_tokens": 10 + index,
                "counters": counted(accepted, accepted, accepted, accepted - index % 2),
            }
        )
        for index in range(10)
    )
    return report.model_copy(update={"prompts": prompts})


def test_only_requests_of_both_reports_are_compared() -> None:
    own, earlier = report_of(2), report_of(1)
    assert compare_reports(own, earlier, where="r").requests == 10
    moved = own.prompts[0].model_copy(update={"context_tokens": 99})
    some = own.model_copy(update={"prompts": (moved, *own.prompts[1:])})
    compared = compare_reports(some, earlier, where="r")
    assert compared.requests == 9 and compared.verdict == "better"
    assert compared.speed_ratio is None


@pytest.mark.parametrize(
    ("refreshed_to_old", "refreshed_to_scratch", "scratch_to_old", "verdict"),
    [
        ("better", "better", NONE, "refresh is worth it"),
        ("better", NONE, "better", "refresh is worth it"),
        ("better", "worse", "better", "start anew"),
        ("better", "worse", NONE, "start anew"),
        (NONE, NONE, "better", "start anew"),
        (NONE, NONE, NONE, "the old head suffices"),
        (NONE, "better", "worse", "the old head suffices"),
        ("worse", "worse", NONE, "the old head suffices"),
        ("worse", "better", "worse", "the old head suffices"),
    ],
)
def test_which_head_a_tuned_target_should_get(
    refreshed_to_old: Verdict,
    refreshed_to_scratch: Verdict,
    scratch_to_old: Verdict,
    verdict: str,
) -> None:
    assert refresh_verdict(refreshed_to_old, refreshed_to_scratch, scratch_to_old) == verdict


def test_reports_of_other_conditions_are_refused() -> None:
    longer = made_up_report().settings.model_copy(update={"max_new_tokens": 7})
    with pytest.raises(DataError, match=r"settings.max_new_tokens is 7"):
        compare_reports(report_of(2), report_of(2, settings=longer), where="r")


@pytest.mark.parametrize(
    ("now", "before", "options", "code"),
    [
        (2, 1, [], 0),
        (2, 2, [], 0),
        (1, 2, [], 1),
        (1, 2, ["--tolerance", "1.5"], 0),
        (1, 2, ["--json", "--tolerance", "0.5"], 1),
    ],
)
def test_the_gate(
    tmp_path: Path,
    now: int,
    before: int,
    options: list[str],
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "now.json").write_text(report_of(now).model_dump_json())
    stage_run = open_stage(make_config(tmp_path / "run"), "eval", None)
    stage_run.location.write(REPORT, report_of(before).model_dump_json().encode())
    stage_run.finish(contract=CONTRACT, licenses={}, sources={}, files=(REPORT,))
    command = ["compare", str(tmp_path / "now.json"), str(tmp_path / "run"), *options]
    assert main(command) == code
    shown = capsys.readouterr()
    wanted = {2: "better", 1: "worse"}[now] if now != before else "no difference seen"
    if "--json" in options:
        assert json.loads(shown.out)["verdict"] == wanted
    else:
        assert shown.out.startswith(wanted)
    assert ("error: " in shown.err) == (code == 1)
    assert read_report(str(tmp_path / "run")) == report_of(before)


def test_a_report_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "no.json"), str(tmp_path)]) == 2
    assert "no.json" in capsys.readouterr().err
