"""What a head's card says to strangers: which data and target, not where on whose machine.

    target.source  /home/anna/models/llama  →  llama          a hub id or package: stays
    sources        gs://team/a/train.jsonl  →  train.jsonl    hub: and package: stay
    start_from     gs://team/run/head       →  head

Hashes and fingerprints stay: they tell data and target from all others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import Any

from pipeline.eagle3.checkpoint import HeadCard

#: Fields whose text is a place, unless it names something public.
_PLACES = frozenset({"source", "start_from", "head", "imported from", "model"})
_PUBLIC = ("hub:", "package:")
_ON_A_MACHINE = ("/", "~", ".", "file:")


def published(card: HeadCard) -> HeadCard:
    """The card for a head that leaves its run."""
    contract = card.contract
    if contract.revision == "local":
        contract = contract.model_copy(update={"source": last_part(contract.source)})
    return replace(card, contract=contract, provenance=without_places(card.provenance))


def without_places(facts: Any, field: str = "") -> Any:
    """The same JSON; of paths and URIs only the last part is left."""
    if isinstance(facts, dict):
        return {name: without_places(value, name) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [without_places(value, field) for value in facts]
    is_place = isinstance(facts, str) and field in _PLACES and not facts.startswith(_PUBLIC)
    return last_part(facts) if is_place and not is_hub_id(facts) else facts


def last_part(place: str) -> str:
    """Of a path or a URI, on whatever system it was written; never a bucket or a host."""
    protocol, separator, rest = place.replace("\\", "/").partition("://")
    path = rest.partition("/")[2] if separator else protocol
    return PurePath(path).name or "unnamed"


def is_hub_id(text: str) -> bool:
    """`org/name`, and no file beside the run."""
    path = PurePath(text)
    looks_so = text.count("/") == 1 and not text.startswith(_ON_A_MACHINE) and "://" not in text
    return looks_so and path.suffix not in (".jsonl", ".gz", ".ndjson", ".parquet", ".gguf")
