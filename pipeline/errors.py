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
    │   ├── MissingStage       the parent stage has not been completed
    │   ├── StageConflict      finished or begun work that belongs to another config or parent
    │   └── StageIncomplete    this process's part is done, others' parts are not (exit code 75)
    ├── WorkersDied            the processes that should share a stage's work end early (75)
    ├── EndpointError          a server that should answer prompts cannot be reached or used
    ├── MissingPackage         an optional dependency that this command needs
    └── NotLossless            speculative output differs from plain output (exit code 1)

Each carries *where* (file and field), *problem* and *fix*; the command line prints them on one
line and exits with `exit_code`, without a traceback. A broken invariant of our own is an
`AssertionError` and keeps its traceback.
"""

from __future__ import annotations

from typing import Any


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


class MissingStage(StoreError):
    """The stage that this one reads from has no manifest."""


class StageConflict(StoreError):
    """The directory holds work for another config or another parent; names both hashes."""


class StageIncomplete(StoreError):
    """This process has done its part, and others have not: the same command later finishes."""

    exit_code = 75  # EX_TEMPFAIL: try again


class WorkersDied(Eagle3Error):
    """Processes on other machines that should do the work are gone, or cannot be reached."""

    exit_code = 75


class EndpointError(Eagle3Error):
    """A server that should answer prompts cannot be reached, or does not do what was asked."""


class MissingPackage(Eagle3Error):
    """An optional dependency is not installed."""


class NotLossless(Eagle3Error):
    """Speculative greedy output differs from plain greedy output."""

    exit_code = 1
