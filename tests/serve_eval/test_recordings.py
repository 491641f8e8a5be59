"""A real vLLM's replies, recorded: right servers pass, and every planted fault is found by name.

Against the decoder's report in fp32 and in bf16, with and without vLLM's list of rounds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config import TreeSection
from pipeline.reports import EvalReport
from pipeline.serve_eval.servers.findings import NOISE, findings_of
from tests.serve_eval.recorded_runs import FOLDER, Recording, Recordings

#: By the kind of machine.
RECORDINGS = [Recordings.read(file) for file in sorted(FOLDER.glob("vllm-*.json.gz"))]
EVERY = [(each, recordings.reports) for recordings in RECORDINGS for each in recordings.servers]
#: Slight ones, seen in the list of rounds; their sums alone may leave room for them.
_SEEN_IN_LISTS = {
    "the low aux layer one later",
    "the middle aux layer one later",
    "rotary base 500,000",
}


def _errors(recording: Recording, report: EvalReport, listed: bool) -> list[set[str]]:
    """By concurrency."""
    found = []
    for run in recording.runs:
        findings = findings_of(recording.seen(run, report, listed=listed))
        found.append({each.name for each in findings if each.severity == "error"})
    return found


@pytest.mark.parametrize("listed", [True, False], ids=["rounds", "sums"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("recording", "reports"), EVERY, ids=[recording.name for recording, _ in EVERY]
)
def test_a_real_server_is_judged_rightly(
    recording: Recording, reports: dict[str, EvalReport], dtype: str, listed: bool
) -> None:
    for errors in _errors(recording, reports[dtype], listed):
        if not recording.found:
            assert errors == set()
        elif listed or recording.name not in _SEEN_IN_LISTS:
            assert errors & set(recording.found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slight_noise_in_the_target_shows_by_how_often_replies_part(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each is a near-tie by itself, as another machine's arithmetic had them."""
    monkeypatch.setattr("pipeline.serve_eval.servers.findings.NEAR_TIE", 1.0)
    name = "a target with noise in one MLP"
    recording, reports = next(each for each in EVERY if each[0].name == name)
    unscored = recording.model_copy(update={"leads": {}})
    seen = unscored.seen(recording.runs[0], reports[dtype], listed=True)
    (found,) = (each for each in findings_of(seen) if each.name == "replies_differ")
    assert "too often: as if noise of 0.4" in found.text


def test_a_right_server_is_not_held_against_rounds_with_a_lookup() -> None:
    """It drafts the report's tree, as the drafter alone does; the report's own accepted more."""
    recording, reports = next(each for each in EVERY if not each[0].found)
    report, chain = reports["float32"], TreeSection.chain(recording.drafts)
    assert report.golden
    prompts = [
        each.model_copy(update={"counters": each.shapes[chain.label]})
        for each in report.golden.prompts
    ]
    alone = report.model_copy(
        update={
            "settings": report.settings.model_copy(update={"tree": chain}),
            "golden": report.golden.model_copy(update={"prompts": tuple(prompts)}),
        }
    )
    both = {"drafter": report.drafter.model_copy(update={"lookup": {}})}
    seen = recording.seen(recording.runs[0], alone, listed=True)
    own = {
        each.id: each.counters.model_copy(
            update={"accepted_lengths": tuple(reversed(each.counters.accepted_lengths))}
        )
        for each in prompts
    }
    for held, expected in ((alone, {"acceptance_differs"}), (alone.model_copy(update=both), set())):
        findings = findings_of(replace(seen, report=held, own=own))
        assert {each.name for each in findings if each.severity == "error"} == expected


def test_there_are_as_many_as_the_documentation_says() -> None:
    right = [run for each, _ in EVERY if not each.found for run in each.runs]
    assert len(right) >= 50
    assert len({each.name for each, _ in EVERY if each.found}) >= 38


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("recording", "reports"),
    scored := [(each, reports) for each, reports in EVERY if each.leads],
    ids=[each.name for each, _ in scored],
)
def test_what_a_server_scores_tells_its_target(
    recording: Recording, reports: dict[str, EvalReport], dtype: str
) -> None:
    """With room on both sides: right ones below two thirds of what is allowed, others above."""
    seen = recording.seen(recording.runs[0], reports[dtype], listed=True)
    assert seen.measured_noise is not None
    print(f"{recording.name}, report in {dtype}: {seen.measured_noise:.3f} nats")
    if "replies_differ" in recording.found:
        assert seen.measured_noise > 1.4 * NOISE
    else:
        assert seen.measured_noise < NOISE / 1.5
