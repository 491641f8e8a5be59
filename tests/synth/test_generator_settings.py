"""What `synth.generator` may say, and what of it decides the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigError

Configure = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("generator", "problem"),
    [
        ({"endpoints": ["http://a/v1"]}, "backend is local"),
        ({"backend": "vllm"}, "needs endpoints"),
        ({"backend": "vllm", "endpoints": ["a:8000"]}, "must start with http"),
        ({"backend": "vllm", "endpoints": ["http://a/v1", "http://a/v1/"]}, "listed twice"),
        ({"backend": "sglang", "endpoints": ["http://a"], "prompt": "text"}, "takes token ids"),
    ],
)
def test_settings_that_contradict_each_other(
    make_config: Configure, generator: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(generator=generator)


def test_settings_that_a_server_cannot_follow(make_config: Configure) -> None:
    openai = {"backend": "openai", "endpoints": ["http://a/v1"]}
    with pytest.raises(ConfigError, match="has no top_k"):
        make_config(generator=openai, top_k=5)
    with pytest.raises(ConfigError, match="has no top_k"):
        make_config(generator=openai, sources=[{"source": "a.jsonl", "sampling": {"top_k": 5}}])
    with pytest.raises(ConfigError, match="bundled decoder only"):
        make_config(generator=openai, head="some/head")


def test_how_requests_are_sent_does_not_decide_the_samples(make_config: Configure) -> None:
    one = make_config(generator={"backend": "vllm", "endpoints": ["http://a/v1"]})
    other = make_config(
        generator={
            "backend": "vllm",
            "endpoints": ["http://b/v1", "http://c/v1"],
            "concurrency": 5,
            "timeout_seconds": 9,
        }
    )
    assert one.section_hash("synth") == other.section_hash("synth")
    assert one.section_hash("synth") != make_config(
        generator={"backend": "vllm", "endpoints": ["http://a/v1"], "model": "x"}
    ).section_hash("synth")
