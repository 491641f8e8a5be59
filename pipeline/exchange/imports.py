"""A head of another trainer as a head directory of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import parse
from pipeline.console import notice
from pipeline.errors import HeadError
from pipeline.heads.checkpoint import (
    CARD,
    CONFIG,
    WEIGHTS,
    ForeignHead,
    HeadCard,
    has_targets_embedding,
    last_part,
    read_card,
)
from pipeline.heads.registry import read_foreign, save_head
from pipeline.records import TargetContract, match_contracts
from pipeline.store.hub import HUB, commit_of
from pipeline.store.location import Location, as_directory
from pipeline.store.output import output_directory
from pipeline.target.files import without_weights
from pipeline.target.open import open_target

_PASS_ITS_TARGET = "pass the target that the head was trained for with --target"


def import_head(source: str, *, target: str, out: str, chat_template: str | None = None) -> None:
    """Read the head at `source` (directory or fsspec URI, either dialect of an EAGLE-3 head, or a
    block drafter in the layout of DFlashDraftModel) and write ours to `out`.

    The contract is made from `target`. A head that our own export wrote has a card, and keeps its
    provenance and metrics; any other one says only where it was imported from. Raises HeadError,
    TargetError or ContractMismatch. `chat_template` is as in the configuration, for targets that
    have none; one that the card holds is taken from there.
    """
    foreign, card = _read(source)
    # The automatic capture layers are what every loader takes for a head that names none.
    settings: dict[str, Any] = {"source": target, "chat_template": chat_template}
    if card:
        settings["chat_template"] = chat_template or card.contract.chat_template
        settings["chat_template_kwargs"] = card.contract.chat_template_kwargs
    section = parse({"target": settings}, where="import").target
    opened = open_target(section)
    contract = _contract(foreign, opened.contract, where=f"{source}/{CONFIG}")
    foreign = foreign.complete(foreign, opened.weights, f"head {source}")
    if not has_targets_embedding(foreign, opened.weights):
        problem = "embed_tokens.weight is not the target's, which a head of this kind reads"
        fix = f"{_PASS_ITS_TARGET}, or import a head trained with its embedding frozen"
        raise HeadError(problem, where=source, fix=fix)
    if card is not None:
        match_contracts(contract, card.contract, where=f"head {source}")
    with output_directory(out, last=CARD) as folder:
        save_head(folder, foreign.head, _imported_card(contract, card, foreign, source))
    layers = "its own" if foreign.capture_layers else "the loaders' default"
    aux_layers = f"aux layers {list(contract.capture_layers)} ({layers})"
    notice("import", f"{foreign.dialect} head at {out}, {aux_layers}")


def _read(source: str) -> tuple[ForeignHead, HeadCard | None]:
    """The head at `source`, and its card when our own export wrote one. Raises HeadError."""
    location = Location(source)
    stored = list(location.names())
    names = [name for name in stored if name.endswith((".json", ".safetensors"))]
    if WEIGHTS in names:  # what lies beside it is not read, so not fetched either
        names = [name for name in names if name.endswith(".json") or name == WEIGHTS]
    if CONFIG not in names:
        fix = "pass the directory of a head"
        raise HeadError(f"has no {CONFIG}", where=f"head {source}", fix=fix)
    if not any(".safetensors" in name for name in names):  # nor an index
        raise without_weights(stored, f"head {source}", error=HeadError)
    with as_directory(location, names) as directory:
        card = directory / CARD
        return read_foreign(directory), read_card(card) if card.is_file() else None


def _contract(foreign: ForeignHead, contract: TargetContract, *, where: str) -> TargetContract:
    """The target's `contract` with the head's aux layers. Raises HeadError if they do not fit."""
    shape = foreign.head.shape
    for name, of_head, of_target in (
        (shape.width_field, shape.target_width, contract.hidden_size),
        ("vocab_size", shape.vocab_size, contract.vocab_size),
    ):
        if of_target != of_head:
            problem = f"{name} is {of_head}, the target's {of_target}"
            raise HeadError(problem, where=where, fix=_PASS_ITS_TARGET)
    low, middle, _ = default = contract.capture_layers
    if foreign.reads_final_state:
        default = low, middle, contract.num_layers - 1
    layers = foreign.capture_layers or default
    if max(layers) >= contract.num_layers:
        reached = f"its aux layers reach output index {max(layers)}"
        problem = f"{reached}, the target has {contract.num_layers} layers"
        raise HeadError(problem, where=where, fix=_PASS_ITS_TARGET)
    return contract.model_copy(update={"capture_layers": layers})


def _imported_card(
    contract: TargetContract, card: HeadCard | None, foreign: ForeignHead, source: str
) -> HeadCard:
    """The card of the new head: what the old one said, if there was one, and where it came from."""
    origin: dict[str, Any] = {
        "imported from": commit_of(source)
        if source.startswith(HUB)
        else last_part(str(Path(source).resolve())),
        "format": foreign.dialect,
    }
    if card is None:
        return HeadCard(contract, origin)
    return HeadCard(contract, {**card.provenance, **origin}, card.metrics)
