"""Our head directory in the dialect of another system."""

from __future__ import annotations

import json
from typing import Literal

from pipeline.config import TargetSection
from pipeline.console import notice
from pipeline.eagle3.checkpoint import (
    HEAD_FILES,
    HeadCard,
    export_speculators,
    load_head,
    save_head,
)
from pipeline.exchange.publish import publishing
from pipeline.store.fetch import as_directory
from pipeline.store.location import Location
from pipeline.target.open import Target, open_target
from pipeline.target.resolve import ResolvedTarget

Format = Literal["sglang", "speculators"]

#: What vLLM drafts a round when the head does not say how far it was unrolled.
_SPECULATIVE_TOKENS = 3


def export_head(head_uri: str, *, format: Format, out: str, target: str | None = None) -> None:
    """Write the head at `head_uri` to `out` (directories or fsspec URIs).

    `target` says where the target is now; the default is the contract's own source. SGLang's
    dialect does not need it. Raises HeadError, TargetError or ContractMismatch.
    """
    with as_directory(Location(head_uri), HEAD_FILES) as directory:
        head, card = load_head(directory)
    with publishing(out) as folder:
        if format == "sglang":
            save_head(folder, head, card)
        else:
            target_now = _target_of(card, target, where=f"head {head_uri}")
            export_speculators(
                folder,
                head,
                card,
                embedding=target_now.weights.embedding(),
                verifier=_loadable_name(target_now.resolved),
                architectures=json.loads(
                    (target_now.directory / "config.json").read_text(encoding="utf-8")
                ).get("architectures")
                or [],
                speculative_tokens=_unrolled(card),
            )
    notice("export", f"{format}: {out}")


def _target_of(card: HeadCard, source: str | None, *, where: str) -> Target:
    """The head's target on this machine, checked against the contract."""
    contract = card.contract
    section = TargetSection.model_validate(
        {
            "source": source or contract.source,
            "revision": contract.revision if source is None else None,
            "dtype": contract.dtype,
            "capture_layers": contract.capture_layers,
            "chat_template_kwargs": contract.chat_template_kwargs,
        }
    )
    return open_target(section, expected=contract, where=where)


def _loadable_name(target: ResolvedTarget) -> str:
    """What transformers can load: the hub id, or the directory for what came from a disk or a package."""
    on_hub = target.revision != "local" and not target.source.startswith("package:")
    return target.source if on_hub else str(target.directory.resolve())


def _unrolled(card: HeadCard) -> int:
    """Tokens to draft a round: as many steps as the head was unrolled for."""
    steps = card.provenance.get("config", {}).get("train", {}).get("ttt_steps")
    return steps if isinstance(steps, int) and steps > 0 else _SPECULATIVE_TOKENS
