"""What eval would do, from configuration and the head's manifest: no torch, nothing is decoded."""

from __future__ import annotations

from pipeline.config import EvalSection, RunConfig
from pipeline.records import Manifest, Plan
from pipeline.store.manifest import find_manifest
from pipeline.target.arithmetic import decoder_weight_bytes, target_dtype

#: Bytes a CPU thread streams per second while decoding at batch 1; measured with SmolLM2-135M in
#: bf16 on two cores.
_BYTES_PER_THREAD = 5e9
_INTERPRETER_BYTES = 700 << 20
_LOADING_SECONDS = 20.0
_REPORT_BYTES = 500 << 10


def plan(config: RunConfig) -> Plan:
    """Prompts, tokens, time and peak memory of eval for this run."""
    section = config.eval
    head = find_manifest(config.run.uri, "train")
    prompts, limit = _prompts(section)
    replies = prompts * section.max_turns
    tokens = replies * section.max_new_tokens
    uri = config.run.uri
    known = head or find_manifest(uri, "features") or find_manifest(uri, "synth")
    parameters = known.contract.parameters if known else 0
    dtype, width = target_dtype(config.target), decoder_weight_bytes(config.target)
    hf_width = 4 if dtype == "float32" else 2
    threads = config.run.threads
    rate = _BYTES_PER_THREAD * threads
    hf_tokens = min(section.hf_prompts, prompts) * section.max_turns * section.max_new_tokens
    # Plain and speculative in the run's type, Hugging Face on some, and a batched fp32 check.
    seconds = parameters * (width * 2 * tokens + hf_width * 2 * hf_tokens + 4 * tokens) / rate
    return Plan(
        stage="eval",
        state=_state(config, head),
        records=replies,
        tokens=tokens,
        storage_bytes=_REPORT_BYTES,
        seconds=_LOADING_SECONDS + seconds,
        peak_memory_bytes=_INTERPRETER_BYTES + parameters * (width + hf_width + 4),
        basis=(
            f"{prompts} prompts ({limit}), "
            f"up to {section.max_turns} turns of {section.max_new_tokens} tokens",
            f"time: plain and speculative, in {dtype} and fp32, "
            f"at {rate / 1e9:.0f} GB/s of weights ({threads} CPU threads)",
            "memory: the interpreter, the target twice (decoder and Hugging Face) and once in fp32",
        ),
    )


def _prompts(section: EvalSection) -> tuple[int, str]:
    """How many prompts at most, and what says so. Sources are not read for it."""
    sources = () if section.prompts else section.sources
    limits = [source.limit for source in sources if source.limit]
    bounded = sum(limits) if limits and len(limits) == len(sources) else None
    if section.max_prompts and (bounded is None or section.max_prompts < bounded):
        return section.max_prompts, "eval.max_prompts"
    return (bounded, "limits of eval.sources") if bounded else (100, "no limit set: 100 assumed")


def _state(config: RunConfig, head: Manifest | None) -> str:
    if head is None and not config.eval.head:
        return "waiting for train"
    manifest = find_manifest(config.run.uri, "eval")
    if manifest is None:
        return "not started"
    parent = None if config.eval.head or head is None else head.content_hash
    same = (manifest.config_hash, manifest.parent_hash) == (config.section_hash("eval"), parent)
    return "complete" if same else "complete for another config or parent"
