"""What features would do, from the samples' manifest alone: no torch, no sample is read."""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.records import Manifest, Plan
from pipeline.store.shards import ENTRY, SHARDS
from pipeline.store.stage import find_manifest, stage_location

#: Sustained rate of one CPU thread in bf16 matrix products; measured with SmolLM2-135M on two cores with AVX-512 bf16.
_FLOPS_PER_THREAD = 150e9
#: The interpreter with torch and transformers imported.
_INTERPRETER_BYTES = 700 << 20
_LOADING_SECONDS = 10.0


def plan(config: RunConfig) -> Plan:
    """Records, tokens, storage, time and peak memory of features for this run."""
    parent = find_manifest(config.run.uri, "synth")
    if parent is None:
        nothing = ("the samples do not exist yet: run `eagle3 synth` first",)
        return Plan(stage="features", state="waiting for synth", records=0, tokens=0, storage_bytes=0, seconds=0, peak_memory_bytes=0, basis=nothing)
    hidden, tokens = parent.contract.hidden_size, parent.tokens
    supervised = int(parent.details.get("supervised_tokens", tokens))
    token_bytes = 5 + 6 * hidden
    teacher_bytes = 4 + 2 * hidden
    width = 4 if config.target.dtype == "float32" else 2
    weights = parent.contract.parameters * width
    shard = min(tokens, config.features.shard_tokens) * (token_bytes + teacher_bytes)
    forward = min(tokens, config.features.batch_tokens) * hidden * width * 32
    rate = _FLOPS_PER_THREAD * config.run.threads
    return Plan(
        stage="features",
        state=_state(config, parent),
        records=parent.rows,
        tokens=tokens,
        storage_bytes=tokens * token_bytes + supervised * teacher_bytes,
        seconds=_LOADING_SECONDS + 2 * parent.contract.parameters * tokens / rate,
        peak_memory_bytes=_INTERPRETER_BYTES + weights + 3 * shard + forward,
        basis=(
            f"storage: {token_bytes:,} bytes a token and {teacher_bytes:,} for each of {supervised:,} supervised ones",
            f"time: 2 FLOP a parameter and token at {rate / 1e9:,.0f} GFLOP/s ({config.run.threads} CPU threads), and {_LOADING_SECONDS:.0f} s to load",
            "memory: the interpreter, the target, three copies of one shard and one packed forward",
        ),
    )


def _state(config: RunConfig, parent: Manifest) -> str:
    """What is on storage for this config and parent."""
    manifest = find_manifest(config.run.uri, "features")
    if manifest:
        same = (manifest.config_hash, manifest.parent_hash) == (config.section_hash("features"), parent.content_hash)
        return "complete" if same else "complete for another config or parent"
    expected = max(1, -(-parent.tokens // config.features.shard_tokens))
    committed = [name for name in stage_location(config.run.uri, "features").child(SHARDS).names() if name.endswith(ENTRY)]
    return f"{len(committed)} of about {expected} shards committed" if committed else "not started"
