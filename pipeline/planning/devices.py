"""Devices that a plan is made for: this machine's CPU, or NVIDIA GPUs by their data sheets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.config import RunConfig
from pipeline.console import readable_bytes
from pipeline.errors import ConfigError
from pipeline.target.arithmetic import Dtype, planned_dtype

#: Shares of a data sheet's figures that plans count on. Assumptions; docs/planning.md says why.
FORWARD_SHARE = 0.4  # of the FLOP/s, in forwards over packed tokens
TRAIN_SHARE = 0.3  # of the FLOP/s, in optimiser steps of a single layer
BANDWIDTH_SHARE = 0.5  # of the bytes/s, while replies are generated
#: Of a GPU's memory that may be planned with; the rest is the context's and the allocator's.
MEMORY_SHARE = 0.9
#: Bytes/s between two GPUs of different nodes: one port of 400 Gb/s a GPU, as a DGX H100 has.
LINK_BYTES = 50e9

_OWN_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Device:
    """One worker's hardware. Rates are 0 for a CPU: plans hold rates measured on some."""

    name: str  # as in plan.device
    label: str
    kind: Literal["cpu", "cuda"] = "cuda"
    bf16: float = 0.0  # FLOP/s of dense products in bf16 and fp16
    fp32: float = 0.0  # outside of tensor cores, as torch computes unless told otherwise
    bandwidth: float = 0.0  # bytes/s
    memory: int = 0  # bytes

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def holds(self, needed: float) -> bool:
        """Whether its memory has room for so many bytes; a CPU's is not known here."""
        return not self.is_cuda or needed <= self.memory * MEMORY_SHARE

    def share_of(self, needed: float) -> str:
        """What is needed of a GPU's memory, as a problem says it."""
        return f"{readable_bytes(needed)} of {readable_bytes(self.memory)} on each GPU"

    def flops(self, dtype: str) -> float:
        """The data sheet's FLOP/s in `dtype`."""
        return self.fp32 if dtype == "float32" else self.bf16


def _gpu(name: str, label: str, bf16: float, fp32: float, bandwidth: float, memory: int) -> Device:
    """In the data sheets' units: TFLOP/s, GB/s, GB."""
    label = f"NVIDIA {label}"
    return Device(
        name, label, "cuda", bf16 * 1e12, fp32 * 1e12, bandwidth * 1e9, memory * 1_000_000_000
    )


CPU = Device("cpu", "CPU", "cpu")
#: From NVIDIA's data sheets of each product. Those that count sparse zeros as work are halved.
GPUS = (
    _gpu("a100-40gb", "A100 SXM 40 GB", 312, 19.5, 1555, 40),
    _gpu("a100", "A100 SXM 80 GB", 312, 19.5, 2039, 80),
    _gpu("h100", "H100 SXM", 989.5, 67, 3350, 80),
    _gpu("h100-pcie", "H100 PCIe", 756.5, 51, 2000, 80),
    _gpu("h200", "H200 SXM", 989.5, 67, 4800, 141),
    _gpu("b200", "B200", 2250, 75, 8000, 180),
    _gpu("l40s", "L40S", 362.05, 91.6, 864, 48),
    _gpu("l4", "L4", 121, 30.3, 300, 24),
    _gpu("a10", "A10", 125, 31.2, 600, 24),
)
_ALIASES = {"a100-80gb": "a100", "h100-sxm": "h100", "h200-sxm": "h200"}
#: What drivers call them; the first that fits.
_DRIVER_NAMES = (
    ("H200", "h200"),
    ("H100 PCIe", "h100-pcie"),
    ("H100", "h100"),
    ("B200", "b200"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("A100", "a100"),
    ("L40S", "l40s"),
    ("L4", "l4"),
    ("A10", "a10"),
)


def device_of(config: RunConfig) -> Device:
    """The device that `plan.device` names; ConfigError for one without a data sheet.

    auto is this machine's GPU where the run may use it and its data sheet is known, else the CPU.
    """
    name = config.plan.device.lower()
    if name == "cpu":
        return CPU
    if name == "auto":
        return (_own_gpu() if config.target.device != "cpu" else None) or CPU
    by_name = {gpu.name: gpu for gpu in GPUS}
    if device := by_name.get(_ALIASES.get(name, name)):
        return device
    known = ["auto", "cpu", *by_name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
    raise ConfigError(f"no data sheet of {name!r} is known", where="plan.device", fix=fix)


def dtype_on(config: RunConfig, setting: str, device: Device) -> Dtype:
    """`target.dtype` or `train.dtype` where the plan is for; auto plans ask as the stages would."""
    where = config.target.device if config.plan.device == "auto" else device.kind
    return planned_dtype(setting, where)


def described(config: RunConfig, device: Device) -> str:
    """The plan's workers, as a person says it."""
    if device.is_cuda:
        return f"{config.plan.workers:,} × {device.label}"
    workers = f"{config.plan.workers:,} × " if config.plan.workers > 1 else ""
    return f"{workers}{config.run.threads} CPU threads"


def store_seconds(config: RunConfig, count: float) -> float:
    """All workers at once between their memory and the store, `count` bytes in all."""
    return count / (config.plan.store_bytes_per_second * config.plan.workers)


def _own_gpu() -> Device | None:
    """By the name that the driver gives this machine's first GPU."""
    for file in sorted(_OWN_GPUS.glob("*/information")):
        text = file.read_text(encoding="utf-8", errors="replace")
        model = next((line for line in text.splitlines() if line.startswith("Model:")), "")
        name = next((name for part, name in _DRIVER_NAMES if part in model), None)
        return next((gpu for gpu in GPUS if gpu.name == name), None)
    return None
