"""Servers that are busy for long: a run waits for them, and no prompt is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from email.utils import formatdate
from itertools import count
from typing import Any

import httpx
import pytest

from pipeline.errors import EndpointsUnavailable
from pipeline.records import Sample
from pipeline.synth.generate import remote as endpoints
from pipeline.synth.generate.remote import _retry_after
from tests.synth.server import Fault, ServedTarget, TargetServer
from tests.synth.test_remote import ask, expected, pick, served

__all__ = ["expected", "served"]  # fixtures

STORM_SECONDS = 3.0


@pytest.fixture
def fleet(served: ServedTarget) -> Iterator[list[TargetServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(TargetServer(served)) for _ in range(3)]


def storm(*statuses: str, begins_after: int = 10) -> tuple[Fault, list[float]]:
    """Nothing but these, in turn, for some seconds; and when requests came meanwhile."""
    seen: list[float] = []
    asked = [0]

    def fault(ids: tuple[int, ...], before: int) -> str | None:
        asked[0] += 1
        if asked[0] <= begins_after or (seen and time.monotonic() - seen[0] > STORM_SECONDS):
            return None
        seen.append(time.monotonic())
        return statuses[len(seen) % len(statuses)]

    return fault, seen


@pytest.mark.parametrize("begins_after", [0, 10])
def test_a_storm_of_refusals_costs_no_prompt(
    fleet: list[TargetServer],
    served: ServedTarget,
    expected: list[Sample],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    begins_after: int,
) -> None:
    """Longer than an outage may be; the health checks of the start are refused as well."""
    monkeypatch.setattr(endpoints, "_NOTICE_SECONDS", 0.5)
    fault, seen = storm("429", "503", "502", begins_after=begins_after)
    for server in fleet:
        server.fault = fault
    started = time.monotonic()
    settings: dict[str, Any] = {"outage_seconds": 0.5, "retries": 0, "concurrency": 12}
    assert ask(served, *fleet, **settings) == (expected, {})
    assert time.monotonic() - started > STORM_SECONDS
    assert len(seen) < 100, "ever later, and few at once"
    told = capsys.readouterr().out
    assert told.count("all endpoints are busy") == told.count("endpoints reply again, after") == 1


def test_a_busy_health_check_blames_nobody(
    fleet: list[TargetServer], served: ServedTarget, expected: list[Sample]
) -> None:
    """A server's first word to a prompt is a fault; the check that follows is told to wait."""
    checks = count(1)

    def fault(ids: tuple[int, ...], before: int) -> str | None:
        if pick(ids) < 0:
            return "429" if next(checks) > len(fleet) else None
        return None if before else ("cut", "400", "500")[pick(ids) % 3]

    for server in fleet:
        server.fault = fault
    settings: dict[str, Any] = {"outage_seconds": 0.5, "retries": 0}
    assert ask(served, *fleet, **settings) == (expected, {})


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_server_says_when_to_come_back(
    served: ServedTarget, expected: list[Sample], form: str
) -> None:
    told: list[float] = []
    early: list[float] = []

    def fault(ids: tuple[int, ...], before: int) -> str | None:
        now = time.monotonic()
        if server.asked.total() < 8:
            return None
        if not told:
            told.append(now)
            after = "2" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
            return f"429 Retry-After: {after}"
        if now - told[0] < 0.9:  # dates have whole seconds
            early.append(now)
        return None

    with TargetServer(served, fault=fault) as server:
        assert ask(served, server, concurrency=1) == (expected, {})
    assert told and not early


def test_how_long_a_server_may_say() -> None:
    def after(text: str, **more: str) -> float | None:
        return _retry_after(httpx.Response(429, headers={"Retry-After": text, **more}))

    assert after("7") == 7 and after(" 7 ") == 7
    assert after("Wed, 21 Oct 2015 07:28:10 GMT", Date="Wed, 21 Oct 2015 07:28:00 GMT") == 10
    assert after("Wed, 21 Oct 2015 07:28:10 GMT") == 0, "long ago"
    for nonsense in ("", "soon", "-3", "1e3", "Wed, 99 Oct"):
        assert after(nonsense) is None, nonsense
    endpoint = endpoints.Endpoint("http://a")
    endpoint.slow_down(float("9" * 400), sent=time.monotonic(), backoff=1.0)
    assert endpoint.paused_until < time.monotonic() + 602


def test_requests_under_way_together_slow_an_endpoint_down_once() -> None:
    endpoint = endpoints.Endpoint("http://a", in_flight=63)
    sent = time.monotonic()
    for _ in range(64):
        endpoint.slow_down(None, sent=sent, backoff=1.0)
        endpoint.in_flight -= 1
    assert endpoint.limit == 32 and endpoint.busy_in_a_row == 1
    assert endpoint.paused_until <= time.monotonic() + 1


def test_a_fleet_that_stays_busy_ends_the_run(
    fleet: list[TargetServer], served: ServedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server asks to come back much later than the run waits."""
    monkeypatch.setattr(endpoints, "BUSY_SECONDS", 1.0)
    for fault in ("503", "429 Retry-After: 300"):
        for server in fleet:
            server.fault = lambda ids, before, fault=fault: fault  # type: ignore[misc]
        started = time.monotonic()
        with pytest.raises(EndpointsUnavailable, match=r"too busy, .* for 1 s") as ended:
            ask(served, *fleet, outage_seconds=0.1)
        assert ended.value.exit_code == 75 and 1 < time.monotonic() - started < 10
