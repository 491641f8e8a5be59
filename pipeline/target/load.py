"""The target as a Hugging Face model, for capture and for the `generate` baseline."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.config import TargetSection
from pipeline.errors import MissingPackage, TargetError
from pipeline.records import TargetContract
from pipeline.target.arithmetic import resolve_dtype


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
        fix = "set target.device=auto or cpu"
        raise TargetError("no CUDA device is available", where="target.device=cuda", fix=fix)
    return torch.device(setting)


def load_model(
    section: TargetSection,
    directory: Path,
    contract: TargetContract,
    *,
    attention: str = "sdpa",
    dtype: str | None = None,
    device_map: str | dict[str, int | str] | None = None,
) -> LoadedTarget:
    """The model in `directory`, in eval mode.

    `attention` is a transformers attention implementation, `dtype` overrides the section's, whose
    auto is what this machine multiplies. With a
    `device_map`, layers lie on several devices and `LoadedTarget.device` is that of the embedding.
    Raises MissingPackage when that needs accelerate and it is not installed.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    device = pick_device(section.device)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "dtype": resolve_dtype(dtype or section.dtype, device),
        "attn_implementation": attention,
    }
    if device_map is not None:
        _require_accelerate()
        options["device_map"] = device_map
    model: Any = AutoModelForCausalLM.from_pretrained(directory, **options)
    if device_map is None:
        model = model.to(device)
    embedding = model.get_input_embeddings().weight
    return LoadedTarget(model.eval(), contract, embedding.device, directory)


def _require_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        fix = "pip install accelerate, or leave features.device_map out"
        raise MissingPackage("a device map needs accelerate", where="features.device_map", fix=fix)
