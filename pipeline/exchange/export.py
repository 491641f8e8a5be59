"""Our head directory in the dialect of another system."""

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
from pipeline.heads.checkpoint import CARD, HeadCard, published
from pipeline.heads.registry import algorithm_of, open_head
from pipeline.store.backend import explain_os_error
from pipeline.store.hub import HUB
from pipeline.store.location import Location
from pipeline.store.manifest import read_report
from pipeline.store.output import Publication, output_directory
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
    license: str | None = None,
    publication: Publication | None = None,
) -> None:
    """Write the head at `head_uri` to `out` (directories or fsspec URIs), with a model card.

    With `--format gguf`, an `out` that ends in .gguf is the file itself, alone. To a repository on
    the Hub (`hub:…`) it is only uploaded if `publication` says so. `license` is the head's, for the
    card: its owners' choice, which follows from no file.

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
        license=license,
    )
    is_file = format == "gguf" and out.endswith(_GGUF) and not out.startswith(HUB)
    written = (
        _output_file(out)
        if is_file
        else output_directory(
            out, last=CARD, publication=publication, leaving=_leaving(published(card), license)
        )
    )
    with written as folder:
        request = Export(
            format, lambda: open_contracted_target(card.contract, target, where=where), verifier
        )
        chosen.checkpoint.export(folder, head, published(card), request)
        try:
            (folder / MODEL_CARD).write_text(described, encoding="utf-8")
        except OSError as error:
            raise explain_os_error(error, out, writing=True) from error
    if not out.startswith(HUB):  # else it has been said what was uploaded, if anything
        notice("export", f"{format}: {out}")


def _leaving(card: HeadCard, license: str | None) -> tuple[str, ...]:
    """What an upload gives away beside weights, in a line each."""
    counts = card.provenance.get("licenses") or {}
    licenses = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    dropped = card.provenance.get("rejected", {}).get("synth", {})
    personal = sum(count for name, count in dropped.items() if name.startswith("pii"))
    return (
        f"licence of the head: {license or 'not stated (--license)'}",
        f"target: {card.contract.source}, whose terms hold for what was trained on its replies",
        f"prompts by licence: {licenses or 'unknown'}",
        f"prompts left out for personal data: {personal:,}",
        "eagle3.json names data sources, settings and versions; no path, bucket or project",
    )


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
