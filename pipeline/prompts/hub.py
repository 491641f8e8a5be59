"""Prompts from a Hugging Face data set, streamed: nothing is downloaded that is not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.config import SourceSpec
from pipeline.errors import DataError, MissingPackage
from pipeline.prompts.records import to_prompt
from pipeline.records import Prompt


def read_hub(name: str, spec: SourceSpec) -> Iterator[Prompt]:
    """Prompts of one split of `ORG/NAME`. Raises DataError for a set or a record that is broken."""
    for number, record in enumerate(_records(name, spec, f"hub:{name}"), start=1):
        where, sample_id = f"hub:{name}: row {number}", f"{name}:{number}"
        yield to_prompt(record, where=where, sample_id=sample_id, source=name, field=spec.field)


def count_hub(name: str, spec: SourceSpec) -> int | None:
    """Records of the split as its data set tells, None where it does not."""
    try:
        from datasets import load_dataset_builder  # type: ignore[import-untyped]

        builder = load_dataset_builder(name, spec.subset, revision=spec.revision)
        return int(builder.info.splits[spec.split].num_examples) or None
    except Exception:  # as below; whoever reads the records says what is wrong
        return None


def _records(name: str, spec: SourceSpec, where: str) -> Iterator[Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        fix = "pip install datasets, or export the data set to JSONL and name that file"
        raise MissingPackage("needs the pip package datasets", where=where, fix=fix) from None
    # At the start or in the middle, the library raises whatever network, parser or layout cause.
    try:
        records: Iterable[Any] = load_dataset(
            name, spec.subset, split=spec.split, revision=spec.revision, streaming=True
        )
        yield from records
    except Exception as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"split {spec.split!r} cannot be loaded: {cause}"
        checks = "check the name, the subset, the split and the network"
        fix = f"{checks}, or export the data set to JSONL"
        raise DataError(problem, where=where, fix=fix) from error
