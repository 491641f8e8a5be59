"""Triton's operations, the reference, and how far apart they may be."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.triton.ops import TritonOps

REFERENCE = TorchOps()
OPS = TritonOps()
TYPES = [torch.float32, torch.bfloat16]
#: Largest error against the reference in float64 on the same inputs, of values about 1 in size.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def seeded(seed: int) -> random.Random:
    torch.manual_seed(seed)
    return random.Random(seed)


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative where values are above 1; infinite if anything is NaN."""
    difference = (got.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1)
    return float(difference.nan_to_num(nan=float("inf")).max())
