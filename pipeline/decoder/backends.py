"""Which implementation of the operations a device and a type get."""

from __future__ import annotations

import torch

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.eager import EagerOps


def pick_ops(device: torch.device, dtype: torch.dtype) -> TorchOps:
    """The fastest backend for a device and a type; torch itself where there is no other."""
    if device.type == "cuda":
        from pipeline.decoder.ops.triton.ops import TritonOps

        return TritonOps(dtype)
    if device.type == "cpu":
        from pipeline.decoder.ops.cpu.ops import load

        return load(dtype) or EagerOps(dtype)
    return EagerOps(dtype)
