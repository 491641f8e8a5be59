"""Prompts from a Hugging Face data set, streamed: nothing is downloaded that is not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.config import SourceSpec
from pipeline.errors import DataError, MissingPackage
from pipeline.prompts.records import to_prompt
from pipeline.records import Prompt


def read_hub(name: str, spec: SourceSpec) -> Iterator[Prompt]:
    """Prompts of one split of `ORG/NAME`. Raises DataError when it cannot be loaded or a record is malformed."""
    where = f"hub:{name}"
    for number, record in enumerate(_records(name, spec, where), start=1):
        yield to_prompt(
            record,
            where=f"{where}: row {number}",
            sample_id=f"{name}:{number}",
            source=name,
            field=spec.field,
        )


def _records(name: str, spec: SourceSpec, where: str) -> Iterator[Any]:
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]
    except ImportError:
        raise MissingPackage(
            "needs the pip package datasets",
            where=where,
            fix="pip install datasets, or export the data set to JSONL and name that file",
        ) from None
    try:  # the library raises whatever the network, the parser or the repository's layout cause, at the start or in the middle
        records: Iterable[Any] = load_dataset(
            name, spec.subset, split=spec.split, revision=spec.revision, streaming=True
        )
        yield from records
    except Exception as error:
        problem = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"split {spec.split!r} cannot be loaded: {problem}",
            where=where,
            fix="check the name, the subset, the split and the network, or export the data set to JSONL",
        ) from error
