"""What `synth.generator` may say, and what of it decides the samples."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.cli import main
from pipeline.config import GeneratorSection, RunConfig
from pipeline.errors import ConfigError

Configure = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("generator", "problem"),
    [
        ({"endpoints": ["http://a/v1"]}, "backend is local"),
        ({"backend": "vllm"}, "needs endpoints"),
        ({"backend": "vllm", "endpoints": ["a:8000"]}, "is no URL"),
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


KEY = "sk-Zq81mXw0vT"
REMOTE: dict[str, Any] = {"backend": "vllm", "endpoints": ["https://a/v1"]}


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("generator", {**REMOTE, "api_key_env": KEY}),
        ("generator", {**REMOTE, "api_key_env": [KEY]}),
        ("generator", {**REMOTE, "api_key_env": "hf_" + KEY.replace("-", "")}),
        ("generator", {**REMOTE, "api_key_env": KEY.replace("-", "").upper() + "AAAA"}),
        ("generator", {**REMOTE, "endpoints": f"https://a/v1/{KEY}"}),
        ("generator", {**REMOTE, "endpoints": [f"https://user:{KEY}@a/v1"]}),
        ("generator", {**REMOTE, "endpoints": [f"https://{KEY}@a/v1"]}),
        ("generator", {**REMOTE, "endpoints": [f"https://a:{KEY}/v1"]}),
        ("generator", {**REMOTE, "endpoints": [f"https://a/v1?api_key={KEY}"]}),
        ("generator", {**REMOTE, "endpoints": [f"https://a/v1?token={KEY}"]}),
        ("generator", {**REMOTE, "endpoints": [f"https://a/v1#{KEY}"]}),
        ("sources", [{"source": f"s3://AKIA:{KEY}@bucket/prompts.jsonl"}]),
        ("sources", [{"source": f"https://a/prompts.jsonl?X-Amz-Signature={KEY}"}]),
    ],
)
def test_a_key_in_the_wrong_place_is_refused_and_not_shown(
    make_config: Configure, section: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(**{section: value})
    assert refused.value.exit_code == 2 and f"synth.{section}" in refused.value.where
    shown = "".join(traceback.format_exception(refused.value)).lower()
    assert KEY[3:].lower() not in shown, shown


@pytest.mark.parametrize(
    "override",
    [
        f"synth.generator.api_key_env={KEY}",
        f"synth.generator.api_key_env:{KEY}",
        f"synth.generator.api_key_env {KEY}",
        f"synth.generator.api_key_env=[{KEY}",
        f"synth.generator.endpoints=[https://u:{KEY}@a/v1",
        f"synth.generator.endpoints=[https://u:{KEY}@a/v1]",
        f"synth.generator.endpoints https://u:{KEY}@a/v1?b=c",
        f"run.uri=s3://u:{KEY}@bucket/run",
    ],
)
@pytest.mark.parametrize("command", [["synth", "--plan"], ["synth"], ["show"]])
def test_no_command_shows_a_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str], override: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"run: {{uri: {tmp_path}/run}}\ntarget: {{source: org/model}}\n"
        "synth: {sources: [{source: 'builtin:instructions'}],\n"
        "  generator: {backend: vllm, endpoints: ['https://a/v1']}}\n"
    )
    assert main([*command[:1], "-c", str(file), override, *command[1:]]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ") and KEY not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_pydantic_itself_shows_no_key() -> None:
    with pytest.raises(ValidationError, match="in capitals") as refused:
        GeneratorSection.model_validate({**REMOTE, "api_key_env": KEY})
    assert KEY not in str(refused.value)


def test_a_key_crosses_the_network_encrypted(make_config: Configure) -> None:
    def generator(url: str, **more: Any) -> dict[str, Any]:
        return {"backend": "vllm", "endpoints": [url], "api_key_env": "TEAM_KEY", **more}

    for url in ("http://gpu-1:8000/v1", "http://10.0.0.5/v1", "http://localhost.evil.org/v1"):
        with pytest.raises(ConfigError, match=r"set allow_plain_http=true"):
            make_config(generator=generator(url))
        allowed = make_config(generator=generator(url, allow_plain_http=True))
        keyless = make_config(generator={**generator(url), "api_key_env": None})
        assert allowed.section_hash("synth") == keyless.section_hash("synth")
    for url in (
        "https://gpu-1/v1",
        "http://localhost/v1",
        "http://127.0.3.1/v1",
        "http://[::1]/v1",
    ):
        make_config(generator=generator(url))
