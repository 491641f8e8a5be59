"""A real vLLM's replies, recorded: right servers pass, and every planted fault is found by name.

Against the decoder's report in fp32 and in bf16, with and without vLLM's list of rounds.
"""

from __future__ import annotations

import pytest

from pipeline.serve_eval.servers.findings import findings_of
from tests.serve_eval.recorded_runs import Recording, Recordings

RECORDINGS = Recordings.read()
#: Slight ones, seen in the list of rounds; their sums alone may leave room for them.
_SEEN_IN_LISTS = {
    "the low aux layer one later",
    "the middle aux layer one later",
    "rotary base 500,000",
}


def _errors(recording: Recording, dtype: str, listed: bool) -> list[set[str]]:
    """By concurrency."""
    found = []
    for run in recording.runs:
        findings = findings_of(recording.seen(run, RECORDINGS.reports[dtype], listed=listed))
        found.append({each.name for each in findings if each.severity == "error"})
    return found


@pytest.mark.parametrize("listed", [True, False], ids=["rounds", "sums"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recording", RECORDINGS.servers, ids=lambda each: each.name)
def test_a_real_server_is_judged_rightly(recording: Recording, dtype: str, listed: bool) -> None:
    for errors in _errors(recording, dtype, listed):
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
    (recording,) = (each for each in RECORDINGS.servers if each.name == name)
    seen = recording.seen(recording.runs[0], RECORDINGS.reports[dtype], listed=True)
    (found,) = (each for each in findings_of(seen) if each.name == "replies_differ")
    assert "too often: as if noise of 0.4" in found.text


def test_there_are_as_many_as_the_documentation_says() -> None:
    right = [run for each in RECORDINGS.servers if not each.found for run in each.runs]
    assert len(right) >= 50
    assert sum(bool(each.found) for each in RECORDINGS.servers) >= 38
