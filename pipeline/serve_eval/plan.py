"""What eval would make, from configuration and the head's manifest: no torch, no decoding."""

from __future__ import annotations

from pipeline.config import EvalSection, RunConfig
from pipeline.planning.targets import shape_of
from pipeline.records import Manifest, Plan
from pipeline.store.manifest import find_manifest, finished_state
from pipeline.target.arithmetic import decoder_weight_bytes, target_dtype

_REPORT_BYTES = 500 << 10
#: begin.json, manifest.json, report.json, report.html and report.md.
_OBJECTS = 5


def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
    """Prompts, tokens and memory of eval for this run, which is one process's work.

    `parent` is training's plan, for a run whose head does not exist yet; nothing depends on it.
    """
    section, uri = config.eval, config.run.uri
    head = find_manifest(uri, "train")
    known = head or find_manifest(uri, "features") or find_manifest(uri, "synth")
    target = shape_of(config, known.contract if known else None)
    prompts, limit = _prompts(section)
    replies = prompts * section.max_turns
    hf_width = 4 if target_dtype(config.target) == "float32" else 2
    width = decoder_weight_bytes(config.target) + hf_width + 4
    ranks, of_what = config.plan.sharing(section.parallel)
    return Plan(
        stage="eval",
        state=_state(config, head),
        records=replies,
        tokens=replies * section.max_new_tokens,
        storage_bytes=_REPORT_BYTES,
        objects=_OBJECTS,
        peak_memory_bytes=target.of_rank(ranks)[0] * width,
        basis=(
            f"{prompts} prompts ({limit}), "
            f"up to {section.max_turns} turns of {section.max_new_tokens} tokens",
            f"{of_what}: the target twice (decoder and Hugging Face) and once in fp32",
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
    own = config.eval.drafter.needs_head and not config.eval.head  # the run's own head
    if own and head is None:
        return "waiting for train"
    return finished_state(config, "eval", head if own else None) or "not started"
