"""Our head directory in the dialect of another system, and where a head is written."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pipeline.console import notice
from pipeline.errors import ConfigError, StoreError
from pipeline.exchange.model_card import MODEL_CARD, model_card
from pipeline.heads.algorithm import Export
from pipeline.heads.checkpoint import CARD, published
from pipeline.heads.registry import algorithm_of, open_head
from pipeline.store.backend import explain_os_error
from pipeline.store.location import Location
from pipeline.store.manifest import read_report
from pipeline.target.open import open_contracted_target

Format = Literal["sglang", "speculators", "mtp", "gguf"]
_GGUF = ".gguf"


def export_head(
    head_uri: str,
    *,
    format: Format,
    out: str,
    target: str | None = None,
    verifier: str | None = None,
    report: str | None = None,
) -> None:
    """Write the head at `head_uri` to `out` (directories or fsspec URIs), with a model card.

    With `--format gguf`, an `out` that ends in .gguf is the file itself, alone.

    `report` is the report.json of its evaluation, or the URI of the run, for the card's figures.

    `target` says where the target is now; the default is the contract's own source, which an
    exported head names without its path. Formats without an embedding do not need it.
    `verifier` is where a server of speculators' dialect finds the target, written as it is. Raises
    HeadError, TargetError, ContractMismatch, or ConfigError for a verifier that no file would name.
    """
    head, card = open_head(head_uri)
    chosen, where = algorithm_of(head), f"head {head_uri}"
    chosen.check_format(format, where=where)
    chosen.check_fields(format, head, where=where)
    if verifier is not None and format != "speculators":
        problem = f"--format {format} has no field for it: the server's command names the target"
        raise ConfigError(problem, where="--verifier", fix="leave it out")
    evaluated = read_report(report) if report else None
    described = model_card(
        head,
        published(card),
        format=format,
        verifier=verifier,
        report=evaluated,
        where=report or "",
    )
    is_file = format == "gguf" and out.endswith(_GGUF)
    with _output_file(out) if is_file else output_directory(out) as folder:
        request = Export(
            format, lambda: open_contracted_target(card.contract, target, where=where), verifier
        )
        chosen.checkpoint.export(folder, head, published(card), request)
        try:
            (folder / MODEL_CARD).write_text(described, encoding="utf-8")
        except OSError as error:
            raise explain_os_error(error, out, writing=True) from error
    notice("export", f"{format}: {out}")


@contextmanager
def _output_file(out: str) -> Iterator[Path]:
    """A directory whose GGUF file becomes `out`. Raises StoreError where something is there."""
    folder, slash, name = out.rpartition("/")
    location, fix = Location(folder + slash or "."), "choose another name, or delete this one first"
    taken = StoreError("exists already", where=f"--out {out}", fix=fix)
    if name in (*location.names(), *location.subdirectories()):
        raise taken
    with tempfile.TemporaryDirectory(prefix="eagle3-") as temporary:
        yield Path(temporary)
        (file,) = Path(temporary).glob(f"*{_GGUF}")
        if not location.create_from(name, file):
            raise taken


@contextmanager
def output_directory(out: str) -> Iterator[Path]:
    """A local directory to write a head to, which becomes `out` when the block ends without an
    error; of two writers at once one succeeds.

    Raises StoreError when `out` holds anything: it may be the head itself, or somebody's home.
    """
    location, fix = Location(out), "choose another directory, or delete this one first"
    taken = StoreError("is not empty", where=f"--out {out}", fix=fix)
    if location.is_local and location.local_path(".").is_file():
        raise StoreError("is a file", where=f"--out {out}", fix="choose another directory")
    if location.names() or location.subdirectories():
        raise taken
    if location.is_local:
        with _beside(location.local_path(".").absolute(), taken) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-") as temporary:
        folder = Path(temporary) / "head"
        yield folder
        # The card is what makes a directory a head of ours, so it goes last.
        names = sorted(file.name for file in folder.iterdir() if file.name != CARD)
        for name in (*names, CARD):
            if not location.create_from(name, folder / name):
                raise taken  # what is there stays: files that were the same may be the other's


@contextmanager
def _beside(final: Path, taken: StoreError) -> Iterator[Path]:
    """A directory that is renamed to `final`. Raises StoreError, `taken` where that holds files."""
    folder = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield folder
        try:
            os.rename(folder, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise taken from None
            raise explain_os_error(error, str(final), writing=True) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
