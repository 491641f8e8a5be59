"""The target as a Hugging Face model, for capture and for the `generate` baseline."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from pipeline.config import TargetSection
from pipeline.errors import MissingPackage, TargetError
from pipeline.records import TargetContract
from pipeline.target.architecture import model_class, read_config
from pipeline.target.arithmetic import resolve_dtype
from pipeline.target.end_ids import read_end_ids


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
    processes: int = 1,
) -> LoadedTarget:
    """The model in `directory`, in eval mode.

    `attention` is a transformers attention implementation, `dtype` overrides the section's, whose
    auto is what this machine multiplies. With a
    `device_map`, layers lie on several devices and `LoadedTarget.device` is that of the embedding.
    With several `processes` this one holds its slice of each layer; all of them load it.
    Raises MissingPackage when that needs accelerate and it is not installed, and TargetError for a
    target that cannot be split over so many processes.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging

    device = pick_device(section.device)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    where = f"target.source={section.source}"
    loader = model_class(read_config(directory, where), where)
    options: dict[str, Any] = {
        "dtype": resolve_dtype(dtype or section.dtype, device),
        "attn_implementation": attention,
        # Of the target's own only the end ids: its sampling settings may be refused.
        "generation_config": GenerationConfig(  # type: ignore[no-untyped-call]
            eos_token_id=sorted(read_end_ids(directory, source=section.source).ids) or None
        ),
    }
    if device_map is not None:
        _require_accelerate()
        options["device_map"] = device_map
    if processes > 1:
        _require_slices(section, directory, device, processes)
        options["distributed_config"] = _slices(processes)
    with _errors_only() if processes > 1 else nullcontext():
        model = _whole_model(loader, directory, options, where)
    if device_map is None and processes == 1:
        model = model.to(device)
    embedding = model.get_input_embeddings().weight
    return LoadedTarget(model.eval(), contract, embedding.device, directory)


def _whole_model(loader: Any, directory: Path, options: dict[str, Any], where: str) -> Any:
    """The model, every weight of which was in the files. Raises TargetError."""
    try:
        model, info = loader.from_pretrained(directory, output_loading_info=True, **options)
    except RuntimeError as error:  # shapes; running out of memory is not of this text
        if "size mismatch" not in str(error) and "mismatched" not in str(error):
            raise
        problem = f"its weights do not fit its config.json: {str(error).splitlines()[0]}"
        raise TargetError(problem, where=where, fix="correct config.json or the weights") from error
    if missing := sorted(info["missing_keys"]):
        problem = f"has no tensor {missing[0]!r} ({len(missing)} are missing), "
        problem += "which a model of its config.json has; transformers would make up random ones"
        fix = "correct config.json, or download or convert the whole target again"
        raise TargetError(problem, where=where, fix=fix)
    return model


def _require_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        fix = "pip install accelerate, or leave features.device_map out"
        raise MissingPackage("a device map needs accelerate", where="features.device_map", fix=fix)


def _slices(processes: int) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(tp_size=processes, tp_plan="auto")


def _require_slices(
    section: TargetSection, directory: Path, device: torch.device, processes: int
) -> None:
    """Raise TargetError where transformers cannot split this target over `processes`."""
    from transformers import AutoConfig

    where = f"target.source={section.source}"
    whole_layers = (
        "without a launcher, features.parallel=none and features.device_map=auto place whole layers"
    )
    config: Any = AutoConfig.from_pretrained(directory).get_text_config()
    if not config.base_model_tp_plan:
        problem = f"transformers has no plan for splitting the layers of {config.model_type}"
        raise TargetError(problem, where=where, fix=whole_layers)
    counts = {
        name: value
        for name, value in config.to_dict().items()
        if name.endswith(("attention_heads", "key_value_heads")) and isinstance(value, int)
    }
    for name, heads in counts.items():
        if heads % processes:
            shared = gcd(*counts.values())
            possible = [str(n) for n in range(2, shared + 1) if shared % n == 0]
            fix = f"start {' or '.join(possible)} processes, or " if possible else ""
            problem = f"{name}={heads} cannot be shared by {processes} processes"
            raise TargetError(problem, where=where, fix=fix + whole_layers)
    if device.type == "cpu" and torch.accelerator.is_available():
        problem = "transformers splits a target over the GPUs of a machine that has some"
        fix = "set target.device=auto, or CUDA_VISIBLE_DEVICES= to hide them"
        raise TargetError(problem, where="target.device=cpu", fix=fix)


@contextmanager
def _errors_only() -> Iterator[None]:
    """No warnings of transformers: it lists the layers that every process holds whole."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)
