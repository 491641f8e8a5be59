"""A target whose layers' matrices are rounded to float8: another target, of half the bytes.

The copy is an ordinary checkpoint of the stored type, since bfloat16 holds what float8 and a power
of two a row hold. So transformers, servers and every stage read it as they read any other; and the
bundled decoder, where it finds that float8 loses nothing, keeps such matrices in it on a GPU.

    stored     [out, in] bf16 ─ round ─► e4m3 · 2^k of the row ─ widen ─► [out, in] bf16
    decoder    e4m3 and 2^k, the same numbers: a byte a parameter
    others     bf16: embedding, lm_head, norms and biases are what they were
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config import TargetSection
from pipeline.console import long_step, notice
from pipeline.decoder.ops.layer import Float8Rows
from pipeline.errors import StoreError, TargetError, brief
from pipeline.store.output import output_directory
from pipeline.target.files import weight_files
from pipeline.target.open import NAMED_TEMPLATES, Target, open_target

_MATRIX = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
#: What a copy needs beside the weights: configuration, tokenizer and template.
_BESIDE = ("*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt")


def round_target(source: str, out: str) -> None:
    """Write the target at `source`, as in target.source, to the directory `out`, rounded.

    Raises TargetError or UnsupportedModel for a target that the decoder does not run, or whose
    matrices cannot be rounded, and StoreError where `out` holds anything or cannot be written.
    """
    target = open_target(TargetSection(source=source), decoded=True)
    rounded = parameters = 0
    with output_directory(out, last="config.json") as folder:
        with long_step("target", "rounding to float8"):
            for file in weight_files(target.directory):
                new = folder / file.relative_to(target.directory)
                new.parent.mkdir(parents=True, exist_ok=True)
                count, size = _write(file, new, target)
                rounded, parameters = rounded + count, parameters + size
        for path in {path for pattern in _BESIDE for path in target.directory.glob(pattern)}:
            shutil.copyfile(path, folder / path.name)
        if (named := target.directory / NAMED_TEMPLATES).is_dir():
            shutil.copytree(named, folder / NAMED_TEMPLATES)
    share = f"{parameters / target.contract.parameters:.0%} of its parameters"
    notice("target", f"{out}: {rounded} matrices are float8's, {share}; all else is as it was")


def _write(file: Path, new: Path, target: Target) -> tuple[int, int]:
    """Copy one file of weights; returns how many matrices were rounded, and their parameters."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    prefix, tensors, count, size = target.weights.prefix, dict[str, Tensor](), 0, 0
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
        for name in stored.keys():  # noqa: SIM118
            tensors[name] = stored.get_tensor(name)
            if name.startswith(prefix) and _MATRIX.fullmatch(name.removeprefix(prefix)):
                tensors[name] = _rounded(tensors[name], f"{file}: {name}")
                count, size = count + 1, size + tensors[name].numel()
    try:
        save_file(tensors, new, metadata)
    except (OSError, SafetensorError) as error:
        fix = "free some space, or choose another --out"
        raise StoreError(f"cannot be written: {brief(error)}", where=str(new), fix=fix) from error
    return count, size


def _rounded(weight: Tensor, where: str) -> Tensor:
    """Raises TargetError for numbers that are not finite, or that its type cannot hold rounded."""
    if not bool(weight.isfinite().all()):
        raise TargetError("holds NaN or infinity", where=where, fix="use another checkpoint")
    exact = Float8Rows.of(weight).widened()
    rounded = exact.to(weight.dtype)
    if not torch.equal(rounded.to(exact.dtype), exact):
        name = str(weight.dtype).removeprefix("torch.")
        fix = "save the target in bfloat16 first"
        raise TargetError(f"{name} cannot hold it rounded", where=where, fix=fix)
    return rounded
