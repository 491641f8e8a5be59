"""What features would do, from the samples' manifest alone: no torch, no sample is read."""

from __future__ import annotations

import shutil
from typing import NamedTuple

from pipeline.config import RunConfig
from pipeline.errors import StoreError
from pipeline.features.packing import parts_of
from pipeline.records import Manifest, Plan
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.store.shards import ENTRY, SHARDS, read_entry
from pipeline.target.arithmetic import target_dtype

#: Sustained rate of one CPU thread in matrix products; measured with SmolLM2-135M on two cores,
#: bf16 with AVX512-BF16, fp32 with torch limited to AVX2.
_FLOPS_PER_THREAD = {"bfloat16": 150e9, "float32": 60e9, "float16": 60e9}
#: The interpreter with torch and transformers imported.
_INTERPRETER_BYTES = 700 << 20
_LOADING_SECONDS = 10.0
#: Shards whose states are in memory together: computed, waiting, written, the written one's bytes.
_SHARDS_HELD = 4
#: Of a sample's id, source, offsets and checksum, and of a shard's header: small beside the states.
_SAMPLE_BYTES, _HEADER_BYTES = 80, 900
#: Entries of committed shards that are read for the rate.
_ENTRIES_READ = 8


class _Size(NamedTuple):
    """What is stored: bytes a token, bytes more for a supervised one, and bytes of all shards."""

    token: float
    teacher: int
    total: int


def plan(config: RunConfig) -> Plan:
    """Records, tokens, storage, time and peak memory of features for this run.

    Raises StoreError when the disk cannot hold the states.
    """
    parent = find_manifest(config.run.uri, "synth")
    if parent is None:
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
    require_space(config)
    section, size = config.features, _size(config, parent)
    shards, supervised = _expected_shards(config, parent), _supervised(parent)
    hidden = parent.contract.hidden_size
    width = 4 if target_dtype(config.target) == "float32" else 2
    rate, rate_basis = _rate(config, parent)
    # States in memory are bf16, whatever is stored.
    held = min(parent.tokens, section.shard_tokens) * 8 * hidden
    forward = min(parent.tokens, section.batch_tokens) * hidden * width * 32
    weights = parent.contract.parameters * width
    basis = (
        f"storage: {size.token:,.0f} bytes a token and {size.teacher:,} for each of "
        f"{supervised:,} supervised ones, as {section.encoding}",
        f"shards: about {shards:,} of {size.total / max(1, shards) / 1e6:,.1f} MB",
        f"time: {rate_basis}, and {_LOADING_SECONDS:.0f} s to load",
        f"memory: the interpreter, the target, {_SHARDS_HELD} shards of bf16 states and one packed "
        "forward",
    )
    return Plan(
        stage="features",
        state=_state(config, parent),
        records=parent.rows,
        tokens=parent.tokens,
        storage_bytes=size.total,
        seconds=_LOADING_SECONDS + parent.tokens / rate,
        peak_memory_bytes=_INTERPRETER_BYTES + weights + _SHARDS_HELD * held + forward,
        basis=basis,
    )


def require_space(config: RunConfig) -> None:
    """Raise StoreError when the run's disk, if local, cannot hold the states still missing."""
    location = stage_location(config.run.uri, "features")
    parent = find_manifest(config.run.uri, "synth")
    if not location.is_local or parent is None or find_manifest(config.run.uri, "features"):
        return
    missing = _size(config, parent).total - sum(location.child(SHARDS).sizes().values())
    directory = location.local_path(".").absolute()
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if missing > free:
        smaller = ", set features.encoding=int8" if config.features.encoding == "bf16" else ""
        problem = f"the states need {missing / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are free"
        fix = f"free some space{smaller}, or set run.uri=… to another disk or bucket"
        raise StoreError(problem, where=location.uri, fix=fix)


def _size(config: RunConfig, parent: Manifest) -> _Size:
    """docs/states-format.md, in numbers."""
    hidden, encoding = parent.contract.hidden_size, config.features.encoding
    row = 2 * hidden if encoding == "bf16" else hidden + 1  # of one layer
    token = 3 * row + (2 if parent.contract.vocab_size <= 1 << 16 else 4) + 1 / 8
    shard = _HEADER_BYTES + (8 * hidden if encoding == "int8" else 0)
    states = parent.tokens * token + _supervised(parent) * row
    total = states + parent.rows * _SAMPLE_BYTES + _expected_shards(config, parent) * shard
    return _Size(token, row, round(total))


def _supervised(parent: Manifest) -> int:
    return int(parent.details.get("supervised_tokens", parent.tokens))


def _expected_shards(config: RunConfig, parent: Manifest) -> int:
    return len(parts_of(parent.shards, config.features.shard_tokens))


def _rate(config: RunConfig, parent: Manifest) -> tuple[float, str]:
    """Tokens a second, and what that rests on: committed shards of this run, else arithmetic."""
    folder = stage_location(config.run.uri, "features").child(SHARDS)
    entries = [read_entry(folder, name) for name in _entries(config)[:_ENTRIES_READ]]
    seconds = sum(entry.seconds for entry in entries)
    if seconds:
        rate = sum(entry.shard.tokens for entry in entries) / seconds
        return rate, f"{rate:,.0f} tokens/s as measured over {len(entries)} committed shards"
    threads = config.run.threads
    dtype = target_dtype(config.target)
    flops = _FLOPS_PER_THREAD[dtype] * threads
    speed = f"{flops / 1e9:,.0f} GFLOP/s in {dtype} ({threads} CPU threads)"
    rate = flops / (2 * parent.contract.parameters)
    return rate, f"2 FLOP a parameter and token at {speed}"


def _entries(config: RunConfig) -> list[str]:
    names = stage_location(config.run.uri, "features").child(SHARDS).names()
    return [name for name in names if name.endswith(ENTRY)]


def _state(config: RunConfig, parent: Manifest) -> str:
    """What is on storage for this config and parent."""
    manifest = find_manifest(config.run.uri, "features")
    if manifest:
        stored = (manifest.config_hash, manifest.parent_hash)
        same = stored == (config.section_hash("features"), parent.content_hash)
        return "complete" if same else "complete for another config or parent"
    committed, expected = len(_entries(config)), _expected_shards(config, parent)
    return f"{committed} of about {expected} shards committed" if committed else "not started"
