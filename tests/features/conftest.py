"""A finished synth stage made for the shared tiny target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig, parse
from pipeline.records import Manifest, Message, Sample, SamplingParams, Span
from pipeline.store.samples import encode_samples
from pipeline.store.stage_run import open_stage
from pipeline.target.open import read_contract, resolve

VOCABULARY = 96
END_ID = 1  # of the tiny target


@pytest.fixture
def make_config(tiny_target: Path) -> Callable[..., RunConfig]:
    def make(
        uri: object, *, force: bool = False, target: dict[str, Any] | None = None, **features: Any
    ) -> RunConfig:
        return parse(
            {
                "run": {"uri": str(uri), "threads": 1, "force": force},
                "target": {
                    "source": str(tiny_target),
                    "device": "cpu",
                    "dtype": "float32",
                    **(target or {}),
                },
                "synth": {"sources": [{"source": "prompts.jsonl"}]},
                "features": {
                    "batch_tokens": 64,
                    "shard_tokens": 100,
                    "encoding": "bf16",
                    **features,
                },
            }
        )

    return make


def make_samples(count: int = 12) -> list[Sample]:
    """Samples of 9 to 42 tokens, two supervised spans each."""
    samples = []
    for index in range(count):
        length = 9 + (index * 13) % 34
        ids = torch.randint(
            2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(index)
        ).tolist()
        ids[3] = END_ID
        samples.append(
            Sample(
                sample_id=f"p{index}",
                source="unit",
                license="MIT",
                category="chat",
                messages=(Message(role="user", content="hi"),),
                token_ids=tuple(ids),
                supervised=(Span(start=2, end=4), Span(start=6, end=length)),
                finish_reason="length",
                # The tiny target's logits are nearly alike: any ids are draws from it.
                sampling=SamplingParams(temperature=1, top_p=1, top_k=0, max_new_tokens=64),
                seed=0,
                generator="unit",
            )
        )
    return samples


@pytest.fixture
def finish_synth() -> Callable[..., Manifest]:
    """Store samples, in shards of five, as a finished synth stage of `config`'s target."""

    def finish(config: RunConfig, samples: list[Sample] | None = None) -> Manifest:
        samples = make_samples() if samples is None else samples
        work = open_stage(config, "synth", None)
        for index, start in enumerate(range(0, len(samples), 5)):
            part = samples[start : start + 5]
            work.commit(
                f"{index:05d}.parquet",
                encode_samples(part),
                rows=len(part),
                tokens=sum(len(sample.token_ids) for sample in part),
            )
        supervised = sum(span.end - span.start for sample in samples for span in sample.supervised)
        contract = read_contract(config.target, resolve(config.target))
        return work.finish(
            contract=contract,
            licenses={"MIT": len(samples)},
            sources={"unit": len(samples)},
            details={"supervised_tokens": supervised},
        )

    return finish


@pytest.fixture
def samples() -> list[Sample]:
    return make_samples()
