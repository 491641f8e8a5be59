"""The processes that train together: one, or all that a launcher started.

What stops one of them stops all with the same error. Left to itself the error of one would leave
the others waiting for it until the group's timeout.

Objects that they send each other are pickled: they come from these processes alone, never from a
file.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from pipeline.config import is_launched, local_rank, rank, world_size
from pipeline.errors import Eagle3Error, MissingPackage

Value = TypeVar("Value")


def own_part(count: int) -> range:
    """This process's part of 0 … count-1: all parts, in order of rank, are the whole in order."""
    return range(rank() * count // world_size(), (rank() + 1) * count // world_size())


def join_group(device: torch.device, *, minutes: float) -> Any:
    """Join the launcher's group; without one make a group of one, in memory: it opens no port.

    A process that waits for another one longer than `minutes` gives up. Returns deepspeed; raises
    MissingPackage without it.
    """
    deepspeed, timeout = _deepspeed(), timedelta(minutes=minutes)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(local_rank())
    if not is_launched() and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=timeout
        )
    if not deepspeed.comm.is_initialized():
        # gloo's threads are to end before the interpreter does: one that still holds a tensor then
        # aborts the process, and the launcher calls a finished run failed.
        atexit.register(_leave_group)
        with quiet():
            deepspeed.init_distributed(
                backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
            )
    return deepspeed


def _leave_group() -> None:
    """NCCL is left to the launcher: it may be waiting for a process that is gone."""
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def broadcast_from_rank0(action: Callable[[], Value]) -> Value:
    """Do `action` on the first process; all return its value, or raise its error."""
    if world_size() == 1:
        return action()
    outcomes: list[Any] = [_attempt(action) if rank() == 0 else None]
    torch.distributed.broadcast_object_list(outcomes, src=0)
    value: Value = outcomes[0].result()
    return value


def rank0_first(action: Callable[[], Value]) -> Value:
    """Do `action` on the first process and, when it is done there, on all others.

    Its error on the first is raised on all.
    """
    value = rank0_only(action)
    return cast("Value", value) if rank() == 0 else action()


def rank0_only(action: Callable[[], Value]) -> Value | None:
    """Do `action` on rank 0, and return its value there, None on the others.

    Its error is raised on all.
    """
    done: list[Value] = []
    broadcast_from_rank0(lambda: done.append(action()))
    return done[0] if done else None


def all_gather_or_raise(action: Callable[[], Value]) -> list[Value]:
    """Do `action` on every process; all return all values, by rank, or raise the first error."""
    if world_size() == 1:
        return [action()]
    outcomes: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(outcomes, _attempt(action))
    return [outcome.result() for outcome in outcomes]


def broadcast_tensor(tensor: Tensor, device: torch.device) -> None:
    """Fill `tensor` with the first process's, by way of `device`, the group's."""
    if world_size() == 1:
        return
    sent = tensor.detach().to(device)
    torch.distributed.broadcast(sent, src=0)
    tensor.detach().copy_(sent)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of DeepSpeed and of what it imports: they are about its own use of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Outcome(NamedTuple):
    """What an action came to."""

    value: Any = None
    error: Eagle3Error | None = None

    def result(self) -> Any:
        if self.error:
            raise self.error
        return self.value


def _attempt(action: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(action())
    except Eagle3Error as error:
        return _Outcome(error=error)


def _deepspeed() -> Any:
    """The package, told which accelerator to use and to keep its log to errors."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with quiet(), _silent_descriptors():
            import deepspeed  # type: ignore[import-untyped]
            from deepspeed.ops.op_builder import cpu  # type: ignore[import-untyped]
    except ImportError as error:
        problem, fix = f"training needs deepspeed: {error}", "pip install 'eagle3[train]'"
        raise MissingPackage(problem, where="train", fix=fix) from error
    # Its shared-memory collective is compiled with g++ when the group is made, on a machine that
    # may have none; gloo is enough.
    deepspeed.ops.__compatible_ops__[cpu.ShareMemCommBuilder.NAME] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


@contextmanager
def _silent_descriptors() -> Iterator[None]:
    """Nothing reaches the terminal: DeepSpeed's import tries the compiler, which complains."""
    sys.stdout.flush()
    sys.stderr.flush()
    copies = os.dup(1), os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, copy in zip((1, 2), copies, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
