"""What features would make, from the samples' manifest or from synth's plan: no torch, no sample is
read.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.config import RunConfig
from pipeline.errors import StoreError
from pipeline.planning.targets import TargetShape, aux_layers, name_to_serve, shape_of
from pipeline.records import Manifest, Plan
from pipeline.store.manifest import find_manifest, finished_state, stage_location
from pipeline.store.shards import SHARDS, committed_state
from pipeline.target.arithmetic import planned_device, target_dtype

#: Shards whose states are in memory together: computed, waiting, written, the written one's bytes.
_SHARDS_HELD = 4
#: Of a packed forward, in multiples of the hidden size, per token.
_ACTIVATIONS = 32
#: Of a sample's id, source, offsets and checksum, and of a shard's header: small beside the states.
_SAMPLE_BYTES, _HEADER_BYTES = 80, 900
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
    """What is stored: bytes a token, bytes more for a supervised one with its alternatives, and
    bytes of all shards."""

    token: float
    teacher: int
    total: int
    shards: int
    together: int  # bytes of those that lie in the run at one time


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Records, tokens, storage and memory of features for this run.

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
            peak_memory_bytes=0,
            basis=("the samples do not exist yet: run `eagle3 synth` first",),
        )
    size = _size(config, target.hidden, target.vocabulary, samples)
    shards, keep = size.shards, config.features.keep_shards
    ranks, of_what = config.plan.sharing(config.features.parallel)
    memory = _memory(config, target, samples, ranks)
    basis: tuple[str, ...] = (
        f"storage: {size.token:,.0f} bytes a token and {size.teacher:,} for each of "
        f"{_teachers(config, samples):,} supervised ones, as {config.features.encoding}",
        f"shards: about {shards:,} of {size.total / max(1, shards) / 1e6:,.1f} MB",
        f"{of_what}: {_SHARDS_HELD} shards of bf16 states and one packed forward beside the target",
    )
    if config.features.backend == "vllm":
        own = config.target.output_indices(target.layers)
        layers = layers_in_vllm(
            manifest.contract.capture_layers if manifest else own, target.layers
        )
        basis += (f"server: {serve_command(config, layers)}",)
        answer = config.synth.generator.endpoints if config.synth else ()
        if {*answer} & {*config.features.engine.endpoints}:
            basis += (
                "one visit: the servers that answer also capture; they prefill each conversation "
                f"again, {samples.tokens:,} tokens",
            )
    if keep is not None and keep < shards:
        basis += (
            f"at most {keep:,} shards at one time, of {size.total / 1e6:,.1f} MB in all: training "
            "follows, and those that it is past are deleted",
        )
    return Plan(
        stage="features",
        state=_state(config, manifest, shards) if manifest else "waiting for synth",
        records=samples.rows,
        tokens=samples.tokens,
        supervised_tokens=samples.supervised,
        storage_bytes=size.together,
        shards=shards,
        objects=_OBJECTS_PER_SHARD * shards + _OTHER_OBJECTS,
        peak_memory_bytes=sum(memory.values()),
        memory=memory,
        basis=basis,
    )


def layers_in_vllm(capture_layers: Sequence[int], count: int) -> list[int]:
    """What vLLM is asked for, low to high: it numbers what enters a layer; and the last of `count`,
    before the norm."""
    return [*(layer + 1 for layer in capture_layers), count]


def speculative_config(layers: Sequence[int]) -> dict[str, Any]:
    """What makes vLLM hand out `layers`."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*layers]}},
    }


def transfer_config(directory: str) -> dict[str, Any]:
    """What makes vLLM load our connector, which writes to `directory`."""
    return {
        "kv_connector": "StatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "pipeline.features.vllm_connector",
        "kv_connector_extra_config": {"directory": directory},
    }


def serve_command(config: RunConfig, layers: Sequence[int]) -> str:
    """The server that hands out these states."""
    settings = speculative_config(layers), transfer_config(config.features.engine.directory)
    speculative, transfer = (shlex.quote(json.dumps(each)) for each in settings)
    return (
        f"vllm serve {shlex.quote(name_to_serve(config.target))} --no-enable-prefix-caching "
        f"--speculative-config {speculative} --kv-transfer-config {transfer}"
    )


def require_space(config: RunConfig) -> None:
    """Raise StoreError when the run's disk, if local, cannot hold the states still missing."""
    location = stage_location(config.run.uri, "features")
    parent = find_manifest(config.run.uri, "synth")
    if not location.is_local or parent is None or find_manifest(config.run.uri, "features"):
        return
    contract = parent.contract
    size = _size(config, contract.hidden_size, contract.vocab_size, _Samples.of(parent))
    there = sum(location.child(SHARDS).sizes().values())
    missing = size.together - there
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
    layers = aux_layers(config)
    token_id = 2 if vocabulary <= 1 << 16 else 4
    token = layers * row + token_id + 1 / 8
    teacher = row + config.features.alternatives * (row + token_id)
    shard = _HEADER_BYTES + (2 * (layers + 1) * hidden if encoding == "int8" else 0)
    states = samples.tokens * token + _teachers(config, samples) * teacher
    shards = expected_shards(config, samples.shards)
    total = round(states + samples.rows * _SAMPLE_BYTES + shards * shard)
    keep = min(shards, config.features.keep_shards or shards)
    return _Size(token, teacher, total, shards, round(total * keep / max(1, shards)))


def _teachers(config: RunConfig, samples: _Samples) -> int:
    """Final states."""
    everything = config.features.supervise == "all"
    return samples.tokens - samples.rows if everything else samples.supervised


def _memory(
    config: RunConfig, target: TargetShape, samples: _Samples, ranks: int
) -> dict[str, int]:
    """Of one of the processes that share the target; states are bf16, whatever is stored."""
    section = config.features
    width = 4 if target_dtype(config.target) == "float32" else 2
    rows = aux_layers(config) + 1 + section.alternatives
    shard = min(samples.tokens, section.shard_tokens) * 2 * rows
    shard *= target.hidden
    forward = min(samples.tokens, section.forward_tokens(planned_device(config.target.device)))
    forward *= target.hidden * width * _ACTIVATIONS
    return {
        "weights": target.of_rank(ranks)[0] * width,
        "states held": _SHARDS_HELD * shard,
        "activations": forward,
    }


def _state(config: RunConfig, parent: Manifest, expected: int) -> str:
    """What is on storage for this config and parent."""
    location = stage_location(config.run.uri, "features")
    finished = finished_state(config, "features", parent)
    return finished or committed_state(location, f"about {expected}")
