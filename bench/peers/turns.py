"""The inputs of all trainers, and how they take turns. Runs without this package's dependencies.

parent    step\\n ──────────────► child, which has its model ready
          {"seconds": …} ◄────── one optimiser step
          …
          end\\n  ──────────────►
          {"peak_gb": …} ◄──────
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: A head of a 135M target, in the names of transformers' Llama and of our `HeadShape`.
HIDDEN, VOCABULARY = 576, 49152
LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
DRAFT, STEPS, DECAY = 8192, 7, 0.8
#: Two documents of 256 tokens, each with a prompt in front.
DOCUMENTS, LENGTH, PROMPT = 2, 256, 72
CLIP, RATE = 0.5, 1e-4


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """Token ids [D, T], aux states [D, T, 3H], final states [D, T, H] and the target's rows [V, H],
    embedding and output layer alike; all random."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "token_ids": torch.randint(0, DRAFT, (DOCUMENTS, LENGTH), generator=generator),
        "aux_states": draw(DOCUMENTS, LENGTH, 3 * HIDDEN),
        "final_states": draw(DOCUMENTS, LENGTH, HIDDEN) / 10,
        "rows": draw(VOCABULARY, HIDDEN) / 10,
    }


def supervised_mask() -> Tensor:
    """1 for supervised tokens [D, T]."""
    mask = torch.zeros(DOCUMENTS, LENGTH, dtype=torch.int64)
    mask[:, PROMPT:] = 1
    return mask


def optimised(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One step of AdamW, torch's own, after gradients of `loss`."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, RATE, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learned, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def serve(make: Callable[[torch.dtype], Callable[[], None]]) -> None:
    """Make a step in the type that argv names, and perform one for each line of input."""
    torch.set_num_threads(int(sys.argv[2]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    step = make(getattr(torch, sys.argv[1]))
    for _ in range(2):  # kernels compile, memory is touched for the first time
        step()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        started, computed = time.perf_counter(), time.process_time()
        step()
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "cpu_seconds": time.process_time() - computed}
        print(json.dumps(answer), file=answers, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"peak_gb": peak}), file=answers, flush=True)
