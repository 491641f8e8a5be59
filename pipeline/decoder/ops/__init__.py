"""What the model, the drafters and the round are made of, once per kind of machine.

base.py     every operation in plain torch: the definition
eager.py    the same for speed, where there is no other backend
layer.py    the weights and the attention metadata that a layer reads
draws.py    logits with noise, the largest of which is a draw
philox.py   counter-based random numbers
cpu/        CPUs: kernels in C++, compiled on first use
triton/     CUDA: Triton kernels; on CPU under TRITON_INTERPRET=1, for tests
"""

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
