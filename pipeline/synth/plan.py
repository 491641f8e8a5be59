"""What synth would do, from the prompts themselves: no torch, no tokenizer, no presidio, nothing written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.records import Plan, Prompt
from pipeline.store.shards import ENTRY, SHARDS
from pipeline.store.stage_run import find_manifest, stage_location
from pipeline.synth.select import select_prompts, synth_section

_CHARACTERS_PER_TOKEN = 4.0  # of English text, in today's vocabularies
_TEMPLATE_TOKENS = 30  # that a chat template adds for system prompt and role markers
_REPLY_SHARE = 0.7  # of max_new_tokens that an average reply takes
_BYTES_PER_TOKEN = 5.0  # of compressed Parquet: ids and text
#: Weight bytes that one thread works through each second, a pass serving a batch of slots. Measured with
#: SmolLM2-135M in bf16 and 64 slots (150 ms a step) on two quiet cores without AMX; faster machines beat it.
_STREAM_BYTES_PER_THREAD = 0.9e9
_SCREEN_SECONDS = (
    0.004  # per text, of patterns, secrets and, where names are wanted, a small spaCy pipeline
)
_LOADING_SECONDS = 15.0
_LIBRARY_BYTES = 1200 << 20  # the interpreter with torch, transformers, presidio and spaCy


def plan(config: RunConfig) -> Plan:
    """Records, tokens, storage, time and peak memory of synth for this run. Raises as `select_prompts` does."""
    section = synth_section(config)
    selection = select_prompts(config)
    read, replies = _tokens(
        selection.prompts, section.max_turns, section.max_prompt_tokens, section.max_new_tokens
    )
    weights, basis = _weight_bytes(config)
    passes = replies / min(section.batch_size, section.shard_prompts) + len(
        selection.prompts
    )  # a pass a step of all slots, and one a prompt
    screening = 2 * len(selection.prompts) * _SCREEN_SECONDS if section.pii.enabled else 0
    rate = _STREAM_BYTES_PER_THREAD * config.run.threads
    shards = selection.shards(section.shard_prompts)
    return Plan(
        stage="synth",
        state=_state(config, len(shards)),
        records=len(selection.prompts),
        tokens=read + replies,
        storage_bytes=int((read + replies) * _BYTES_PER_TOKEN),
        seconds=_LOADING_SECONDS + screening + passes * weights / rate,
        peak_memory_bytes=_LIBRARY_BYTES + 2 * weights,
        basis=(
            f"records: {selection.loaded:,} prompts loaded, {sum(selection.rejected.values()):,} left out by the filters that need no model",
            f"tokens: {_CHARACTERS_PER_TOKEN:.0f} characters a token, replies of {_REPLY_SHARE:.0%} of max_new_tokens, no prompt too long",
            f"time: one pass over {basis} for {section.batch_size} tokens or one prompt, at {rate / 1e9:,.1f} GB/s ({config.run.threads} CPU threads)",
            "memory: libraries, recognisers and twice the target",
        ),
    )


def _tokens(
    prompts: tuple[Prompt, ...], max_turns: int, max_prompt: int, max_new: int
) -> tuple[int, int]:
    """(tokens read, tokens generated) over all prompts."""
    reply = max(1, round(max_new * _REPLY_SHARE))
    read = replies = 0
    for prompt in prompts:
        used = 0
        for turn in prompt.turns[:max_turns]:
            asked = _TEMPLATE_TOKENS + round(len(turn) / _CHARACTERS_PER_TOKEN)
            if used + asked > max_prompt and used:
                break
            used += asked + reply
            read += asked
            replies += reply
    return read, replies


def _weight_bytes(config: RunConfig) -> tuple[int, str]:
    """The target's weights as they will be computed with, from file sizes alone."""
    width = 4 if config.target.dtype == "float32" else 2
    source = config.target.source
    path = (
        _package_directory(source.removeprefix("package:"))
        if source.startswith("package:")
        else Path(source).expanduser()
    )
    if path is not None and path.exists():
        files = (
            [path] if path.is_file() else [*path.rglob("*.gguf")] or [*path.glob("*.safetensors")]
        )
        size = sum(file.stat().st_size for file in files)
        if files and files[0].suffix == ".gguf":
            return (
                int(size / 0.7 * width),
                f"{size / 0.7 / 1e6:,.0f} M parameters (a GGUF file of {size / 1e6:,.0f} MB at 0.7 bytes a parameter)",
            )
        if files:
            return size, f"{size / 1e6:,.0f} MB of weights"
    return 8_000_000_000 * width, "8 B parameters (assumed: the target is not on this disk)"


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return (
        Path(next(iter(spec.submodule_search_locations)))
        if spec and spec.submodule_search_locations
        else None
    )


def _state(config: RunConfig, expected: int) -> str:
    """What is on storage for this config."""
    manifest = find_manifest(config.run.uri, "synth")
    if manifest:
        return (
            "complete"
            if manifest.config_hash == config.section_hash("synth")
            else "complete for another config"
        )
    committed = [
        name
        for name in stage_location(config.run.uri, "synth").child(SHARDS).names()
        if name.endswith(ENTRY)
    ]
    return f"{len(committed)} of {expected} shards committed" if committed else "not started"
