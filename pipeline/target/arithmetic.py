"""What a machine computes with: `auto` resolved, and what may be promised of the results.

    setting    CUDA ≥ 8.0   CPU with AVX512-BF16, AMX or ARM's bf16   any other
    auto       bfloat16     bfloat16                                  float32
    other      as it says, on every machine

Weights and states keep the type they are stored in; arithmetic makes no two runs differ. Torch's
own products promise less than our kernels: in fp32 they are the same for one number of threads; in
bf16 only where the processor multiplies it, elsewhere results depend on addresses. At the top of
this module there is no torch: `--plan` calls `planned_dtype`.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pipeline.config import TargetSection, cpu_kernels
from pipeline.config.isa import cpu_multiplies_bf16, isa_level, machine_levels
from pipeline.errors import TargetError
from pipeline.records import Arithmetic

if TYPE_CHECKING:
    import torch

Dtype = Literal["bfloat16", "float32", "float16"]
#: What a notice says where `auto` chose fp32.
NOT_NATIVE = " (bfloat16 is not multiplied natively here)"
#: CUDA devices from this capability on multiply bf16.
_CUDA_BF16 = (8, 0)
#: Exists where an NVIDIA driver has found a GPU.
_NVIDIA_DEVICE = Path("/dev/nvidia0")


def pick_device(setting: str) -> torch.device:
    """`target.device` → torch device; auto prefers CUDA. Raises TargetError."""
    import torch

    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if setting.startswith("cuda") and not torch.cuda.is_available():
        fix = "set target.device=auto or cpu"
        raise TargetError("no CUDA device is available", where=f"target.device={setting}", fix=fix)
    return torch.device(setting)


def resolve_dtype(setting: str, device: torch.device) -> torch.dtype:
    """`target.dtype` or `train.dtype` on `device`."""
    import torch

    name = setting if setting != "auto" else _native(device)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def planned_dtype(setting: str, device: str) -> Dtype:
    """As `resolve_dtype` for the setting `target.device`, without torch.

    A CUDA device that can be seen is taken to multiply bf16.
    """
    if setting != "auto":
        return cast(Dtype, setting)
    cuda = planned_device(device) == "cuda"
    return "bfloat16" if cuda or cpu_multiplies_bf16() else "float32"


def planned_device(setting: str) -> Literal["cuda", "cpu"]:
    """As `pick_device`, without torch: its type."""
    is_cuda = setting == "cuda" or (setting == "auto" and _NVIDIA_DEVICE.exists())
    return "cuda" if is_cuda else "cpu"


def target_dtype(section: TargetSection) -> Dtype:
    """`planned_dtype` of the target."""
    return planned_dtype(section.dtype, section.device)


def decoder_weight_bytes(section: TargetSection) -> int:
    """Bytes of a weight in the decoder's memory.

    Our CPU kernels read 16-bit weights as they are stored, whatever they compute in.
    """
    ours = cpu_kernels() and isa_level() is not None
    return 4 if target_dtype(section) == "float32" and not ours else 2


def torch_arithmetic(dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """Of torch's own kernels: capture, training, and decoding without ours."""
    import torch

    exact = dtype == torch.float32 or _native(device) == "bfloat16"
    # CUDA promises neither the order of atomic additions nor cuBLAS' choice of algorithm.
    repeatable = "per thread count" if exact and device.type == "cpu" else "no"
    return _arithmetic("torch", dtype, device, repeatable)


def decoder_arithmetic(ops: Any, dtype: torch.dtype, device: torch.device) -> Arithmetic:
    """Of a decoder's backend: what its kernels are called, and what it promises of results."""
    if ops.name == "torch":
        return torch_arithmetic(dtype, device)
    return _arithmetic(ops.arithmetic_name, dtype, device, ops.repeatable)


def server_arithmetic(kind: str) -> Arithmetic:
    """Of servers, which do not report theirs."""
    return Arithmetic(
        dtype="unknown", kernels=kind, device="server", processor="", threads=0, repeatable="no"
    )


def reason(arithmetic: Arithmetic, setting: str) -> str:
    """Why `auto` chose fp32, to append to a notice; else empty."""
    return NOT_NATIVE if setting == "auto" and arithmetic.dtype == "float32" else ""


def _arithmetic(
    kernels: str, dtype: torch.dtype, device: torch.device, repeatable: Any
) -> Arithmetic:
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        processor = f"sm_{major}{minor}"
    else:
        processor = machine_levels()[-1] if machine_levels() else platform.machine()
    return Arithmetic(
        dtype=str(dtype).removeprefix("torch."),
        kernels=kernels,
        device=cast(Any, device.type),
        processor=processor,
        threads=torch.get_num_threads(),
        repeatable=repeatable,
    )


def _native(device: torch.device) -> Dtype:
    """The faster of bf16 and fp32 on `device`: bf16 where it is multiplied natively."""
    if device.type == "cuda":
        import torch

        native = torch.cuda.get_device_capability(device) >= _CUDA_BF16
    else:
        native = cpu_multiplies_bf16()
    return "bfloat16" if native else "float32"
