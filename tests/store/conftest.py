"""What the store's tests share: a contract, samples and a run configuration."""

from __future__ import annotations

from typing import Any

from pipeline.config import RunConfig, parse
from pipeline.records import Message, Sample, SamplingParams, Span, TargetContract

CONTRACT = TargetContract(
    source="dir",
    revision="local",
    fingerprint="f" * 64,
    dtype="bfloat16",
    hidden_size=4,
    num_layers=8,
    vocab_size=64,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    capture_layers=(1, 3, 4),
    tokenizer_hash="t" * 64,
    chat_template_hash="c" * 64,
    parameters=1000,
)


def make_sample(index: int = 0, length: int = 8, **changes: Any) -> Sample:
    messages = Message(role="user", content="Grüße 👋"), Message(role="assistant", content="")
    fields: dict[str, Any] = {
        "sample_id": f"p{index}",
        "source": "unit",
        "license": "MIT",
        "category": "chat",
        "messages": messages,
        "token_ids": tuple((7 * index + at) % 64 for at in range(length)),
        "supervised": (Span(start=3, end=length),),
        "finish_reason": "stop",
        "sampling": SamplingParams(temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=16),
        "seed": 2**40 + index,
        "generator": "unit 1.0",
    }
    return Sample.model_validate({**fields, **changes})


def make_config(uri: object, *, force: bool = False, **sections: Any) -> RunConfig:
    synth = {"sources": [{"source": "prompts.jsonl"}], **sections.pop("synth", {})}
    run = {"uri": str(uri), "force": force, "threads": 1}
    return parse({"run": run, "target": {"source": "dir"}, "synth": synth, **sections})
