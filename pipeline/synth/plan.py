"""What synth would do, from the prompts themselves: no torch, no tokenizer, nothing written."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import RunConfig, SynthSection
from pipeline.records import Plan, Prompt
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.store.shards import ENTRY, SHARDS
from pipeline.synth.select import select_prompts, synth_section
from pipeline.target.arithmetic import decoder_weight_bytes

_CHARACTERS_PER_TOKEN = 4.0  # of English text, in today's vocabularies
_TEMPLATE_TOKENS = 30  # that a chat template adds for system prompt and role markers
_REPLY_SHARE = 0.7  # of max_new_tokens that an average reply takes
_BYTES_PER_TOKEN = 5.0  # of compressed Parquet: ids and text
#: Weight bytes that one thread reads each second, a pass serving a batch of slots. Measured with
#: SmolLM2-135M in bf16 and 64 slots (150 ms a step) on two quiet cores without AMX; faster machines
#: beat it.
_STREAM_BYTES_PER_THREAD = 0.9e9
#: Per text, of patterns, secrets and, where names are wanted, a small spaCy pipeline.
_SCREEN_SECONDS = 0.004
_LOADING_SECONDS = 15.0
_LIBRARY_BYTES = 1200 << 20  # the interpreter with torch, transformers, presidio and spaCy


def plan(config: RunConfig) -> Plan:
    """Records, tokens, storage, time and peak memory of synth for this run.

    Raises as `select_prompts` does.
    """
    section, threads = synth_section(config), config.run.threads
    selection = select_prompts(config)
    prompts, rejected = selection.prompts, sum(selection.rejected.values())
    read, generated = _tokens(prompts, section)
    weights, basis = _weight_bytes(config)
    # A pass over the weights for each step of all slots, and one for each prompt.
    passes = generated / min(section.batch_size, section.shard_prompts) + len(prompts)
    screening = 2 * len(prompts) * _SCREEN_SECONDS if section.pii.enabled else 0
    rate = _STREAM_BYTES_PER_THREAD * threads
    return Plan(
        stage="synth",
        state=_state(config, len(selection.shards(section.shard_prompts))),
        records=len(prompts),
        tokens=read + generated,
        storage_bytes=int((read + generated) * _BYTES_PER_TOKEN),
        seconds=_LOADING_SECONDS + screening + passes * weights / rate,
        peak_memory_bytes=_LIBRARY_BYTES + 2 * weights,
        basis=(
            f"records: {selection.loaded:,} prompts loaded, {rejected:,} left out by the filters "
            "that need no model",
            f"tokens: {_CHARACTERS_PER_TOKEN:.0f} characters a token, "
            f"replies of {_REPLY_SHARE:.0%} of max_new_tokens, no prompt too long",
            f"time: one pass over {basis} for {section.batch_size} tokens or one prompt, "
            f"at {rate / 1e9:,.1f} GB/s ({threads} CPU threads)",
            "memory: libraries, recognisers and twice the target",
        ),
    )


def _tokens(prompts: Sequence[Prompt], section: SynthSection) -> tuple[int, int]:
    """(tokens read, tokens generated) over all prompts."""
    reply = max(1, round(section.max_new_tokens * _REPLY_SHARE))
    read = generated = 0
    for prompt in prompts:
        length = 0
        for turn in prompt.turns[: section.max_turns]:
            asked = _TEMPLATE_TOKENS + round(len(turn) / _CHARACTERS_PER_TOKEN)
            if length + asked > section.max_prompt_tokens and length:
                break
            length += asked + reply
            read += asked
            generated += reply
    return read, generated


def _weight_bytes(config: RunConfig) -> tuple[int, str]:
    """The target's weights as they will be computed with, from file sizes alone."""
    width = decoder_weight_bytes(config.target)
    files = _weight_files(config.target.source)
    if not files:
        return 8_000_000_000 * width, "8 B parameters (assumed: the target is not on this disk)"
    size = sum(file.stat().st_size for file in files)
    if files[0].suffix != ".gguf":
        return size, f"{size / 1e6:,.0f} MB of weights"
    parameters, gguf = size / 0.7, f"a GGUF file of {size / 1e6:,.0f} MB at 0.7 bytes a parameter"
    return int(parameters * width), f"{parameters / 1e6:,.0f} M parameters ({gguf})"


def _weight_files(source: str) -> list[Path]:
    """The GGUF file or the safetensors files of a target on this disk."""
    if source.startswith("package:"):
        path = _package_directory(source.removeprefix("package:"))
    else:
        path = Path(source).expanduser()
    if path is None or not path.exists():
        return []
    return [path] if path.is_file() else [*path.rglob("*.gguf")] or [*path.glob("*.safetensors")]


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _state(config: RunConfig, expected: int) -> str:
    """What is on storage for this config."""
    manifest = find_manifest(config.run.uri, "synth")
    if manifest:
        same = manifest.config_hash == config.section_hash("synth")
        return "complete" if same else "complete for another config"
    names = stage_location(config.run.uri, "synth").child(SHARDS).names()
    committed = sum(name.endswith(ENTRY) for name in names)
    return f"{committed} of {expected} shards committed" if committed else "not started"
