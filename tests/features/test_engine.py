"""States from an engine: what transformers computes is the referee, with faults planted in it.

The engine here writes what vLLM writes, for a target that transformers runs; tests/engines has a
real vLLM.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.config import (
    EngineSection,
    FeaturesSection,
    GeneratorSection,
    RunConfig,
    RunSection,
    TargetSection,
    run,
)
from pipeline.errors import DataError, EndpointError, EndpointsUnavailable
from pipeline.features.capture import LocalStates, capture_shard
from pipeline.features.engine import (
    EngineStates,
    Servers,
    _remove_those_of_dead_processes,
    asked_layers,
)
from pipeline.features.plan import plan
from pipeline.planning.targets import name_to_serve
from pipeline.records import Plan, Sample
from pipeline.target.forward import capture_alone, layer_outputs, register_packed_attention
from pipeline.target.open import Target, open_target
from tests.features.conftest import finish_synth
from tests.lying_server import LyingServer, reply
from tests.target.families import save_family

Fault = Callable[[Tensor], Tensor]


class Written:
    """A `Transport`: states [T, L + 1, H] of transformers, changed by a fault."""

    def __init__(self, target: Target, directory: Path, fault: Fault | None = None) -> None:
        self._target = target.load(attention=register_packed_attention())
        self._layers, self.directory = asked_layers(target), directory
        self._fault: Fault = fault or (lambda states: states)
        self.facts = {"layers": ",".join(map(str, self._layers)), "server": "vllm 0"}
        self.ids: Callable[[list[int]], list[int]] = lambda ids: ids

    def ask(self, documents: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        for document, name in zip(documents, names, strict=True):
            outputs, _ = layer_outputs(self._target, document)  # [layers, T, H]
            states = outputs[[layer - 1 for layer in self._layers]].transpose(0, 1)
            tensors = {
                "states": self._fault(states.clone()).contiguous(),
                "token_ids": torch.tensor(self.ids(list(document)), dtype=torch.int32),
            }
            save_file(tensors, self.directory / f"{name}.safetensors", metadata=self.facts)


def opened(directory: Path) -> Target:
    return open_target(
        TargetSection(
            source=str(directory), device="cpu", dtype="float32", capture_layers=(1, 3, 5)
        )
    )


def captured(source: Any, samples: list[Sample]) -> Any:
    section = FeaturesSection(batch_tokens=64, backend="vllm")
    return capture_shard(source, samples, section, lambda tokens: None, name="a").states


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere", "qwen3_moe"])
def test_an_engines_states_are_those_of_local_capture(
    family: str, tmp_path: Path, tiny_target: Path, samples: list[Sample]
) -> None:
    """Layers by our index, the last one normed by the family's own norm; no file is left."""
    target = opened(save_family(family, tmp_path / family, tiny_target))
    directory = tmp_path / "states"
    directory.mkdir()
    engine = captured(EngineStates(target, Written(target, directory)), samples)
    local = captured(LocalStates(target.load(attention=register_packed_attention())), samples)
    for mine, theirs in zip(engine, local, strict=True):
        assert torch.equal(mine.final_positions, theirs.final_positions)
        for name in ("aux_states", "final_states"):
            a, b = getattr(mine, name).float(), getattr(theirs, name).float()
            assert float((a - b).norm() / b.norm()) < 0.01  # both are stored in bf16
    assert not list(directory.iterdir())


@pytest.mark.parametrize("family", ["qwen3_next", "stablelm"])
def test_what_cannot_be_packed_is_captured_by_an_engine_alone(
    family: str, tmp_path: Path, tiny_target: Path, samples: list[Sample]
) -> None:
    """A hybrid would see the document before in a packed forward. The engine's states are compared
    with transformers' own all the same."""
    target = opened(save_family(family, tmp_path / "target", tiny_target))
    own = target.load()
    for mine, sample in zip(
        captured(EngineStates(target, Written(target, tmp_path)), samples), samples, strict=True
    ):
        aux, _ = capture_alone(own, sample.token_ids)
        assert float((mine.aux_states.float() - aux).norm() / aux.norm()) < 0.01
    engine = Written(target, tmp_path)
    engine._layers[1] += 1
    with pytest.raises(DataError, match=r"output 3 is .* of layer 4"):
        captured(EngineStates(target, engine), samples)


def _moved(by: int, *, dim: int) -> Fault:
    return lambda states: states.roll(by, dim)


def _without(part: Any) -> Fault:
    def fault(states: Tensor) -> Tensor:
        states[part] = 0
        return states

    return fault


FAULTS: dict[str, tuple[Fault, str]] = {
    "states of the token before": (_moved(1, dim=0), "of token|output 1 is"),
    "states of the token behind": (_moved(-1, dim=0), "of token|output 1 is"),
    "layers in another order": (_moved(1, dim=1), "output 1 is .* of layer 7"),
    "the first tokens missing": (_without(slice(2)), "of token [01] of"),
    "the last token missing": (_without(-1), "of token"),
    "the final state alone of another token": (
        lambda states: torch.cat([states[:, :-1], states[:, -1:].roll(1, 0)], dim=1),
        "final state of token",
    ),
    "one rank's share": (_without((slice(None), slice(None), slice(8, None))), "of token|output"),
    "twice as large": (lambda states: 2 * states, "of token|output"),
    "a final state that is normed already": (
        lambda states: torch.cat([states[:, :-1], states[:, -1:] * 0 + 1], dim=1),
        "final state of token",
    ),
    "a token too few": (lambda states: states[:-1], "gives states of shape"),
    "a layer too few": (lambda states: states[:, :-1], "gives states of shape"),
    "not a number": (lambda states: states * torch.nan, "NaN|of token|output"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_other_states_are_refused(
    name: str, tmp_path: Path, tiny_target: Path, samples: list[Sample]
) -> None:
    fault, words = FAULTS[name]
    target = opened(tiny_target)
    with pytest.raises((DataError, EndpointError), match=words):
        captured(EngineStates(target, Written(target, tmp_path, fault)), samples)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("by", [-1, 1])
def test_a_single_layer_beside_its_own_is_named(
    number: int, by: int, tmp_path: Path, tiny_target: Path, samples: list[Sample]
) -> None:
    """Whatever the file says of it."""
    target = opened(tiny_target)
    engine = Written(target, tmp_path)
    engine._layers[number] += by
    layer = (1, 3, 5)[number]
    with pytest.raises(DataError, match=f"output {layer} is .* of layer {layer + by}"):
        captured(EngineStates(target, engine), samples)


def test_what_the_file_says_of_itself_is_held_against_the_request(
    tmp_path: Path, tiny_target: Path
) -> None:
    target = opened(tiny_target)
    engine = Written(target, tmp_path)
    engine.facts = {**engine.facts, "layers": "1,3,5,8"}
    with pytest.raises(EndpointError, match=r"layers 1,3,5,8, and .* needs 2,4,6,8"):
        EngineStates(target, engine)
    engine = Written(target, tmp_path)
    engine.ids = lambda ids: [*ids[1:], 0]
    with pytest.raises(EndpointError, match="other token ids"):
        EngineStates(target, engine)


def test_a_target_too_large_is_compared_by_its_first_layers(
    tmp_path: Path,
    tiny_target: Path,
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All layers one off are seen by the lowest."""
    monkeypatch.setattr("pipeline.features.engine.free_bytes", lambda device: 1)
    target = opened(tiny_target)
    captured(EngineStates(target, Written(target, tmp_path)), samples)
    assert "the first 3 layers are held against" in "".join(capsys.readouterr())
    engine = Written(target, tmp_path)
    engine._layers[:3] = [layer + 1 for layer in engine._layers[:3]]
    with pytest.raises(DataError, match=r"output 1 is .* of layer 2"):
        captured(EngineStates(target, engine), samples)


def _servers(url: str, directory: Path, **fields: Any) -> Servers:
    return Servers(
        EngineSection(endpoints=(f"{url}/v1",), directory=str(directory), model="m", **fields)
    )


def test_servers_that_are_busy_are_asked_again(tmp_path: Path) -> None:
    busy = iter([True, True])

    def answer(path: str, body: Any) -> Iterable[bytes | float]:
        assert path == "/v1/completions" and body["prompt"] == [1, 2] and body["max_tokens"] == 1
        if next(busy, False):
            yield reply(b"{}", "503 Service Unavailable")
            return
        name = body["kv_transfer_params"]["eagle3_states"]
        assert re.fullmatch("[0-9a-f]{32}", name)
        yield reply(json.dumps({"kv_transfer_params": {"eagle3_states": name}}).encode())
        (tmp_path / f"{name}.safetensors").touch()

    with LyingServer(answer) as server:
        _servers(server.url, tmp_path).ask([[1, 2]], ["0" * 32])
        assert server.requests == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(b'{"choices": []}'), "does not run with our connector"),
        (reply(b'{"kv_transfer_params": {"eagle3_states": "x"}}'), "does not run with"),
        (reply(b'{"error": "too long"}', "400 Bad Request"), 'HTTP 400: {"error": "too long"}'),
    ],
)
def test_servers_without_states_are_named(tmp_path: Path, answer: bytes, words: str) -> None:
    with (
        LyingServer(lambda path, body: [answer]) as server,
        pytest.raises(EndpointError, match=words) as raised,
    ):
        _servers(server.url, tmp_path).ask([[1]], ["0" * 32])
    assert raised.value.exit_code == 2


def test_a_refusal_that_quotes_the_key_is_shown_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret-of-ours")
    refusal = reply(b"no such key: secret-of-ours", "401 Unauthorized")
    with (
        LyingServer(lambda path, body: [refusal]) as server,
        pytest.raises(EndpointError, match="HTTP 401: no such key: …") as raised,
    ):
        _servers(server.url, tmp_path, api_key_env="SERVER_KEY").ask([[1]], ["0" * 32])
    assert "secret" not in str(raised.value)


def test_servers_that_are_gone_are_waited_for(tmp_path: Path) -> None:
    with LyingServer(lambda path, body: []) as server:
        url = server.url
    with pytest.raises(EndpointsUnavailable, match=r"no server has given states for 0.2 s"):
        _servers(url, tmp_path, outage_seconds=0.2).ask([[1]], ["0" * 32])


def test_states_that_do_not_come_name_the_directory(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.features.engine._WRITING_SECONDS", 0.1)
    with (
        LyingServer(lambda path, body: [reply(json.dumps(body).encode())]) as server,
        pytest.raises(EndpointError, match="give both the same directory"),
    ):
        EngineStates(opened(tiny_target), _servers(server.url, tmp_path))


def test_settings_that_exclude_each_other(make_config: Callable[..., RunConfig]) -> None:
    make = partial(make_config, "runs/x")
    with pytest.raises(Exception, match="engine is set, but backend is local"):
        make(engine={"concurrency": 3})
    with pytest.raises(Exception, match="place the target in our own processes"):
        make(backend="vllm", device_map="auto")
    assert make().section_hash("features") != make(backend="vllm").section_hash("features")
    served = make(backend="vllm", engine={"concurrency": 3})
    assert served.section_hash("features") == make(backend="vllm").section_hash("features")


def test_a_plan_names_one_visit_before_there_are_samples(
    tmp_path: Path, make_config: Callable[..., RunConfig]
) -> None:
    """The server has to be there before synth, and its command before that."""
    endpoints = ["http://127.0.0.1:8000/v1"]
    config = make_config(tmp_path, backend="vllm", engine={"endpoints": endpoints})
    parent = Plan(
        stage="synth", state="", records=10, tokens=500, shards=1, storage_bytes=0,
        peak_memory_bytes=0, basis=(), supervised_tokens=200,
    )  # fmt: skip
    lines = plan(config, parent).basis
    assert any(line.startswith("server: vllm serve ") for line in lines)
    assert not any("one visit" in line for line in lines)
    generator = GeneratorSection.model_validate({"backend": "vllm", "endpoints": endpoints})
    synth = config.synth.model_copy(update={"generator": generator})  # type: ignore[union-attr]
    (line,) = (
        each
        for each in plan(config.model_copy(update={"synth": synth}), parent).basis
        if each.startswith("one visit: ")
    )
    assert "prefill each conversation again, 500 tokens" in line


@pytest.mark.parametrize("source", ["small.Q4_1.gguf", "package:llm_small"])
def test_a_server_is_given_what_it_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Not a GGUF file, nor the name of a package: the directory into which it was converted."""
    monkeypatch.setattr(run, "_run", RunSection(cache_dir=str(tmp_path / "cache")))
    package = tmp_path / "llm_small"
    package.mkdir()
    for path in (package / "__init__.py", package / "small.Q4_1.gguf"):
        path.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    target = TargetSection(source=str(package / source) if ":" not in source else source)
    assert name_to_serve(target) == "TARGET"
    converted = tmp_path / "cache/targets/small.Q4_1-bfloat16-0"
    converted.mkdir(parents=True)
    (converted / "config.json").touch()
    assert name_to_serve(target) == str(converted)


def test_a_plan_prints_the_server(tmp_path: Path, make_config: Callable[..., RunConfig]) -> None:
    """In vLLM's numbers: one more than ours, and the last layer."""
    config = make_config(
        tmp_path,
        backend="vllm",
        engine={"directory": "/dev/shm/x"},
        target={"capture_layers": [0, 2]},
    )
    finish_synth(config)
    (line,) = (line for line in plan(config).basis if line.startswith("server: "))
    words = shlex.split(line.removeprefix("server: "))
    assert words[:3] == ["vllm", "serve", config.target.source]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    layers = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == asked_layers(open_target(config.target)) == [1, 3, 8]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"directory": "/dev/shm/x"}


def test_what_processes_have_left_elsewhere_stays(tmp_path: Path) -> None:
    """They may run: their numbers say nothing here."""
    here, there = tmp_path / "states-here", tmp_path / "states-there"
    dead, alive = 2**22 + 1, os.getpid()
    for each in (f"{here}-{dead}", f"{here}-{alive}", f"{there}-{dead}"):
        Path(each).mkdir()
    _remove_those_of_dead_processes(here)
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {f"{here.name}-{alive}", f"{there.name}-{dead}"}
