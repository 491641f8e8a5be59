"""What features would do, from the samples' manifest or from synth's plan: no torch, no sample is
read.
"""

from __future__ import annotations

import shutil
from typing import NamedTuple

from pipeline.config import RunConfig
from pipeline.errors import StoreError
from pipeline.planning.devices import (
    FORWARD_SHARE,
    Device,
    described,
    device_of,
    dtype_on,
    store_seconds,
)
from pipeline.planning.generation import DEGREES
from pipeline.planning.targets import TargetShape, shape_of
from pipeline.records import Manifest, Plan
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.store.shards import ENTRY, SHARDS, read_entry

#: Sustained rate of one CPU thread in matrix products; measured with SmolLM2-135M on two cores,
#: bf16 with AVX512-BF16, fp32 with torch limited to AVX2.
_FLOPS_PER_THREAD = {"bfloat16": 150e9, "float32": 60e9, "float16": 60e9}
#: The interpreter with torch and transformers imported.
_INTERPRETER_BYTES = 700 << 20
_LOADING_SECONDS = 10.0
#: Shards whose states are in memory together: computed, waiting, written, the written one's bytes.
_SHARDS_HELD = 4
#: Of a packed forward, in multiples of the hidden size, per token.
_ACTIVATIONS = 32
#: Of a sample's id, source, offsets and checksum, and of a shard's header: small beside the states.
_SAMPLE_BYTES, _HEADER_BYTES = 80, 900
#: Entries of committed shards that are read for the rate.
_ENTRIES_READ = 8
#: A shard's file and its entry; begin.json, audit.json and manifest.json.
_OBJECTS_PER_SHARD, _OTHER_OBJECTS = 2, 3


class _Samples(NamedTuple):
    """What synth has made, or would make."""

    rows: int
    tokens: int
    supervised: int
    shards: tuple[tuple[int, int], ...]  # (tokens, rows) of each

    @classmethod
    def of(cls, parent: Manifest) -> _Samples:
        supervised = int(parent.details.get("supervised_tokens", parent.tokens))
        shards = tuple((shard.tokens, shard.rows) for shard in parent.shards)
        return cls(parent.rows, parent.tokens, supervised, shards)

    @classmethod
    def planned(cls, parent: Plan) -> _Samples:
        """All shards alike."""
        count = max(1, parent.shards)
        each = -(-parent.tokens // count), -(-parent.records // count)
        return cls(parent.records, parent.tokens, parent.supervised_tokens, (each,) * count)


class _Size(NamedTuple):
    """What is stored: bytes a token, bytes more for a supervised one, and bytes of all shards."""

    token: float
    teacher: int
    total: int


class _CaptureRate(NamedTuple):
    """Tokens a second of all workers, what that rests on, and GPUs that hold one target."""

    tokens: float
    basis: str
    degree: int = 1


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Records, tokens, storage, time and peak memory of features for this run.

    `parent` is synth's plan, for a run whose samples do not exist yet. Raises StoreError when the
    disk cannot hold the states.
    """
    manifest = find_manifest(config.run.uri, "synth")
    if manifest:
        require_space(config)
        target, samples = shape_of(config, manifest.contract), _Samples.of(manifest)
    elif parent:
        target, samples = shape_of(config), _Samples.planned(parent)
    else:
        return Plan(
            stage="features",
            state="waiting for synth",
            records=0,
            tokens=0,
            storage_bytes=0,
            seconds=0,
            peak_memory_bytes=0,
            basis=("the samples do not exist yet: run `eagle3 synth` first",),
        )
    device = device_of(config)
    size = _size(config, target.hidden, target.vocabulary, samples)
    shards = expected_shards(config, samples.shards)
    rate = _rate(config, device, target)
    memory = _memory(config, device, target, samples, rate.degree)
    storing = store_seconds(config, size.total)
    basis = (
        f"storage: {size.token:,.0f} bytes a token and {size.teacher:,} for each of "
        f"{_teachers(config, samples):,} supervised ones, as {config.features.encoding}",
        f"shards: about {shards:,} of {size.total / max(1, shards) / 1e6:,.1f} MB",
        f"time: {rate.basis}, and {_LOADING_SECONDS:.0f} s to load",
        f"memory: {_SHARDS_HELD} shards of bf16 states and one packed forward beside the target",
    )
    return Plan(
        stage="features",
        state=_state(config, manifest, shards) if manifest else "waiting for synth",
        records=samples.rows,
        tokens=samples.tokens,
        supervised_tokens=samples.supervised,
        storage_bytes=size.total,
        shards=shards,
        objects=_OBJECTS_PER_SHARD * shards + _OTHER_OBJECTS,
        device=described(config, device),
        seconds=_LOADING_SECONDS + max(samples.tokens / rate.tokens, storing),
        peak_memory_bytes=sum(memory.values()),
        memory=memory,
        problems=_problems(config, device, memory, rate.degree),
        basis=basis,
    )


def require_space(config: RunConfig) -> None:
    """Raise StoreError when the run's disk, if local, cannot hold the states still missing."""
    location = stage_location(config.run.uri, "features")
    parent = find_manifest(config.run.uri, "synth")
    if not location.is_local or parent is None or find_manifest(config.run.uri, "features"):
        return
    contract = parent.contract
    size = _size(config, contract.hidden_size, contract.vocab_size, _Samples.of(parent))
    missing = size.total - sum(location.child(SHARDS).sizes().values())
    directory = location.local_path(".").absolute()
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if missing > free:
        smaller = ", set features.encoding=int8" if config.features.encoding == "bf16" else ""
        problem = f"the states need {missing / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are free"
        fix = f"free some space{smaller}, or set run.uri=… to another disk or bucket"
        raise StoreError(problem, where=location.uri, fix=fix)


def expected_shards(config: RunConfig, shards: tuple[tuple[int, int], ...]) -> int:
    """Of states, for synth's shards of (tokens, rows): each is cut for itself, between rows."""
    size = config.features.shard_tokens
    return sum(min(-(-tokens // size), rows) for tokens, rows in shards)


def _size(config: RunConfig, hidden: int, vocabulary: int, samples: _Samples) -> _Size:
    """docs/states-format.md, in numbers."""
    encoding = config.features.encoding
    row = 2 * hidden if encoding == "bf16" else hidden + 1  # of one layer
    token = 3 * row + (2 if vocabulary <= 1 << 16 else 4) + 1 / 8
    shard = _HEADER_BYTES + (8 * hidden if encoding == "int8" else 0)
    states = samples.tokens * token + _teachers(config, samples) * row
    shards = expected_shards(config, samples.shards)
    return _Size(token, row, round(states + samples.rows * _SAMPLE_BYTES + shards * shard))


def _teachers(config: RunConfig, samples: _Samples) -> int:
    """Final states."""
    everything = config.features.supervise == "all"
    return samples.tokens - samples.rows if everything else samples.supervised


def _memory(
    config: RunConfig, device: Device, target: TargetShape, samples: _Samples, degree: int
) -> dict[str, int]:
    """Of one GPU of `degree` that hold a target, or of the process; states are bf16, whatever is
    stored.
    """
    section = config.features
    width = 4 if dtype_on(config, config.target.dtype, device) == "float32" else 2
    held = min(samples.tokens, section.shard_tokens) * 8 * target.hidden
    forward = min(samples.tokens, section.batch_tokens) * target.hidden * width * _ACTIVATIONS
    own = {} if device.is_cuda else {"interpreter": _INTERPRETER_BYTES}
    return {
        **own,
        "weights": target.parameters * width // degree,
        "states held": _SHARDS_HELD * held,
        "activations": forward,
    }


def _rate(config: RunConfig, device: Device, target: TargetShape) -> _CaptureRate:
    """Committed shards of this run, unless the plan is for another device; else arithmetic."""
    if config.plan.device == "auto" and (measured := _measured(config)):
        return measured
    dtype, workers = dtype_on(config, config.target.dtype, device), config.plan.workers
    if device.is_cuda:
        degree = _degree(config, device, target)
        flops = device.flops(dtype) * FORWARD_SHARE * degree * max(1, workers // degree)
        each = f"{FORWARD_SHARE:.0%} of the data sheet's {device.flops(dtype) / 1e12:,.0f} TFLOP/s"
        speed = f"{each} in {dtype}, {degree} GPUs a target"
    else:
        degree, flops = 1, _FLOPS_PER_THREAD[dtype] * config.run.threads * workers
        speed = f"{flops / 1e9:,.0f} GFLOP/s in {dtype} ({described(config, device)})"
    basis = f"2 FLOP a parameter and token at {speed}"
    return _CaptureRate(flops / (2 * target.active_parameters), basis, degree)


def _measured(config: RunConfig) -> _CaptureRate | None:
    folder = stage_location(config.run.uri, "features").child(SHARDS)
    entries = [read_entry(folder, name) for name in _entries(config)[:_ENTRIES_READ]]
    seconds = sum(entry.seconds for entry in entries)
    if not seconds:
        return None
    rate = sum(entry.shard.tokens for entry in entries) / seconds
    basis = f"{rate:,.0f} tokens/s as measured over {len(entries)} committed shards"
    return _CaptureRate(rate * config.plan.workers, basis)


def _degree(config: RunConfig, device: Device, target: TargetShape) -> int:
    """GPUs that hold one target: as asked, else the fewest that fit, else the most."""
    if config.plan.tensor_parallel:
        return config.plan.tensor_parallel
    full = _Samples(0, config.features.shard_tokens, 0, ())
    fits = (
        degree
        for degree in DEGREES
        if device.holds(sum(_memory(config, device, target, full, degree).values()))
    )
    return next(fits, DEGREES[-1])


def _problems(
    config: RunConfig, device: Device, memory: dict[str, int], degree: int
) -> tuple[str, ...]:
    problems, needed = [], sum(memory.values())
    if degree > config.plan.workers:
        problems.append(f"a copy of the target needs {degree} GPUs")
    if not device.holds(needed):
        mend = "lower features.shard_tokens or features.batch_tokens"
        problems.append(f"does not fit: {device.share_of(needed)}; {mend}")
    return tuple(problems)


def _entries(config: RunConfig) -> list[str]:
    names = stage_location(config.run.uri, "features").child(SHARDS).names()
    return [name for name in names if name.endswith(ENTRY)]


def _state(config: RunConfig, parent: Manifest, expected: int) -> str:
    """What is on storage for this config and parent."""
    manifest = find_manifest(config.run.uri, "features")
    if manifest:
        stored = (manifest.config_hash, manifest.parent_hash)
        same = stored == (config.section_hash("features"), parent.content_hash)
        return "complete" if same else "complete for another config or parent"
    committed = len(_entries(config))
    return f"{committed} of about {expected} shards committed" if committed else "not started"
