"""Our head directory in the dialect of another system, and where a head is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pipeline.console import notice
from pipeline.eagle3.any_head import head_directory, load_any_head, save_any_head
from pipeline.eagle3.chained.head import ChainedHead
from pipeline.eagle3.chained.mtp import export_mtp
from pipeline.eagle3.checkpoint import (
    CARD,
    HeadCard,
    export_speculators,
    load_head,
)
from pipeline.eagle3.head import DraftingHead, Eagle3Head
from pipeline.eagle3.published import published
from pipeline.errors import HeadError, StoreError
from pipeline.exchange.model_card import MODEL_CARD, model_card
from pipeline.store.location import Location
from pipeline.store.manifest import read_report
from pipeline.target.open import Target, open_contracted_target

Format = Literal["sglang", "speculators", "mtp"]

#: What vLLM drafts a round when the head does not say how far it was unrolled.
_SPECULATIVE_TOKENS = 3


def export_head(
    head_uri: str,
    *,
    format: Format,
    out: str,
    target: str | None = None,
    report: str | None = None,
) -> None:
    """Write the head at `head_uri` to `out` (directories or fsspec URIs), with a model card.

    `report` is the report.json of its evaluation, or the URI of the run, for the card's figures.

    `target` says where the target is now; the default is the contract's own source, which an
    exported head names without its path. SGLang's dialect does not need it. Raises HeadError,
    TargetError or ContractMismatch.
    """
    with head_directory(head_uri) as directory:
        read = load_head if format == "speculators" else load_any_head
        head, card = read(directory)
    _check_format(head, format, where=f"head {head_uri}")
    evaluated = read_report(report) if report else None
    described = model_card(
        head, published(card), format=format, report=evaluated, where=report or ""
    )
    with output_directory(out) as folder:
        if format == "sglang":
            save_any_head(folder, head, published(card))
        elif isinstance(head, ChainedHead):
            opened = open_contracted_target(card.contract, target, where=f"head {head_uri}")
            given = opened.weights.embedding(), opened.weights.lm_head()
            export_mtp(folder, head, published(card), embedding=given[0], lm_head=given[1])
            _say_who_drafts(head.shape.heads)
        else:
            assert isinstance(head, Eagle3Head), "load_head reads no other"
            opened = open_contracted_target(card.contract, target, where=f"head {head_uri}")
            _export_speculators(folder, head, card, opened)
        (folder / MODEL_CARD).write_text(described, encoding="utf-8")
    notice("export", f"{format}: {out}")


def _check_format(head: DraftingHead, format: Format, *, where: str) -> None:
    """Raise HeadError for a kind of head that a format has no place for."""
    if isinstance(head, ChainedHead) and format == "sglang":
        problem = "SGLang's EAGLE-3 class has one head, this one is a chain"
        raise HeadError(problem, where=where, fix="export with --format mtp")
    if format == "mtp" and not isinstance(head, ChainedHead):
        problem = "MTP layers join token and hidden state before the layer, this head inside it"
        fix = "export with --format sglang, or train with train.head_config.heads above 1"
        raise HeadError(problem, where=where, fix=fix)


def _say_who_drafts(heads: int) -> None:
    """What today's servers do with more than one head of this layout."""
    if heads > 1:
        vllm = "vLLM's MiMoMTPModel drafts with the first head alone"
        notice("export", f"{heads} heads: {vllm}, SGLang's MiMoMTP keeps the last it reads")


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


def _export_speculators(folder: Path, head: Eagle3Head, card: HeadCard, target: Target) -> None:
    config = json.loads((target.directory / "config.json").read_text(encoding="utf-8"))
    export_speculators(
        folder,
        head,
        published(card),
        embedding=target.weights.embedding(),
        verifier=_public_name(target),
        architectures=config.get("architectures") or [],
        speculative_tokens=_speculative_tokens(card),
    )


def _public_name(target: Target) -> str:
    """What transformers can load: the hub id. Of a directory only its name, to be completed."""
    resolved = target.resolved
    on_hub = resolved.revision != "local" and not resolved.source.startswith("package:")
    if on_hub:
        return resolved.source
    name = resolved.directory.resolve().name
    fix = "before serving HEAD alone, set verifier.name_or_path to its directory"
    notice("export", f"config.json calls the target {name}, without a path: {fix}")
    return name


def _speculative_tokens(card: HeadCard) -> int:
    """Tokens to draft a round: as many steps as the head was unrolled for."""
    steps = card.provenance.get("config", {}).get("train", {}).get("ttt_steps")
    return steps if isinstance(steps, int) and steps > 0 else _SPECULATIVE_TOKENS
