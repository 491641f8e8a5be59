"""What the model, the drafters and the round are made of, once per kind of machine.

base.py     every operation in plain torch: the definition
layer.py    the weights and the attention metadata that a layer reads
philox.py   counter-based random numbers
cpu/        CPU, bf16: kernels in C++, compiled on first use
triton/     CUDA: Triton kernels; on CPU under TRITON_INTERPRET=1, for tests
"""

from __future__ import annotations

import torch

from pipeline.decoder.ops.base import TorchOps


def pick_ops(device: torch.device, dtype: torch.dtype) -> TorchOps:
    """The fastest backend for a device and a type; torch itself where there is no other."""
    if device.type == "cuda":
        from pipeline.decoder.ops.triton.ops import TritonOps

        return TritonOps()
    if device.type == "cpu" and dtype == torch.bfloat16:
        from pipeline.decoder.ops.cpu.ops import load

        return load() or TorchOps()
    return TorchOps()
