"""Servers as generators: a real HTTP server that answers, fails, hangs and dies."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import GeneratorSection, RunConfig, SourceSpec, SynthSection
from pipeline.decoder.engine import Engine
from pipeline.errors import ConfigError, EndpointError
from pipeline.records import Prompt, Sample
from pipeline.store.samples import read_samples
from pipeline.store.stage_run import find_manifest, stage_location
from pipeline.synth import run
from pipeline.synth.generate.conversations import Answer, Generator
from pipeline.synth.generate.local import LocalAnswer
from pipeline.synth.generate.remote import RemoteAnswer
from tests.conftest import QUESTIONS
from tests.synth.server import Brain, TargetServer

Configure = Callable[..., RunConfig]

QUICK = {
    "timeout_seconds": 20.0,
    "backoff_seconds": 0.01,
    "patience_seconds": 20.0,
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
def brain(tiny_target: Path) -> Brain:
    return Brain(tiny_target)


@pytest.fixture(scope="module")
def expected(brain: Brain) -> list[Sample]:
    """What the bundled decoder says, four at a time."""
    samples, rejected = converse(brain, LocalAnswer(Engine(brain.model, slots=4)))
    assert not rejected and {len(sample.supervised) for sample in samples} == {1, 2}
    return samples


def converse(brain: Brain, answer: Answer, **section: Any) -> tuple[list[Sample], Counter[str]]:
    """All prompts, in batches of four, in the order of the prompts; each is a sample or counted."""
    settings = SECTION.model_copy(update=section)
    parts = [(f"{start:02d}", PROMPTS[start : start + 4]) for start in range(0, len(PROMPTS), 4)]
    batches = sorted(
        Generator(settings, brain.template, answer, seed=3, name="").converse(parts),
        key=lambda batch: batch.name,
    )
    samples = [sample for batch in batches for sample in batch.samples]
    rejected = sum((batch.rejected for batch in batches), Counter[str]())
    assert len(samples) + rejected.total() == len(PROMPTS) and len(batches) == 6
    return samples, rejected


def ask(
    brain: Brain, *servers: TargetServer, backend: str = "vllm", **generator: Any
) -> tuple[list[Sample], Counter[str]]:
    """`converse` with servers."""
    urls = tuple(server.url for server in servers)
    section = GeneratorSection.model_validate(
        {"backend": backend, "endpoints": urls, **QUICK, **generator}
    )
    answer = RemoteAnswer(section, brain.template, source="tiny", vocabulary=brain.model.vocabulary)
    answer.check()
    return converse(brain, answer)


def beginnings(samples: Sequence[Sample], expected: Sequence[Sample]) -> bool:
    """Whether samples are those expected, or their first turns."""
    whole = {sample.prompt_id: sample for sample in expected}
    return all(
        sample.token_ids == whole[sample.prompt_id].token_ids[: len(sample.token_ids)]
        for sample in samples
    )


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_server_that_gives_ids_says_what_the_bundled_decoder_says(
    brain: Brain, expected: list[Sample], backend: str
) -> None:
    with TargetServer(brain, kind=backend) as server:
        assert ask(brain, server, backend=backend) == (expected, {})


@pytest.mark.parametrize(
    ("backend", "prompt"), [("openai", "tokens"), ("openai", "text"), ("vllm", "text")]
)
def test_text_is_tokenised_again_where_that_is_safe(
    letters_target: Path, backend: str, prompt: str
) -> None:
    """A vocabulary of single characters spells every text in one way only."""
    brain = Brain(letters_target)
    alone, _ = converse(brain, LocalAnswer(Engine(brain.model, slots=4)))
    with TargetServer(brain, kind=backend) as server:
        samples, rejected = ask(brain, server, backend=backend, prompt=prompt)
    assert not rejected and {len(sample.supervised) for sample in samples} == {1, 2}
    assert [sample.model_copy(update={"generator": ""}) for sample in samples] == alone
    assert {sample.generator for sample in samples} == (
        {", re-tokenised"} if backend == "openai" else {""}
    )
    assert all(
        isinstance(payload["prompt"], str) == (prompt == "text") for payload in server.payloads
    )


def test_text_that_does_not_tell_the_ids_is_rejected_and_counted(
    brain: Brain, expected: list[Sample]
) -> None:
    """The tiny target speaks in random bytes and in unusual splits of words."""
    with TargetServer(brain, kind="openai") as server:
        samples, rejected = ask(brain, server, backend="openai")
    assert (
        rejected
        and set(rejected) <= {"remote:not_text", "remote:other_count"}
        and beginnings(samples, expected)
    )


def test_what_the_server_counts_must_agree(letters_target: Path) -> None:
    brain = Brain(letters_target)
    with TargetServer(brain, kind="openai", fault=lambda ids, before: "other_count") as server:
        assert ask(brain, server, backend="openai") == ([], {"remote:other_count": len(PROMPTS)})


FAULTS = ("500", "429", "503", "cut", "truncated", "drip", "aborted", "no_choice", "hang")


def pick(ids: tuple[int, ...]) -> int:
    """A number that goes with a prompt; the short request that tries an endpoint has its own."""
    return sum(ids) if len(ids) > 20 else -1


def test_what_passes_leaves_no_trace(brain: Brain, expected: list[Sample]) -> None:
    """Every first attempt fails, in one of nine ways."""
    seen = set()

    def once(ids: tuple[int, ...], before: int) -> str | None:
        if before or pick(ids) < 0:
            return None
        fault = FAULTS[pick(ids) % len(FAULTS)]
        seen.add(fault)
        return fault

    with TargetServer(brain, fault=once) as server:
        assert ask(brain, server, timeout_seconds=2.0, concurrency=16) == (expected, {})
    assert seen == set(FAULTS)


PERSISTENT = {
    "500": "remote:error_500",
    "400": "remote:refused_400",
    "cut": "remote:disconnected",
    "truncated": "remote:unreadable",
    "hang": "remote:timeout",
    "other_prompt": "remote:other_prompt",
}


def test_prompts_that_always_fail_are_counted_and_the_others_go_on(
    brain: Brain, expected: list[Sample]
) -> None:
    first = {
        sample.token_ids[: sample.supervised[0].start]: index
        for index, sample in enumerate(expected)
    }

    def fault(ids: tuple[int, ...], before: int) -> str | None:
        place = first.get(ids, len(PERSISTENT))
        return list(PERSISTENT)[place] if place < len(PERSISTENT) else None

    with TargetServer(brain, fault=fault) as server:
        samples, rejected = ask(brain, server, timeout_seconds=2.0, retries=1)
    assert rejected == dict.fromkeys(PERSISTENT.values(), 1)
    assert samples == expected[len(PERSISTENT) :]
    attempts = {
        list(PERSISTENT)[place]: server.asked[ids]
        for ids, place in first.items()
        if place < len(PERSISTENT)
    }
    assert attempts == {"500": 2, "400": 1, "cut": 2, "truncated": 2, "hang": 2, "other_prompt": 1}


def test_a_second_turn_that_fails_leaves_the_first(brain: Brain, expected: list[Sample]) -> None:
    with TargetServer(brain, fault=lambda ids, before: "400" if len(ids) > 32 else None) as server:
        samples, rejected = ask(brain, server)
    assert (
        not rejected
        and beginnings(samples, expected)
        and {len(sample.supervised) for sample in samples} == {1}
    )


def test_a_dead_endpoint_is_set_aside_and_the_others_take_its_prompts(
    brain: Brain, expected: list[Sample]
) -> None:
    with TargetServer(brain) as healthy, TargetServer(brain) as dying:
        dying.fault = lambda ids, before: dying.dead.set() if dying.asked.total() > 6 else None
        assert ask(brain, dying, healthy) == (expected, {})
        assert dying.dead.is_set()


def test_an_endpoint_that_hangs_for_everyone_costs_no_prompt(
    brain: Brain, expected: list[Sample]
) -> None:
    """Not even without retries: a short request tells that the endpoint is at fault."""
    with TargetServer(brain) as healthy, TargetServer(brain) as stuck:
        stuck.fault = lambda ids, before: "hang" if stuck.asked.total() > 1 else None
        assert ask(brain, stuck, healthy, timeout_seconds=2.0, retries=0) == (expected, {})
        assert stuck.asked.total() > 2


def test_an_endpoint_that_comes_back_is_used_again(brain: Brain, expected: list[Sample]) -> None:
    with TargetServer(brain) as server:

        def stumble(ids: tuple[int, ...], before: int) -> None:
            if server.asked.total() == 8:
                server.dead.set()
                threading.Timer(0.3, server.dead.clear).start()

        server.fault = stumble
        assert ask(brain, server) == (expected, {})
        assert not server.dead.is_set()


def test_a_prompt_that_takes_endpoints_down_is_given_up(
    brain: Brain, expected: list[Sample]
) -> None:
    """After it, even the short request fails, once: the server was restarted."""
    poison = expected[0].token_ids[: expected[0].supervised[0].start]
    with TargetServer(brain) as server:
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
        samples, rejected = ask(brain, server, retries=1)
    assert rejected == {"remote:disconnected": 1} and samples == expected[1:]
    assert server.asked[poison] <= 6


def test_no_more_requests_than_allowed_are_under_way(brain: Brain, expected: list[Sample]) -> None:
    seen, now, lock = [0], [0], threading.Lock()

    def watch(ids: tuple[int, ...], before: int) -> None:
        with lock:
            now[0] += 1
            seen[0] = max(seen[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    with TargetServer(brain, fault=watch) as server:
        assert ask(brain, server, concurrency=3) == (expected, {})
    assert 2 <= seen[0] <= 3


@pytest.fixture
def configure(make_config: Configure) -> Configure:
    """A whole run in bfloat16, whose replies are the same alone and in a batch; endpoints make it remote."""

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
    brain: Brain, configure: Configure
) -> None:
    run(configure("local"))
    with TargetServer(brain) as server:
        server.fault = lambda ids, before: server.dead.set() if server.asked.total() > 22 else None
        config = configure(
            "remote", server.url, generator={"patience_seconds": 0.4, "concurrency": 2}
        )
        with pytest.raises(
            EndpointError,
            match=r"synth\.generator\.endpoints: none of 1 endpoints has answered for .*run the same command",
        ):
            run(config)
    committed = len(list(Path(config.run.uri).rglob("*.entry.json")))
    assert 0 < committed < 3 and find_manifest(config.run.uri, "synth") is None
    with TargetServer(brain) as other:
        continued = configure("remote", other.url, generator={"concurrency": 9})
        manifest = run(continued)
    assert stored(continued) == stored(configure("local"))
    assert (
        "vllm server of"
        in next(
            iter(read_samples(stage_location(continued.run.uri, "synth"), manifest.shards[0]))
        ).generator
    )
    assert not any(
        b"127.0.0.1" in path.read_bytes()
        for path in Path(continued.run.uri).rglob("*")
        if path.is_file()
    ), "addresses are nobody's business"


def test_mistakes_are_found_at_the_first_contact(
    brain: Brain, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        EndpointError,
        match=r"no endpoint answers: http://127\.0\.0\.1:9/v1 is set aside for now: unreachable",
    ):
        run(configure("a", "http://127.0.0.1:9/v1"))
    for fault, problem in {
        "404": "HTTP 404: .*no: 404",
        "401": "HTTP 401",
        "400": "HTTP 400",
        "other_prompt": "remote:other_prompt",
    }.items():
        always = partial(lambda fault, ids, before: fault, fault)
        with (
            TargetServer(brain, fault=always) as server,
            pytest.raises(EndpointError, match=problem),
        ):
            run(configure("b", server.url))
    with pytest.raises(ConfigError, match="the environment has no NO_SUCH_KEY"):
        run(configure("c", "http://127.0.0.1:9/v1", generator={"api_key_env": "NO_SUCH_KEY"}))
    monkeypatch.setenv("TINY_KEY", "secret-of-the-server")
    with TargetServer(brain) as server:
        config = configure("d", server.url, generator={"api_key_env": "TINY_KEY"}, max_prompts=2)
        run(config)
    assert server.headers["Authorization"] == "Bearer secret-of-the-server"
    assert not any(
        b"secret-of" in path.read_bytes()
        for path in Path(config.run.uri).rglob("*")
        if path.is_file()
    )
    assert not Path(configure("a").run.uri).exists(), "nothing was begun"


def test_a_refusal_in_the_middle_of_a_run_costs_no_prompt(
    brain: Brain, configure: Configure
) -> None:
    with TargetServer(brain) as server:
        server.fault = lambda ids, before: "403" if server.asked.total() > 9 else None
        with pytest.raises(EndpointError, match="HTTP 403"):
            run(configure("remote", server.url))
