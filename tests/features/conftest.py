"""A finished synth stage made for the shared tiny target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig, parse
from pipeline.records import Manifest, Sample
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
        where = {"source": str(tiny_target), "device": "cpu", "dtype": "float32"}
        small = {"batch_tokens": 64, "shard_tokens": 100, "encoding": "bf16"}
        return parse(
            {
                "run": {"uri": str(uri), "threads": 1, "force": force},
                "target": {**where, **(target or {})},
                "synth": {"sources": [{"source": "prompts.jsonl"}]},
                "features": {**small, **features},
            }
        )

    return make


def sample_of(
    index: int, ids: Sequence[int], supervised: Sequence[tuple[int, int]], **fields: Any
) -> Sample:
    return Sample.model_validate(
        {
            "sample_id": f"p{index}",
            "source": "unit",
            "license": "MIT",
            "category": "chat",
            "messages": ({"role": "user", "content": "hi"},),
            "token_ids": tuple(ids),
            "supervised": [{"start": start, "end": end} for start, end in supervised],
            "finish_reason": "length",
            # The tiny target's logits are nearly alike: any ids are draws from it.
            "sampling": {"temperature": 1, "top_p": 1, "top_k": 0, "max_new_tokens": 64},
            "seed": 0,
            "generator": "unit",
            **fields,
        }
    )


def make_samples(count: int = 12) -> list[Sample]:
    """Samples of 9 to 42 tokens, two supervised spans each."""
    samples = []
    for index in range(count):
        length = 9 + (index * 13) % 34
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(2, VOCABULARY, (length,), generator=draw).tolist()
        ids[3] = END_ID
        samples.append(sample_of(index, ids, [(2, 4), (6, length)]))
    return samples


def finish_synth(config: RunConfig, samples: list[Sample] | None = None) -> Manifest:
    """Store samples, in shards of five, as a finished synth stage of `config`'s target."""
    samples = make_samples() if samples is None else samples
    stage_run = open_stage(config, "synth", None)
    for index, start in enumerate(range(0, len(samples), 5)):
        part = samples[start : start + 5]
        tokens = sum(len(sample.token_ids) for sample in part)
        name = f"{index:05d}.parquet"
        stage_run.commit(name, encode_samples(part), rows=len(part), tokens=tokens)
    supervised = sum(span.end - span.start for sample in samples for span in sample.supervised)
    return stage_run.finish(
        contract=read_contract(config.target, resolve(config.target)),
        licenses={"MIT": len(samples)},
        sources={"unit": len(samples)},
        details={"supervised_tokens": supervised},
    )


@pytest.fixture
def ready(make_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """The configuration of a run whose synth stage is finished."""

    def make(*arguments: Any, samples: list[Sample] | None = None, **changes: Any) -> RunConfig:
        config = make_config(*arguments, **changes)
        finish_synth(config, samples)
        return config

    return make


@pytest.fixture
def samples() -> list[Sample]:
    return make_samples()
