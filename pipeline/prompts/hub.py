"""Prompts from a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import DataError, MissingPackage
from pipeline.prompts.record import to_prompt
from pipeline.records import Prompt


def read_hub(name: str, split: str) -> Iterator[Prompt]:
    """Prompts of one split of `ORG/NAME`. Raises DataError when it cannot be loaded or a record is malformed."""
    where = f"hub:{name}"
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]
    except ImportError:
        raise MissingPackage(
            "needs the pip package datasets", where=where, fix="pip install datasets, or export the data set to JSONL and name that file"
        ) from None
    try:
        records = load_dataset(name, split=split)
    except Exception as error:  # the library raises whatever the network, the parser or the repository's layout cause
        problem = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"split {split!r} cannot be loaded: {problem}", where=where, fix="check the name, the split and the network, or export the data set to JSONL"
        ) from error
    for number, record in enumerate(records, start=1):
        yield to_prompt(record, where=f"{where}: row {number}", id=f"{name}:{number}", source=name)
