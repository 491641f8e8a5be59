"""The target as a Hugging Face model, for capture and for the `generate` baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.config import TargetSection
from pipeline.errors import TargetError
from pipeline.records import TargetContract
from pipeline.target.contract import read_contract
from pipeline.target.resolve import resolve


@dataclass(frozen=True)
class LoadedTarget:
    """A target in memory."""

    model: Any  # transformers causal LM in eval mode
    contract: TargetContract
    device: torch.device
    directory: Path


def pick_device(setting: str) -> torch.device:
    """`target.device` → torch device; auto prefers CUDA."""
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if setting == "cuda" and not torch.cuda.is_available():
        raise TargetError("no CUDA device is available", where="target.device=cuda", fix="set target.device=auto or cpu")
    return torch.device(setting)


def load_target(target: TargetSection, *, attention: str = "sdpa", dtype: str | None = None) -> LoadedTarget:
    """Resolve and load. `attention` is a transformers attention implementation, `dtype` overrides the section's."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    resolved = resolve(target)
    device = pick_device(target.device)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(resolved.directory, dtype=getattr(torch, dtype or target.dtype), attn_implementation=attention)
    return LoadedTarget(model.to(device).eval(), read_contract(target, resolved), device, resolved.directory)
