"""Our head directory in the dialect of another system, and where a head is written."""

from __future__ import annotations

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
        (folder / MODEL_CARD).write_text(described, encoding="utf-8")
    notice("export", f"{format}: {out}")


@contextmanager
def _output_file(out: str) -> Iterator[Path]:
    """A directory whose GGUF file becomes `out`. Raises StoreError where something is there."""
    folder, slash, name = out.rpartition("/")
    location = Location(folder + slash or ".")
    if name in (*location.names(), *location.subdirectories()):
        fix = "choose another name, or delete this one first"
        raise StoreError("exists already", where=f"--out {out}", fix=fix)
    with tempfile.TemporaryDirectory(prefix="eagle3-") as temporary:
        yield Path(temporary)
        (file,) = Path(temporary).glob(f"*{_GGUF}")
        location.put_file(name, file)


@contextmanager
def output_directory(out: str) -> Iterator[Path]:
    """A local directory to write a head to.

    A remote `out` receives its files when the block ends without an error.
    Raises StoreError when `out` holds anything: it may be the head itself, or somebody's home.
    """
    location = Location(out)
    if location.is_local and location.local_path(".").is_file():
        raise StoreError("is a file", where=f"--out {out}", fix="choose another directory")
    if location.names() or location.subdirectories():
        fix = "choose another directory, or delete this one first"
        raise StoreError("is not empty", where=f"--out {out}", fix=fix)
    if location.is_local:
        # Absolute: a head is first written beside its directory, and `.` has no name to add to.
        yield location.local_path(".").absolute()
        return
    with tempfile.TemporaryDirectory(prefix="eagle3-") as temporary:
        folder = Path(temporary) / "head"
        yield folder
        # The card is what makes a directory a head of ours, so it goes last.
        names = sorted(file.name for file in folder.iterdir() if file.name != CARD)
        for name in (*names, CARD):
            location.put_file(name, folder / name)
