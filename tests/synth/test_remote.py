"""Servers as a backend: a real HTTP server that replies, fails, hangs and dies."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import GeneratorSection, RunConfig, RunSection, SourceSpec, SynthSection
from pipeline.decoder.engine import Engine
from pipeline.errors import ConfigError, EndpointError, EndpointsUnavailable, StageConflict
from pipeline.records import Prompt, Sample
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.store.samples import read_samples
from pipeline.synth.generate import remote
from pipeline.synth.generate.backend import GeneratorBackend
from pipeline.synth.generate.conversations import ConversationRunner, ConversationScheduler
from pipeline.synth.generate.local import LocalBackend
from pipeline.synth.generate.remote import RemoteBackend
from pipeline.synth.stage import run
from pipeline.telemetry import metrics_of
from tests.conftest import QUESTIONS
from tests.synth.server import ServedTarget, TargetServer

Configure = Callable[..., RunConfig]

QUICK = {
    "timeout_seconds": 20.0,
    "outage_seconds": 20.0,
    "retries": 3,
    "concurrency": 6,
}
SECTION = SynthSection(
    sources=(SourceSpec(source="unused"),),
    max_new_tokens=32,
    max_prompt_tokens=400,
    temperature=1.0,
)
PROMPTS = [
    Prompt(
        sample_id=str(index), source="ours", license="MIT", category="c", turns=(text, "Say more.")
    )
    for index, text in enumerate(QUESTIONS)
]


@pytest.fixture(scope="module")
def served(tiny_target: Path) -> ServedTarget:
    return ServedTarget(tiny_target)


@pytest.fixture(scope="module")
def expected(served: ServedTarget) -> list[Sample]:
    """What the bundled decoder generates, four at a time."""
    samples, rejected = converse(served, LocalBackend(Engine(served.model, slots=4)))
    assert not rejected and {len(sample.supervised) for sample in samples} == {1, 2}
    return samples


def converse(served: ServedTarget, backend: GeneratorBackend) -> tuple[list[Sample], Counter[str]]:
    """All prompts, in batches of four, in the order of the prompts; each is a sample or counted."""
    runner = ConversationRunner(SECTION, served.template, seed=4, name="")
    parts = [(f"{start:02d}", PROMPTS[start : start + 4]) for start in range(0, len(PROMPTS), 4)]
    finished = ConversationScheduler(runner, parts).run(backend)
    batches = sorted(finished, key=lambda batch: batch.name)
    samples = [sample for batch in batches for sample in batch.samples]
    rejected = sum((batch.rejected for batch in batches), Counter[str]())
    assert len(samples) + rejected.total() == len(PROMPTS) and len(batches) == 6
    return samples, rejected


def ask(
    served: ServedTarget, *servers: TargetServer, backend: str = "vllm", **generator: Any
) -> tuple[list[Sample], Counter[str]]:
    """`converse` with servers."""
    urls = tuple(server.url for server in servers)
    section = GeneratorSection.model_validate(
        {"backend": backend, "endpoints": urls, **QUICK, **generator}
    )
    vocabulary = served.model.vocabulary
    remote = RemoteBackend(section, served.template, model="tiny", vocabulary=vocabulary)
    remote.check()
    return converse(served, remote)


def beginnings(samples: Sequence[Sample], expected: Sequence[Sample]) -> bool:
    """Whether samples are those expected, or their first turns."""
    whole = {sample.sample_id: sample for sample in expected}
    return all(
        sample.token_ids == whole[sample.sample_id].token_ids[: len(sample.token_ids)]
        for sample in samples
    )


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_server_that_gives_ids_says_what_the_bundled_decoder_says(
    served: ServedTarget, expected: list[Sample], backend: str
) -> None:
    with TargetServer(served, kind=backend) as server:
        assert ask(served, server, backend=backend) == (expected, {})


@pytest.mark.parametrize(
    ("backend", "prompt"), [("openai", "tokens"), ("openai", "text"), ("vllm", "text")]
)
def test_text_is_tokenised_again_where_that_is_safe(
    letters_target: Path, backend: str, prompt: str
) -> None:
    """A vocabulary of single characters spells every text in one way only."""
    served = ServedTarget(letters_target)
    alone, _ = converse(served, LocalBackend(Engine(served.model, slots=4)))
    with TargetServer(served, kind=backend) as server:
        samples, rejected = ask(served, server, backend=backend, prompt=prompt)
    assert not rejected and {len(sample.supervised) for sample in samples} == {1, 2}
    assert [sample.model_copy(update={"generator": ""}) for sample in samples] == alone
    assert {sample.generator for sample in samples} == (
        {", re-tokenised"} if backend == "openai" else {""}
    )
    assert all(
        isinstance(payload["prompt"], str) == (prompt == "text") for payload in server.payloads
    )


def test_text_that_does_not_tell_the_ids_is_rejected_and_counted(
    served: ServedTarget, expected: list[Sample]
) -> None:
    """The tiny target generates random bytes and unusual splits of words."""
    with TargetServer(served, kind="openai") as server:
        samples, rejected = ask(served, server, backend="openai")
    assert (
        rejected
        and set(rejected) <= {"remote:not_text", "remote:other_count"}
        and beginnings(samples, expected)
    )


def test_what_the_server_counts_must_agree(letters_target: Path) -> None:
    served = ServedTarget(letters_target)
    with TargetServer(served, kind="openai", fault=lambda ids, before: "other_count") as server:
        assert ask(served, server, backend="openai") == ([], {"remote:other_count": len(PROMPTS)})


FAULTS = ("500", "429", "503", "cut", "truncated", "drip", "aborted", "no_choice", "hang")


def pick(ids: tuple[int, ...]) -> int:
    """A number that goes with a prompt; the short request that tries an endpoint has its own."""
    return sum(ids) if len(ids) > 20 else -1


def test_what_passes_leaves_no_trace(
    served: ServedTarget, expected: list[Sample], tmp_path: Path
) -> None:
    """Every first attempt fails, in one of nine ways."""
    seen = set()

    def once(ids: tuple[int, ...], before: int) -> str | None:
        if before or pick(ids) < 0:
            return None
        fault = FAULTS[pick(ids) % len(FAULTS)]
        seen.add(fault)
        return fault

    settings = RunSection(metrics_dir=str(tmp_path))
    with TargetServer(served, fault=once) as server, metrics_of(settings, "synth"):
        assert ask(served, server, timeout_seconds=2.0, concurrency=16) == (expected, {})
    assert seen == set(FAULTS)
    [file] = tmp_path.iterdir()
    metrics = file.read_text(encoding="utf-8")
    [line] = re.findall(r"^eagle3_retries_total\{of=\"endpoint\".*\} (.*)$", metrics, re.M)
    assert float(line) >= len(FAULTS) and "eagle3_endpoints_healthy{" in metrics
    assert server.url not in metrics and "127.0.0.1" not in metrics


PERSISTENT = {
    "500": "remote:error_500",
    "400": "remote:refused_400",
    "cut": "remote:disconnected",
    "truncated": "remote:unreadable",
    "hang": "remote:timeout",
    "other_prompt": "remote:other_prompt",
}


def test_prompts_that_always_fail_are_counted_and_the_others_go_on(
    served: ServedTarget, expected: list[Sample]
) -> None:
    first = {
        sample.token_ids[: sample.supervised[0].start]: index
        for index, sample in enumerate(expected)
    }

    def fault(ids: tuple[int, ...], before: int) -> str | None:
        index = first.get(ids, len(PERSISTENT))
        return list(PERSISTENT)[index] if index < len(PERSISTENT) else None

    with TargetServer(served, fault=fault) as server:
        samples, rejected = ask(served, server, timeout_seconds=2.0, retries=1)
    assert rejected == dict.fromkeys(PERSISTENT.values(), 1)
    assert samples == expected[len(PERSISTENT) :]
    attempts = {
        list(PERSISTENT)[index]: server.asked[ids]
        for ids, index in first.items()
        if index < len(PERSISTENT)
    }
    assert attempts == {"500": 2, "400": 1, "cut": 2, "truncated": 2, "hang": 2, "other_prompt": 1}


def test_a_second_turn_that_fails_leaves_the_first(
    served: ServedTarget, expected: list[Sample]
) -> None:
    with TargetServer(served, fault=lambda ids, before: "400" if len(ids) > 32 else None) as server:
        samples, rejected = ask(served, server)
    assert (
        not rejected
        and beginnings(samples, expected)
        and {len(sample.supervised) for sample in samples} == {1}
    )


def test_a_dead_endpoint_is_unhealthy_and_the_others_take_its_prompts(
    served: ServedTarget, expected: list[Sample]
) -> None:
    with TargetServer(served) as healthy, TargetServer(served) as dying:
        dying.fault = lambda ids, before: dying.dead.set() if dying.asked.total() > 6 else None
        assert ask(served, dying, healthy) == (expected, {})
        assert dying.dead.is_set()


def test_an_endpoint_that_hangs_for_everyone_costs_no_prompt(
    served: ServedTarget, expected: list[Sample]
) -> None:
    """Not even without retries: a short request tells that the endpoint is at fault."""
    with TargetServer(served) as healthy, TargetServer(served) as stuck:
        stuck.fault = lambda ids, before: "hang" if stuck.asked.total() > 1 else None
        assert ask(served, stuck, healthy, timeout_seconds=2.0, retries=0) == (expected, {})
        assert stuck.asked.total() > 2


def test_an_endpoint_that_comes_back_is_used_again(
    served: ServedTarget, expected: list[Sample]
) -> None:
    with TargetServer(served) as server:

        def stumble(ids: tuple[int, ...], before: int) -> None:
            if server.asked.total() == 8:
                server.dead.set()
                threading.Timer(0.3, server.dead.clear).start()

        server.fault = stumble
        assert ask(served, server) == (expected, {})
        assert not server.dead.is_set()


def test_a_prompt_that_takes_endpoints_down_is_given_up(
    served: ServedTarget, expected: list[Sample]
) -> None:
    """After it, even the short request fails, once: the server was restarted."""
    poison = expected[0].token_ids[: expected[0].supervised[0].start]
    with TargetServer(served) as server:
        down = threading.Event()

        def crash(ids: tuple[int, ...], before: int) -> str | None:
            if ids == poison:
                down.set()
                return "cut"
            if down.is_set() and pick(ids) < 0:
                down.clear()
                return "cut"
            return None

        server.fault = crash
        samples, rejected = ask(served, server, retries=1)
    assert rejected == {"remote:disconnected": 1} and samples == expected[1:]
    assert server.asked[poison] <= 6


def test_a_quota_that_is_used_up_costs_no_prompt(
    served: ServedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are served meanwhile; once it is refused alone for too long, the run ends."""
    monkeypatch.setattr(remote, "BUSY_SECONDS", 0.3)
    hungry = served.template.start(PROMPTS[0].turns[0])
    with (
        TargetServer(
            served, fault=lambda ids, n: "429" if ids == tuple(hungry) else None
        ) as server,
        pytest.raises(EndpointsUnavailable) as ended,
    ):
        ask(served, server)
    assert ended.value.exit_code == 75 and server.asked.total() > len(PROMPTS)


def test_no_more_requests_than_allowed_are_under_way(
    served: ServedTarget, expected: list[Sample]
) -> None:
    seen, now, lock = [0], [0], threading.Lock()

    def watch(ids: tuple[int, ...], before: int) -> None:
        with lock:
            now[0] += 1
            seen[0] = max(seen[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    with TargetServer(served, fault=watch) as server:
        assert ask(served, server, concurrency=3) == (expected, {})
    assert 2 <= seen[0] <= 3


@pytest.fixture
def configure(make_config: Configure) -> Configure:
    """A whole run in bfloat16, remote with endpoints; replies are the same alone and in a batch."""

    def make(
        uri: str, *endpoints: str, generator: dict[str, Any] | None = None, **synth: Any
    ) -> RunConfig:
        remote = (
            {"backend": "vllm", "endpoints": list(endpoints), **QUICK, **(generator or {})}
            if endpoints
            else {}
        )
        config = make_config(uri, generator=remote, **{"max_new_tokens": 16, **synth})
        return config.model_copy(
            update={"target": config.target.model_copy(update={"dtype": "bfloat16"})}
        )

    return make


def stored(config: RunConfig) -> list[Sample]:
    """All samples of a finished run, whoever generated them."""
    manifest = find_manifest(config.run.uri, "synth")
    assert manifest is not None and not manifest.rejected
    location = stage_location(config.run.uri, "synth")
    return [
        sample.model_copy(update={"generator": ""})
        for shard in manifest.shards
        for sample in read_samples(location, shard)
    ]


def test_when_all_endpoints_are_gone_the_run_stops_and_can_be_continued(
    served: ServedTarget, configure: Configure
) -> None:
    run(configure("local"))
    with TargetServer(served) as server:
        server.fault = lambda ids, before: server.dead.set() if server.asked.total() > 22 else None
        config = configure(
            "remote", server.url, generator={"outage_seconds": 0.4, "concurrency": 2}
        )
        problem = r"synth\.generator\.endpoints: none of 1 endpoints has answered for .*"
        with pytest.raises(EndpointsUnavailable, match=problem + "run the same command") as gone:
            run(config)
        assert gone.value.exit_code == 75, "try again later"
    committed = len(list(Path(config.run.uri).rglob("*.entry.json")))
    assert 0 < committed < 3 and find_manifest(config.run.uri, "synth") is None
    with TargetServer(served) as other:
        continued = configure("remote", other.url, generator={"concurrency": 9})
        manifest = run(continued)
    assert stored(continued) == stored(configure("local"))
    [first, *_] = read_samples(stage_location(continued.run.uri, "synth"), manifest.shards[0])
    assert ", vllm 1.2.3 server of tiny, " in first.generator
    files = [path for path in Path(continued.run.uri).rglob("*") if path.is_file()]
    assert not any(b"127.0.0.1" in path.read_bytes() for path in files), (
        "addresses are nobody's business"
    )


@pytest.mark.parametrize("backend", ["vllm", "sglang", "openai"])
def test_the_model_is_the_one_that_the_server_lists_and_the_version_is_recorded(
    backend: str, served: ServedTarget, letters_target: Path, configure: Configure
) -> None:
    target = ServedTarget(letters_target) if backend == "openai" else served
    with TargetServer(target, kind=backend) as server:
        server.models = ["as served"]
        generator = {"backend": backend}
        section = GeneratorSection(backend=backend, endpoints=(server.url,))
        known = asyncio.run(remote.identify(section, "the source"))
        if backend != "openai":
            manifest = run(configure("a", server.url, generator=generator, max_prompts=3))
            location = stage_location(configure("a").run.uri, "synth")
            [first, *_] = read_samples(location, manifest.shards[0])
            assert f", {backend} 1.2.3 server of " in first.generator
        asked = {payload.get("model") for payload in server.payloads}
    version, model = {
        "vllm": (" 1.2.3", "as served"),
        "sglang": (" 1.2.3", "the source"),  # its requests name none
        "openai": ("", "as served"),
    }[backend]
    assert str(known) == f"{backend}{version} server of {model}"
    assert asked == {"vllm": {"as served"}, "sglang": {None}, "openai": set()}[backend]


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        (["a", "b"], r"/v1/models: lists the models a, b \(fix: set synth\.generator\.model"),
        ([], r"/v1/models: lists no model"),
    ],
)
def test_a_server_of_several_models_wants_a_name(
    models: list[str], problem: str, served: ServedTarget, configure: Configure
) -> None:
    with TargetServer(served) as server:
        server.models = models
        with pytest.raises(EndpointError, match=problem):
            run(configure("a", server.url))
        run(configure("a", server.url, generator={"model": "a"}, max_prompts=2))
        assert {payload["model"] for payload in server.payloads} == {"a"}


def test_servers_of_two_versions_are_not_mixed(served: ServedTarget, configure: Configure) -> None:
    """Neither at once nor one after the other: a resumed run ends with the same bytes or not."""
    with TargetServer(served) as server, TargetServer(served) as newer:
        newer.version = "1.3.0"
        with pytest.raises(EndpointError, match=r"vllm 1\.3\.0 server of tiny, and .* 1\.2\.3"):
            run(configure("both", server.url, newer.url))
        server.fault = lambda ids, before: server.dead.set() if server.asked.total() > 22 else None
        quick = {"outage_seconds": 0.4, "concurrency": 2}
        config = configure("remote", server.url, generator=quick)
        with pytest.raises(EndpointsUnavailable):
            run(config)
        committed = sorted(Path(config.run.uri).rglob("*.entry.json"))
        assert committed
        message = r'another server: server\.version "1\.2\.3" → "1\.3\.0" \(fix: pass --force'
        with pytest.raises(StageConflict, match=message):
            run(configure("remote", newer.url))
        assert sorted(Path(config.run.uri).rglob("*.entry.json")) == committed
        newer.version = "1.2.3"
        continued, whole = configure("remote", newer.url), configure("whole", newer.url)
        assert run(continued).shards == run(whole).shards


def test_mistakes_are_found_at_the_first_contact(
    served: ServedTarget, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = r"no endpoint answers: http://127\.0\.0\.1:9/v1 is set aside for now: unreachable"
    with pytest.raises(EndpointsUnavailable, match=nobody):
        run(configure("a", "http://127.0.0.1:9/v1"))
    for fault, problem in {
        "404": "HTTP 404: .*no: 404",
        "401": "HTTP 401",
        "400": "HTTP 400",
        "other_prompt": "remote:other_prompt",
    }.items():
        always = partial(lambda fault, ids, before: fault, fault)
        with (
            TargetServer(served, fault=always) as server,
            pytest.raises(EndpointError, match=problem) as refused,
        ):
            run(configure("b", server.url))
        assert refused.value.exit_code == 2, "nothing that waiting would mend"
    with pytest.raises(ConfigError, match="the environment has no NO_SUCH_KEY"):
        run(configure("c", "http://127.0.0.1:9/v1", generator={"api_key_env": "NO_SUCH_KEY"}))
    monkeypatch.setenv("TINY_KEY", "secret-of-the-server")
    with TargetServer(served) as server:
        config = configure("d", server.url, generator={"api_key_env": "TINY_KEY"}, max_prompts=2)
        run(config)
    assert server.headers["Authorization"] == "Bearer secret-of-the-server"
    files = [path for path in Path(config.run.uri).rglob("*") if path.is_file()]
    assert not any(b"secret-of" in path.read_bytes() for path in files)
    assert not Path(configure("a").run.uri).exists(), "nothing was begun"


def test_the_key_stays_with_its_server(
    served: ServedTarget, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_KEY", "secret-of-the-server")
    with TargetServer(served) as server, TargetServer(served) as elsewhere:
        config = configure("a", server.url, generator={"api_key_env": "TINY_KEY"})
        for status in ("301", "302", "307", "308"):
            redirect = f"{status} Location: {elsewhere.url}/completions"
            server.fault = partial(lambda fault, ids, before: fault, redirect)
            with pytest.raises(EndpointError, match=f"HTTP {status}"):
                run(config)
        assert server.asked.total() == 4 and not elsewhere.asked, "no redirect is followed"
        server.fault = lambda ids, before: "401 X-Told: wrong key secret-of-the-server"
        with pytest.raises(EndpointError, match="wrong key …") as refused:
            run(config)
        assert "secret-of" not in str(refused.value)
    monkeypatch.setenv("TINY_KEY", "ключ")
    with pytest.raises(ConfigError, match="no header can carry the value of TINY_KEY"):
        run(config)


def test_a_refusal_in_the_middle_of_a_run_costs_no_prompt(
    served: ServedTarget, configure: Configure
) -> None:
    with TargetServer(served) as server:
        server.fault = lambda ids, before: "403" if server.asked.total() > 9 else None
        with pytest.raises(EndpointError, match="HTTP 403"):
            run(configure("remote", server.url))
