"""One target over several processes: who they are, and how they stay in step.

A launcher starts them (`torchrun --nproc-per-node 2 -m pipeline.cli features …`). transformers
gives each one a slice of every layer and sums what they compute after attention and after the MLP:
a forward takes all of them, with the same tokens, in the same order, and leaves its states whole on
each:

    rank 0    reads ─ broadcast ─► forward ─ encodes, commits ─ broadcast ─► forward ─ …  ─ manifest
    others            wait ──────► forward ──────────────────── wait ──────► forward ─ …  ─ manifest

When rank 0 fails, the others end with its exit code and say nothing. When a process is gone, the
others end with LostProcess: at once where its connections close, else after
half an hour.

At the top of this module there is no torch: a finished stage needs none.
"""

from __future__ import annotations

import atexit
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pipeline.config import TargetSection, local_rank, world_size
from pipeline.console import console
from pipeline.errors import ConfigError, Eagle3Error, LostProcess

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")

#: How long processes wait for one another: longer than rank 0 may wait for the store and for its
#: next shard.
_TIMEOUT_SECONDS = 1800.0
#: How long a process that fails waits for the others to listen, or for rank 0 to have failed too.
_FAREWELL_SECONDS = 5.0
#: A launcher ends all processes at the first exit; the one that failed first must print its line.
_AFTER_THE_FIRST = 1.0


@dataclass
class Group:
    """The processes that hold one target together; a process by itself is a group of one."""

    rank: int = 0
    size: int = 1
    timeout: float = 0.0
    _control: Any = None  # gloo, also where the target is on GPUs
    _over: bool = False  # a failure is known to all: nothing more is sent

    def broadcast(self, value: Value) -> Value:
        """Rank 0's `value` on every rank; that of the others is not looked at. None costs least.

        Where rank 0 has failed, raises SystemExit with its exit code.
        """
        if self.size == 1:
            return value
        import torch

        data = b"" if self.rank > 0 or value is None else pickle.dumps(value)
        length = self._header(len(data), self.timeout)
        if length < 0:
            self._end(-1 - length)
        if length == 0:
            return None  # type: ignore[return-value]  # it is rank 0's value
        if self.rank == 0:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8), self.timeout)
            return value
        received = torch.empty(length, dtype=torch.uint8)
        self._send(received, self.timeout)
        result: Value = pickle.loads(received.numpy().tobytes())
        return result

    @contextmanager
    def all_or_raise(self) -> Iterator[None]:
        """A block that each rank does for itself, and that ends on all where one of them fails.

        The lowest rank that failed raises its error, the others SystemExit with its exit code.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        codes = self._gather(0 if error is None else exit_code(error))
        first = next((rank for rank, code in enumerate(codes) if code), None)
        self._over = first is not None
        if first == self.rank and error is not None:
            raise error
        if first is not None:
            self._end(codes[first])

    def give_up(self, error: BaseException) -> None:
        """Leave no one waiting after `error`, and let what failed on all of them be said once.

        Where rank 0 has failed too, raises SystemExit with its exit code.
        """
        try:
            if not (self._over or _comes_from_the_group(error)):
                self._send_failure(exit_code(error))
        finally:
            self.leave()

    def _send_failure(self, code: int) -> None:
        """From rank 0 to the others' next `broadcast`: it has failed with `code`."""
        length = 0
        with suppress(RuntimeError):  # they are in the middle of a forward, or gone
            length = self._header(-1 - code, _FAREWELL_SECONDS)
        if self.rank > 0 and length < 0:
            self._end(-1 - length)

    def leave(self) -> None:
        """End gloo's threads: one that still holds a Python object would abort a process that ends.

        NCCL is left to the launcher: it may be waiting for a process that is gone.
        """
        from torch import distributed

        control, self._control = self._control, None
        if control is None or not distributed.is_initialized():
            return
        everything = distributed.get_backend() == "gloo"
        distributed.destroy_process_group(None if everything else control)

    def _end(self, code: int) -> NoReturn:
        self._over = True
        time.sleep(_AFTER_THE_FIRST)
        raise SystemExit(code)

    def _header(self, value: int, seconds: float) -> int:
        """Rank 0's `value`: a number of bytes to come, or -1 - its exit code."""
        import torch

        header = torch.tensor([value])
        self._send(header, seconds)
        return int(header)

    def _send(self, tensor: Tensor, seconds: float) -> None:
        """Rank 0's tensor into that of the others. Raises RuntimeError after `seconds`."""
        import torch

        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=seconds)
        self._control.broadcast([tensor], options).wait()

    def _gather(self, code: int) -> list[int]:
        """`code` of every rank."""
        if self.size == 1:
            return [code]
        import torch

        codes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        torch.distributed.all_gather(codes, torch.tensor([code]), group=self._control)
        return [int(code) for code in codes]


@contextmanager
def joined(parallel: str, target: TargetSection, *, stage: str) -> Iterator[Group]:
    """The group that a launcher has started, for a block that all its processes go through.

    On all ranks but 0 the console is quiet in it. The group stays when the block ends: later stages
    use it. Raises ConfigError where there are several processes and the stage's key `parallel` has
    nothing for them to split, LostProcess where one of them has ended or does not answer.
    """
    processes, key = world_size(), f"{stage}.parallel"
    if processes == 1:
        yield Group()
        return
    if parallel == "none":
        problem = f"{processes} processes were started, and each would do all of it"
        fix = f"set {key}=tensor to split the target over them, or start them without a launcher"
        if stage == "features":
            fix += ", each with its --shard i/n"
        raise ConfigError(problem, where=f"{key}=none", fix=fix)
    quiet = console.quiet
    try:
        group = _join(target, _TIMEOUT_SECONDS)
        console.quiet = quiet or group.rank > 0
        try:
            yield group
        except BaseException as error:
            group.give_up(error)
            raise
    except RuntimeError as error:
        if not _comes_from_the_group(error):
            raise
        problem = f"another of the {processes} processes has ended or does not answer"
        fix = "see its own error, then start all again: what is committed stays"
        raise LostProcess(problem, where=f"{key}=tensor", fix=fix) from error
    finally:
        console.quiet = quiet


def require_several(group: Group, parallel: str, *, stage: str) -> None:
    """Raise ConfigError where the target is to be split and this process is alone."""
    if parallel == "tensor" and group.size == 1:
        problem = "one process cannot split the target"
        fix = f"start it with torchrun --nproc-per-node N -m pipeline.cli {stage} …"
        raise ConfigError(problem, where=f"{stage}.parallel=tensor", fix=fix)


def exit_code(error: BaseException) -> int:
    """What `error` makes of a command."""
    if isinstance(error, Eagle3Error):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _join(target: TargetSection, timeout: float) -> Group:
    """The launcher's group, over NCCL or gloo as the target's device needs, and one for control."""
    import torch
    from torch import distributed

    from pipeline.target.arithmetic import pick_device

    cuda, device = pick_device(target.device).type == "cuda", None
    if cuda:  # connected at once: what NCCL takes is not free when a decoder counts its memory
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    if not distributed.is_initialized():
        backend = "nccl" if cuda else "gloo"
        distributed.init_process_group(backend, timeout=limit, device_id=device)
    control = distributed.new_group(backend="gloo", timeout=limit)
    group = Group(distributed.get_rank(), distributed.get_world_size(), timeout, control)
    atexit.register(group.leave)
    return group


def _comes_from_the_group(error: BaseException) -> bool:
    """gloo raises plain RuntimeErrors that begin with the file of gloo they come from."""
    from torch import distributed

    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error).partition("]")[0]
