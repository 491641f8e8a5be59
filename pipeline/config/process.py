"""What holds for a whole process and shapes no output: threads, caches, retries, kernels.

    run.cache_dir, else XDG_CACHE_HOME (its folder eagle3)   ~/.cache/eagle3
    EAGLE3_STORE_RETRY_SECONDS                               300
    EAGLE3_STORE_TIMEOUT_SECONDS                             60
    EAGLE3_CPU_KERNELS (0: off)                              on

Every stage begins with `prepare_process`, or with `take_settings` where torch may not be needed;
commands without a configuration take the environment's.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from pipeline.config.run import RunSection
from pipeline.errors import ConfigError

_run = RunSection()
#: glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, the last two at most what they can be.
_MALLOC = {-1: 2**31 - 1, -2: 64 << 20, -3: 32 << 20}


def take_settings(run: RunSection) -> None:
    """Take the settings of `run` for this process, all but the threads of torch."""
    global _run
    _run = run


def prepare_process(run: RunSection) -> None:
    """Take the settings of `run` for this process, the threads of torch among them."""
    take_settings(run)
    if run.threads:
        import torch

        torch.set_num_threads(run.threads)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for what is allocated next; other C libraries do as they do.

    By itself it returns what a training step frees to the system, which gives the next step fresh
    pages, each of which it has to fill with zeros: a tenth of a small head's step. What is kept is
    no more than there was at once, and at most 2 GB; blocks above 32 MB are returned all the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def cache_directory() -> Path:
    """Where this machine keeps what can be made again: targets, kernels, shards, remote runs."""
    if _run.cache_dir:
        return Path(_run.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle3"


def store_retry_seconds() -> float:
    """How long one operation on a remote store is tried. Raises ConfigError."""
    return _seconds("EAGLE3_STORE_RETRY_SECONDS", 300.0)


def store_timeout_seconds() -> float:
    """How long a connection may be silent before it counts as dropped. Raises ConfigError."""
    return _seconds("EAGLE3_STORE_TIMEOUT_SECONDS", 60.0)


def cpu_kernels() -> bool:
    """Whether the decoder may use the C++ kernels where this machine can run them."""
    return os.environ.get("EAGLE3_CPU_KERNELS") != "0"


def rank() -> int:
    """Number of this process among those that a launcher (torchrun, deepspeed) has started."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1


def local_rank() -> int:
    """Number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_launched() -> bool:
    """Whether a launcher has started this process, alone or with others."""
    return "RANK" in os.environ


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(
            f"{text!r} is not a number of seconds",
            where=f"environment: {variable}",
            fix=f"set it to a number of at least 0, or unset it for {default:.0f}",
        )
    return value
