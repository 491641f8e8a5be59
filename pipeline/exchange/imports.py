"""A head of another trainer as a head directory of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.config import TargetSection
from pipeline.console import notice
from pipeline.eagle3.checkpoint import CARD, CONFIG, HeadCard, read_card, save_head
from pipeline.eagle3.formats.foreign import ForeignHead, read_foreign
from pipeline.errors import HeadError
from pipeline.exchange.publish import publishing
from pipeline.records import TargetContract, match_contracts
from pipeline.store.fetch import as_directory
from pipeline.store.location import Location
from pipeline.target.contract import read_contract
from pipeline.target.resolve import ResolvedTarget, resolve
from pipeline.target.weights import TargetWeights

#: Embeddings closer than bfloat16 can tell apart are the same; trainers store them in float32, float16 or bfloat16.
_SAME_EMBEDDING = 2.0**-7


def import_head(
    source: str,
    *,
    target: str,
    out: str,
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16",
) -> None:
    """Read the head at `source` (directory or fsspec URI, either dialect) and write ours to `out`.

    The contract is made from `target`; a head that another export of ours wrote keeps its
    provenance and metrics, a foreign one says only where it was imported from. Raises HeadError,
    TargetError or ContractMismatch.
    """
    location = Location(source)
    if CONFIG not in location.names():
        raise HeadError(
            f"has no {CONFIG}", where=f"head {source}", fix="pass the directory of an EAGLE-3 head"
        )
    with as_directory(
        location, [name for name in location.names() if name.endswith((".json", ".safetensors"))]
    ) as directory:
        foreign = read_foreign(directory)
        own = read_card(directory / CARD) if (directory / CARD).is_file() else None
    section = TargetSection(
        source=target,
        dtype=dtype,
        chat_template_kwargs=own.contract.chat_template_kwargs if own else {},
    )
    resolved = resolve(section)
    contract = _contract(foreign, section, resolved, where=f"{source}/{CONFIG}")
    _check_embedding(foreign, resolved, where=source)
    if own is not None:
        match_contracts(contract, own.contract, where=f"head {source}")
    with publishing(out) as folder:
        save_head(folder, foreign.head, _card(contract, own, foreign, source))
    layers = "its own" if foreign.capture_layers else "the loaders' default"
    notice(
        "import",
        f"{foreign.dialect} head at {out}, aux layers {list(contract.capture_layers)} ({layers})",
    )


def _contract(
    foreign: ForeignHead, section: TargetSection, resolved: ResolvedTarget, *, where: str
) -> TargetContract:
    """The target's contract with the head's aux layers. Raises HeadError when head and target do not fit."""
    # The automatic layers are what every loader takes for a head that names none.
    contract = read_contract(section, resolved)
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(contract, name), getattr(foreign.head.shape, name)
        if ours != theirs:
            raise HeadError(
                f"{name} is {theirs}, the target's {ours}",
                where=where,
                fix="pass the target that the head was trained for with --target",
            )
    layers = foreign.capture_layers or contract.capture_layers
    if max(layers) >= contract.num_layers:
        problem = f"eagle_aux_hidden_state_layer_ids reach output index {max(layers)}, the target has {contract.num_layers} layers"
        raise HeadError(
            problem, where=where, fix="pass the target that the head was trained for with --target"
        )
    return contract.model_copy(update={"capture_layers": layers})


def _check_embedding(foreign: ForeignHead, resolved: ResolvedTarget, *, where: str) -> None:
    """SGLang puts the target's embedding over a head's own; in the other dialect the head's own is used, so it must be the target's."""
    if foreign.embedding is None or foreign.dialect == "sglang":
        return
    ours = TargetWeights(resolved.directory).embedding().float()
    theirs = foreign.embedding.float()
    if theirs.shape != ours.shape or not torch.allclose(
        theirs, ours, rtol=_SAME_EMBEDDING, atol=1e-6
    ):
        problem = "embed_tokens.weight is not the target's: the head was trained with an embedding of its own, which our head does not have"
        raise HeadError(
            problem,
            where=where,
            fix="pass the target that the head was trained for with --target, or a head trained with its embedding frozen",
        )


def _card(
    contract: TargetContract, own: HeadCard | None, foreign: ForeignHead, source: str
) -> HeadCard:
    origin: dict[str, Any] = {
        "imported from": source if "://" in source else str(Path(source).resolve()),
        "format": foreign.dialect,
    }
    return HeadCard(
        contract, {**(own.provenance if own else {}), **origin}, own.metrics if own else {}
    )
