"""What synth would make, from the prompts or an assumed number of them: no torch, no tokenizer,
nothing fetched, nothing written.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig, SynthSection
from pipeline.console import readable_bytes
from pipeline.errors import ConfigError
from pipeline.planning.targets import shape_of
from pipeline.records import Plan
from pipeline.store.manifest import finished_state, stage_location
from pipeline.store.shards import committed_state
from pipeline.synth.select import find_selection, prompt_counts, synth_section
from pipeline.target.arithmetic import decoder_weight_bytes, planned_device

_CHARACTERS_PER_TOKEN = 4.0  # of English text, in today's vocabularies
_TEMPLATE_TOKENS = 30  # that a chat template adds for system prompt and role markers
_REPLY_SHARE = 0.7  # of max_new_tokens that an average reply takes
_BYTES_PER_TOKEN = 5.0  # of compressed Parquet: ids and text
#: A shard's file and its entry; begin, selection and manifest, datasheet.md and audit.json.
_OBJECTS_PER_SHARD, _OTHER_OBJECTS = 2, 5


class _PromptCounts(NamedTuple):
    """The prompts of a run, and what they become."""

    prompts: int
    replies: int
    read: int  # tokens of prompts
    generated: int  # tokens of replies
    basis: tuple[str, str]  # of the number, of the tokens

    @property
    def tokens(self) -> int:
        return self.read + self.generated


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Records, tokens, storage and memory of synth for this run; it has no parent.

    Raises as `select` does, and ConfigError where the prompts can be neither read nor assumed.
    """
    section, counts, target = synth_section(config), _prompt_counts(config), shape_of(config)
    shards = -(-counts.prompts // section.shard_prompts)
    local = section.generator.backend == "local"
    device = planned_device(config.target.device)
    requests = section.slots(device) if local else section.generator.concurrency
    advice = "on a GPU servers of the target answer faster: synth.generator.backend=vllm or sglang"
    tokens = section.max_prompt_tokens + section.max_new_tokens
    ranks, of_what = config.plan.sharing(section.parallel)
    parameters, key_value_bytes = target.of_rank(ranks)
    weights = parameters * decoder_weight_bytes(config.target)
    key_values = requests * tokens * key_value_bytes
    memory = {"weights": weights, "keys and values": key_values} if local else {}
    return Plan(
        stage="synth",
        state=_state(config, shards),
        records=counts.prompts,
        tokens=counts.tokens,
        supervised_tokens=counts.generated,
        storage_bytes=int(counts.tokens * _BYTES_PER_TOKEN),
        shards=shards,
        objects=_OBJECTS_PER_SHARD * shards + _OTHER_OBJECTS,
        peak_memory_bytes=sum(memory.values()),
        memory=memory,
        basis=(
            *counts.basis,
            f"target: {target.parameters:,} parameters; {target.origin}",
            f"{of_what if local else 'memory of all servers'}: {readable_bytes(weights)} a copy of "
            f"the target, {readable_bytes(key_values)} for {requests:,} requests of {tokens:,} "
            "tokens",
            f"storage: {_BYTES_PER_TOKEN:.0f} bytes a token of compressed Parquet",
            *((advice,) if local and device == "cuda" else ()),
        ),
    )


def _prompt_counts(config: RunConfig) -> _PromptCounts:
    """From the selection, or by reading the sources where they are on this disk."""
    section = synth_section(config)
    selected = find_selection(stage_location(config.run.uri, "synth"))
    specs = (*section.sources, *section.excluded_sources)
    fetched = any(spec.source.startswith("hub:") for spec in specs)
    if not selected and (config.plan.prompts or fetched):
        return _assumed_counts(config, section)
    counts = prompt_counts(config)
    read = counts.total_turns * _TEMPLATE_TOKENS + round(counts.characters / _CHARACTERS_PER_TOKEN)
    return _PromptCounts(
        counts.prompts,
        counts.total_turns,
        read,
        counts.total_turns * _reply_tokens(section),
        (
            counts.basis,
            f"tokens: {_CHARACTERS_PER_TOKEN:.0f} characters a token, "
            f"replies of {_REPLY_SHARE:.0%} of max_new_tokens, no prompt too long",
        ),
    )


def _assumed_counts(config: RunConfig, section: SynthSection) -> _PromptCounts:
    """One turn each, and none left out."""
    limits = [spec.limit or spec.read_at_most for spec in section.sources]
    bounded = sum(limit or 0 for limit in limits) if all(limits) else None
    assumed = [config.plan.prompts or bounded, section.max_prompts]
    known = [count for count in assumed if count]
    if not known:
        problem = "has sources that cannot be counted without fetching them"
        fix = "set synth.max_prompts, plan.prompts, or a limit for each source"
        raise ConfigError(problem, where="synth.sources", fix=fix)
    drawn, length = min(known), config.plan.prompt_tokens
    prompts, of_drawn = max(1, round(drawn * section.share)), ""
    if section.share < 1:
        of_drawn = f" ({section.share:.4g} of {drawn:,}, synth.share)"
    prompt_tokens = min(length + _TEMPLATE_TOKENS, section.max_prompt_tokens)
    return _PromptCounts(
        prompts,
        prompts,
        prompts * prompt_tokens,
        prompts * _reply_tokens(section),
        (
            f"records: {prompts:,} prompts assumed{of_drawn}, none left out by filters; "
            "none was read",
            f"tokens: prompts of {length:,} tokens (plan.prompt_tokens), one turn, "
            f"replies of {_REPLY_SHARE:.0%} of max_new_tokens",
        ),
    )


def _reply_tokens(section: SynthSection) -> int:
    return max(1, round(section.max_new_tokens * _REPLY_SHARE))


def _state(config: RunConfig, expected: int) -> str:
    """What is on storage for this config."""
    location = stage_location(config.run.uri, "synth")
    return finished_state(config, "synth") or committed_state(location, f"{expected}")
