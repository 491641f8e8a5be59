"""What eval would do, from configuration and the head's manifest: no torch, nothing is decoded."""

from __future__ import annotations

from pipeline.config import EvalSection, RunConfig
from pipeline.planning.devices import BANDWIDTH_SHARE, Device, described, device_of, dtype_on
from pipeline.planning.targets import shape_of
from pipeline.records import Manifest, Plan
from pipeline.store.manifest import find_manifest
from pipeline.target.arithmetic import decoder_weight_bytes

#: Bytes a CPU thread streams per second while decoding at batch 1; measured with SmolLM2-135M in
#: bf16 on two cores.
_BYTES_PER_THREAD = 5e9
_INTERPRETER_BYTES = 700 << 20
_LOADING_SECONDS = 20.0
_REPORT_BYTES = 500 << 10
#: begin.json, manifest.json, report.json, report.html and report.md.
_OBJECTS = 5


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Prompts, tokens, time and peak memory of eval for this run, which is one process's work.

    `parent` is training's plan, for a run whose head does not exist yet; nothing depends on it.
    """
    section, uri = config.eval, config.run.uri
    config = _alone(config)
    device, head = device_of(config), find_manifest(uri, "train")
    known = head or find_manifest(uri, "features") or find_manifest(uri, "synth")
    target = shape_of(config, known.contract if known else None)
    prompts, limit = _prompts(section)
    replies = prompts * section.max_turns
    tokens = replies * section.max_new_tokens
    dtype = dtype_on(config, config.target.dtype, device)
    hf_width = 4 if dtype == "float32" else 2
    width = hf_width if device.is_cuda else decoder_weight_bytes(config.target)
    rate = _rate(config, device)
    hf_tokens = min(section.hf_prompts, prompts) * section.max_turns * section.max_new_tokens
    # Plain and speculative in the run's type, Hugging Face on some, and a batched fp32 check.
    passes = width * 2 * tokens + hf_width * 2 * hf_tokens + 4 * tokens
    own = {} if device.is_cuda else {"interpreter": _INTERPRETER_BYTES}
    memory = own | {"weights": target.parameters * (width + hf_width + 4)}
    return Plan(
        stage="eval",
        state=_state(config, head),
        records=replies,
        tokens=tokens,
        storage_bytes=_REPORT_BYTES,
        objects=_OBJECTS,
        device=described(config, device),
        seconds=_LOADING_SECONDS + target.parameters * passes / rate,
        peak_memory_bytes=sum(memory.values()),
        memory=memory,
        problems=_problems(device, sum(memory.values())),
        basis=(
            f"{prompts} prompts ({limit}), "
            f"up to {section.max_turns} turns of {section.max_new_tokens} tokens",
            f"time: plain and speculative, in {dtype} and fp32, "
            f"at {rate / 1e9:,.0f} GB/s of weights ({described(config, device)})",
            "memory: the target twice (decoder and Hugging Face) and once in fp32",
        ),
    )


def _alone(config: RunConfig) -> RunConfig:
    """Eval shares its work with nobody."""
    return config.model_copy(update={"plan": config.plan.model_copy(update={"workers": 1})})


def _rate(config: RunConfig, device: Device) -> float:
    """Bytes a second."""
    if device.is_cuda:
        return device.bandwidth * BANDWIDTH_SHARE
    return _BYTES_PER_THREAD * config.run.threads


def _problems(device: Device, needed: int) -> tuple[str, ...]:
    if device.holds(needed):
        return ()
    elsewhere = "evaluate the head with the server that will use it (`eagle3 export`)"
    return (f"the target does not fit: {device.share_of(needed)}; {elsewhere}",)


def _prompts(section: EvalSection) -> tuple[int, str]:
    """How many prompts at most, and what says so. Sources are not read for it."""
    sources = () if section.prompts else section.sources
    limits = [source.limit for source in sources if source.limit]
    bounded = sum(limits) if limits and len(limits) == len(sources) else None
    if section.max_prompts and (bounded is None or section.max_prompts < bounded):
        return section.max_prompts, "eval.max_prompts"
    return (bounded, "limits of eval.sources") if bounded else (100, "no limit set: 100 assumed")


def _state(config: RunConfig, head: Manifest | None) -> str:
    own = config.eval.drafter.needs_head and not config.eval.head  # the run's own head
    if own and head is None:
        return "waiting for train"
    manifest = find_manifest(config.run.uri, "eval")
    if manifest is None:
        return "not started"
    parent = head.content_hash if own and head else None
    same = (manifest.config_hash, manifest.parent_hash) == (config.section_hash("eval"), parent)
    return "complete" if same else "complete for another config or parent"
