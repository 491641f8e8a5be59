"""What can go wrong through no fault of the code.

    Eagle3Error
    ├── ConfigError            a key, a value or a combination in the run's YAML
    ├── DataError              a prompts file, a sample or a record inside one
    ├── TargetError            the target model cannot be found, read or used
    │   ├── TemplateError      it has no chat template, or one that cannot be rendered
    │   ├── UnsupportedModel   the decoder does not know its architecture
    │   └── ContractMismatch   data or a head made for another target
    ├── HeadError              a head directory that is incomplete or does not fit
    ├── StoreError             a run directory that cannot be read or written
    │   ├── CorruptShard       bytes that do not match their checksum or layout
    │   │   └── ConsumedShard  a training that follows features is past it, and has deleted it
    │   ├── MissingStage       the parent stage has not been begun
    │   │   └── UnfinishedStage  it has been begun, others may be at work on it (75)
    │   ├── StageConflict      finished or begun work that belongs to another config or parent
    │   ├── StageIncomplete    this process's part is done, others' parts are not (75)
    │   ├── TakenOver          another attempt goes on with what this process had claimed (75)
    │   └── StoreUnavailable   an outage that was longer than the retries (75)
    ├── WorkersDied            the processes that should share a stage's work end early (75)
    ├── StageEnded             a stage that ran beside another one failed, with its exit code
    ├── EndpointError          a server that is asked something refuses it, or replies otherwise
    │   └── EndpointsUnavailable  none has answered for too long, or the quota is used up (75)
    ├── LostProcess            another process of the launcher has ended (75)
    ├── OutOfMemory            a stage did not start, or half a batch did not fit either (75)
    ├── TooLargeForMemory      what cannot be halved without a person's decision did not fit
    ├── MissingPackage         an optional dependency that this command needs
    ├── NotLossless            speculative output differs from plain output (1)
    └── Regression             an evaluation is worse than an earlier one (1)

Each carries *where* (file and field), *problem* and *fix*; the command line prints them on one
line and exits with `exit_code`, without a traceback: 75 (EX_TEMPFAIL) where the same command may
succeed later as it is, 2 where a person has to act first. A broken invariant of our own is an
`AssertionError` and keeps its traceback.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TRY_AGAIN = 75


class Eagle3Error(Exception):
    """A user-facing error: `where: problem (fix: …)`."""

    exit_code = 2

    def __init__(self, problem: str, *, where: str, fix: str) -> None:
        self.problem, self.where, self.fix = problem, where, fix
        super().__init__(f"{where}: {problem} (fix: {fix})")

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross from one process to another."""
        return _again, (type(self), self.problem, self.where, self.fix)


def _again(kind: type[Eagle3Error], problem: str, where: str, fix: str) -> Eagle3Error:
    return kind(problem, where=where, fix=fix)


class ConfigError(Eagle3Error):
    """The configuration names a key or a value that cannot be used."""


class DataError(Eagle3Error):
    """An input record is malformed."""


class TargetError(Eagle3Error):
    """The target model cannot be found, read or used."""


class TemplateError(TargetError):
    """The target's chat template is missing or cannot be rendered."""


class UnsupportedModel(TargetError):
    """The decoder does not support the target's architecture."""


class ContractMismatch(TargetError):
    """Two artefacts were made for different targets; names the field and both values."""


class HeadError(Eagle3Error):
    """A head directory is incomplete or has tensors of the wrong shape."""


class StoreError(Eagle3Error):
    """A run directory cannot be read or written."""


class CorruptShard(StoreError):
    """A shard's bytes do not match its checksum or its layout."""


class ConsumedShard(CorruptShard):
    """States that are there no more: a checkpoint is past them, and they were to be deleted."""


class MissingStage(StoreError):
    """The stage that this one reads from has no manifest."""


class UnfinishedStage(MissingStage):
    """It has none yet: somebody has begun it."""

    exit_code = TRY_AGAIN


class StageConflict(StoreError):
    """The directory holds work for another config or another parent; names both hashes."""


class StageIncomplete(StoreError):
    """This process has done its part, and others have not: the same command later finishes."""

    exit_code = TRY_AGAIN


class TakenOver(StoreError):
    """This process was silent for so long that another one has taken its work over."""

    exit_code = TRY_AGAIN


class StoreUnavailable(StoreError):
    """The storage failed in a way that passes, for longer than it is tried again."""

    exit_code = TRY_AGAIN


class WorkersDied(Eagle3Error):
    """Processes on other machines that should do the work are gone, or cannot be reached."""

    exit_code = 75


class StageEnded(Eagle3Error):
    """A stage that was to run beside another one has ended early, after a line of its own."""

    def __init__(self, problem: str, *, where: str, fix: str, exit_code: int = 1) -> None:
        super().__init__(problem, where=where, fix=fix)
        self.exit_code = exit_code


class EndpointError(Eagle3Error):
    """A server that is asked something cannot be used: it refuses, or replies to something else."""


class EndpointsUnavailable(EndpointError):
    """The servers are gone, or too busy, for longer than they are waited for."""

    exit_code = TRY_AGAIN


class OutOfMemory(Eagle3Error):
    """Memory ran out, as a stage started or with half the batch: there may be more of it later."""

    exit_code = TRY_AGAIN


class TooLargeForMemory(Eagle3Error):
    """Memory ran out for what is not halved unasked, since it decides what comes out."""


class LostProcess(Eagle3Error):
    """Another process of the same launcher has ended or does not answer: all must start again."""

    exit_code = 75  # EX_TEMPFAIL: try again


class MissingPackage(Eagle3Error):
    """An optional dependency is not installed."""


class NotLossless(Eagle3Error):
    """Speculative greedy output differs from plain greedy output."""

    exit_code = 1


class Regression(Eagle3Error):
    """An evaluation is worse than the one that it is held against, by more than noise."""

    exit_code = 1


#: Stage → what makes it smaller.
_SMALLER = {
    "train": (
        "train.batch_tokens",
        "set train.activation_checkpointing=true; or lower it, which gives another head: with "
        "--force, or under another run.uri=…",
    ),
    "eval": ("eval.tree", "lower its nodes"),
}


#: Of libraries that have no exception of their own for it: torch's allocators, cuBLAS, C++, the
#: dynamic linker, threads, the operating system's own text.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "bad_alloc",
    "out of memory",
    "can't start new thread",
    "failed to map segment",
    "failed to allocate",
)
_NO_MEMORY_KINDS = (RuntimeError, OSError, ImportError, SystemError, ValueError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on an accelerator."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    said = any(words.lower() in text for words in _NO_MEMORY)
    if said and isinstance(error, _NO_MEMORY_KINDS):
        return True
    # Code in C that met a failed allocation forgets to say so: what it was called by says more.
    cause = error.__cause__ or error.__context__
    return (
        isinstance(error, SystemError | ImportError)
        and cause is not None
        and is_out_of_memory(cause)
    )


def memory_cause(error: BaseException) -> BaseException | None:
    """The failed allocation that `error` is or was raised for: libraries that are asked whether a
    file is right raise it as well, and it says nothing of the file."""
    if isinstance(error, OutOfMemory | TooLargeForMemory):
        return None
    if is_out_of_memory(error):
        return error
    cause = error.__cause__ or error.__context__
    return memory_cause(cause) if isinstance(error, Eagle3Error) and cause else None


def out_of_memory(error: BaseException, *, where: str) -> OutOfMemory:
    """The error of a failed allocation outside of what can be made smaller."""
    fix = (
        "run the same command again when other processes have ended, "
        "or take a machine or a device with more memory"
    )
    return OutOfMemory(f"out of memory: {brief(error)}", where=where, fix=fix)


@contextmanager
def memory_explained(stage: str) -> Iterator[None]:
    """A block whose failed allocations are raised as TooLargeForMemory.

    It is what a stage does once it has started, with batches whose size shapes the output.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Eagle3Error) or not is_out_of_memory(error):
            raise
        where, smaller = _SMALLER[stage]
        fix = f"{smaller}; or take a machine or a device with more memory"
        raise TooLargeForMemory(f"out of memory: {brief(error)}", where=where, fix=fix) from error


def brief(error: BaseException) -> str:
    """What an exception of another library says, short enough for a line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
