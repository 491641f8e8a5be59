"""Which vector instructions this process computes with: four levels, each above the one before.

    avx2          AVX2, FMA, F16C                       Haswell 2013, Zen 2017: arithmetic in fp32
    avx512        AVX-512 F, BW, DQ, VL                 Skylake server 2017: arithmetic in fp32
    avx512_bf16   and AVX512-BF16                       Cooper Lake 2020, Zen 4 2022: bf16
    amx           and AMX-TILE, AMX-BF16                Sapphire Rapids 2023: bf16

`EAGLE3_ISA` forces a level that the processor has, or `none`; without it the highest is taken. A
level is a promise about results as well: what is computed in fp32 has the same bits at `avx2` and
above (see decoder/ops/cpu).
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from pipeline.errors import ConfigError

VARIABLE = "EAGLE3_ISA"

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
#: Levels, lowest first, and the flags that /proc/cpuinfo must show for each.
LEVELS: dict[str, set[str]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
}


@cache
def machine_levels() -> tuple[str, ...]:
    """The levels that this machine has, lowest first; none where it is not x86-64 Linux."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return ()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    levels = [level for level, needed in LEVELS.items() if needed <= flags]
    return tuple(level for level in levels if level != "amx" or _permits_tiles())


def _permits_tiles() -> bool:
    """Ask the kernel for AMX's tiles, which a process gets on request only (arch_prctl)."""
    system_call, request, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(system_call, request, tile_data) == 0)


def isa_level() -> str | None:
    """The level to compute with, None without any. Raises ConfigError for one that is not here."""
    here, requested = machine_levels(), os.environ.get(VARIABLE)
    if not requested:
        return here[-1] if here else None
    if requested == "none":
        return None
    if requested not in here:
        raise ConfigError(
            f"{requested!r} is not a level that this processor has",
            where=f"environment: {VARIABLE}",
            fix=f"set it to one of {', '.join((*here, 'none'))}, or unset it",
        )
    return requested


def cpu_multiplies_bf16() -> bool:
    """Whether this process's level multiplies bfloat16 natively; ARM says so in /proc/cpuinfo."""
    if platform.machine() in ("aarch64", "arm64"):
        return os.environ.get(VARIABLE) != "none" and _arm_has_bf16()
    return isa_level() in ("avx512_bf16", "amx")


@cache
def _arm_has_bf16() -> bool:
    about = Path("/proc/cpuinfo")
    return about.exists() and " bf16" in about.read_text()
