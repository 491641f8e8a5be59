"""What synth would do, from the prompts or an assumed number of them: no torch, no tokenizer,
nothing fetched, nothing written.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config import RunConfig, SynthSection
from pipeline.errors import ConfigError
from pipeline.planning.devices import Device, described, device_of, dtype_on
from pipeline.planning.generation import (
    DEGREES,
    Replicas,
    generating_replicas,
    generation_seconds,
)
from pipeline.planning.targets import TargetShape, shape_of
from pipeline.records import Plan
from pipeline.store.manifest import find_manifest, stage_location
from pipeline.store.shards import ENTRY, SHARDS
from pipeline.synth.select import find_selection, prompt_counts, synth_section
from pipeline.target.arithmetic import decoder_weight_bytes

_CHARACTERS_PER_TOKEN = 4.0  # of English text, in today's vocabularies
_TEMPLATE_TOKENS = 30  # that a chat template adds for system prompt and role markers
_REPLY_SHARE = 0.7  # of max_new_tokens that an average reply takes
_BYTES_PER_TOKEN = 5.0  # of compressed Parquet: ids and text
#: Weight bytes that one thread reads each second, a pass serving a batch of slots. Measured with
#: SmolLM2-135M in bf16 and 64 slots (150 ms a step) on two quiet cores without AMX; faster machines
#: beat it.
_STREAM_BYTES_PER_THREAD = 0.9e9
#: Of a server's request, where neither a data sheet nor a measurement says it.
_REQUEST_TOKENS_PER_SECOND = 30.0
#: Per text, of patterns, secrets and, where names are wanted, a small spaCy pipeline.
_SCREEN_SECONDS = 0.004
_LOADING_SECONDS = 15.0
_LIBRARY_BYTES = 1200 << 20  # the interpreter with torch, transformers, presidio and spaCy
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

    def shards(self, size: int) -> int:
        return -(-self.prompts // size)

    @property
    def context(self) -> float:
        """Tokens that a generated one attends to on average, in the middle of its conversation."""
        return (self.read + self.generated / 2) / self.prompts


class _Generation(NamedTuple):
    """How long replies take, and what that takes."""

    seconds: float
    memory: dict[str, int]  # of a GPU, or of the process
    time: str  # what the seconds rest on
    screened_by: int  # processes that screen texts
    problems: tuple[str, ...] = ()


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Records, tokens, storage, time and peak memory of synth for this run; it has no parent.

    Raises as `select` does, and ConfigError where the prompts can be neither read nor
    assumed.
    """
    section, device = synth_section(config), device_of(config)
    counts, target = _prompt_counts(config), shape_of(config)
    generation = _generation(config, device, target, counts)
    texts = 2 * counts.prompts if section.pii.enabled else 0
    screening = texts * _SCREEN_SECONDS / generation.screened_by
    shards = counts.shards(section.shard_prompts)
    return Plan(
        stage="synth",
        state=_state(config, shards),
        records=counts.prompts,
        tokens=counts.tokens,
        supervised_tokens=counts.generated,
        storage_bytes=int(counts.tokens * _BYTES_PER_TOKEN),
        shards=shards,
        objects=_OBJECTS_PER_SHARD * shards + _OTHER_OBJECTS,
        device=described(config, device),
        seconds=_LOADING_SECONDS + screening + generation.seconds,
        peak_memory_bytes=sum(generation.memory.values()),
        memory=generation.memory,
        problems=generation.problems,
        basis=(
            *counts.basis,
            f"target: {target.parameters:,} parameters; {target.origin}",
            f"time: {generation.time}",
            f"storage: {_BYTES_PER_TOKEN:.0f} bytes a token of compressed Parquet",
        ),
    )


def _prompt_counts(config: RunConfig) -> _PromptCounts:
    """From the selection, or by reading the sources where they are on this disk."""
    section = synth_section(config)
    selected = find_selection(stage_location(config.run.uri, "synth"))
    specs = (*section.sources, *section.exclude)
    fetched = any(spec.source.startswith("hub:") for spec in specs)
    if not selected and (config.plan.prompts or fetched):
        return _assumed_counts(config, section)
    counts = prompt_counts(config)
    read = counts.asked * _TEMPLATE_TOKENS + round(counts.characters / _CHARACTERS_PER_TOKEN)
    return _PromptCounts(
        counts.prompts,
        counts.asked,
        read,
        counts.asked * _reply_tokens(section),
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
    prompts, length = min(known), config.plan.prompt_tokens
    asked = min(length + _TEMPLATE_TOKENS, section.max_prompt_tokens)
    return _PromptCounts(
        prompts,
        prompts,
        prompts * asked,
        prompts * _reply_tokens(section),
        (
            f"records: {prompts:,} prompts assumed, none left out by filters; none was read",
            f"tokens: prompts of {length:,} tokens (plan.prompt_tokens), one turn, "
            f"replies of {_REPLY_SHARE:.0%} of max_new_tokens",
        ),
    )


def _reply_tokens(section: SynthSection) -> int:
    return max(1, round(section.max_new_tokens * _REPLY_SHARE))


def _generation(
    config: RunConfig, device: Device, target: TargetShape, counts: _PromptCounts
) -> _Generation:
    generator = synth_section(config).generator
    remote, measured = generator.backend != "local", config.plan.server_tokens_per_second
    if remote and (measured or not device.is_cuda):
        return _by_servers(config, counts)
    return (_on_gpus if device.is_cuda else _on_cpu)(config, device, target, counts)


def _on_cpu(
    config: RunConfig, device: Device, target: TargetShape, counts: _PromptCounts
) -> _Generation:
    """A pass over the weights for each step of all slots, and one for each reply's prompt."""
    section, threads, workers = synth_section(config), config.run.threads, config.plan.workers
    weights = target.parameters * decoder_weight_bytes(config.target)
    slots = min(section.batch_size, section.shard_prompts)
    passes = counts.generated / slots + counts.replies
    rate = _STREAM_BYTES_PER_THREAD * threads
    return _Generation(
        passes * weights / rate / workers,
        {"libraries and recognisers": _LIBRARY_BYTES, "weights, twice": 2 * weights},
        f"one pass over {weights / 1e6:,.0f} MB of weights for {slots} tokens or one prompt, "
        f"at {rate / 1e9:,.1f} GB/s ({described(config, device)})",
        workers,
    )


def _by_servers(config: RunConfig, counts: _PromptCounts) -> _Generation:
    """At the rate that was measured or is assumed of them; what they hold is theirs to know."""
    generator, measured = synth_section(config).generator, config.plan.server_tokens_per_second
    servers, requests = len(generator.endpoints), generator.concurrency
    rate = measured * servers if measured else _REQUEST_TOKENS_PER_SECOND * requests
    if measured:
        time = f"{servers} endpoints of {measured:,.0f} tokens/s (plan.server_tokens_per_second)"
    else:
        each = f"{_REQUEST_TOKENS_PER_SECOND:.0f} tokens/s each, assumed"
        time = f"{requests} requests under way over {servers} endpoints, {each}"
    memory = {"libraries and recognisers": _LIBRARY_BYTES}
    return _Generation(counts.generated / rate, memory, time, servers)


def _on_gpus(
    config: RunConfig, device: Device, target: TargetShape, counts: _PromptCounts
) -> _Generation:
    """Servers on the plan's workers, or the bundled decoder, whose target lies on one GPU."""
    section, dtype = synth_section(config), dtype_on(config, config.target.dtype, device)
    local, asked = section.generator.backend == "local", config.plan.tensor_parallel
    width = 4 if dtype == "float32" else 2
    replicas = generating_replicas(
        target,
        device,
        config.plan.workers,
        concurrency=None if local else section.generator.concurrency,
        slots=section.batch_size,
        longest=section.max_prompt_tokens + section.max_new_tokens,
        width=width,
        degrees=(1,) if local else (asked,) if asked else DEGREES,
    )
    seconds = generation_seconds(
        target,
        device,
        replicas,
        read=counts.read,
        generated=counts.generated,
        context=counts.context,
        width=width,
        dtype=dtype,
    )
    kind = "bundled decoders" if local else "servers"
    rate = counts.generated / seconds / replicas.count
    time = (
        f"{replicas.count:,} {kind} on {replicas.degree} GPUs each, {replicas.slots:,} requests "
        f"side by side, {rate:,.0f} tokens/s each, by the data sheet of {device.label}"
    )
    problems = _problems(config, device, replicas, local=local)
    return _Generation(seconds, replicas.memory, time, replicas.count, problems)


def _problems(
    config: RunConfig, device: Device, replicas: Replicas, *, local: bool
) -> tuple[str, ...]:
    problems = []
    if replicas.degree > config.plan.workers:
        problems.append(f"a copy of the target needs {replicas.degree} GPUs")
    if not device.holds(replicas.bytes):
        mend = (
            "lower synth.batch_size, or set synth.generator to servers on several GPUs each"
            if local
            else "lower synth.generator.concurrency, or raise plan.tensor_parallel"
        )
        has = device.share_of(replicas.bytes)
        problems.append(f"target and {replicas.slots:,} requests do not fit: {has}; {mend}")
    return tuple(problems)


def _state(config: RunConfig, expected: int) -> str:
    """What is on storage for this config."""
    manifest = find_manifest(config.run.uri, "synth")
    if manifest:
        same = manifest.config_hash == config.section_hash("synth")
        return "complete" if same else "complete for another config"
    names = stage_location(config.run.uri, "synth").child(SHARDS).names()
    committed = sum(name.endswith(ENTRY) for name in names)
    return f"{committed} of {expected} shards committed" if committed else "not started"
