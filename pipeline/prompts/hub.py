"""Prompts from a Hugging Face data set, streamed: nothing is downloaded that is not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pipeline.config import SourceSpec
from pipeline.errors import DataError, MissingPackage
from pipeline.prompts.bad_records import BadRecords, usable
from pipeline.prompts.files import plain
from pipeline.prompts.records import to_prompt
from pipeline.records import Prompt


def read_hub(spec: SourceSpec, name: str, bad: BadRecords | None = None) -> Iterator[Prompt]:
    """Prompts of one split; `name` is the source of those that have none of their own.

    Raises DataError for a set that cannot be loaded, and for a broken record as `usable` does.
    """
    rows = enumerate(_records(spec), start=1)
    records = ((f"{spec.source}: row {number}", record) for number, record in rows)

    def read(number: int, where: str, record: Any) -> Prompt:
        sample_id = f"{name}:{number}"
        return to_prompt(
            plain(record), where=where, sample_id=sample_id, source=name, field=spec.field
        )

    yield from usable(islice(records, spec.read_at_most), read, bad)


def count_hub(name: str, spec: SourceSpec) -> int | None:
    """Records of the split as its data set tells, None where it does not."""
    try:
        from datasets import load_dataset_builder  # type: ignore[import-untyped]

        builder = load_dataset_builder(name, spec.subset, revision=spec.revision)
        return int(builder.info.splits[spec.split].num_examples) or None
    except Exception:  # as below; whoever reads the records says what is wrong
        return None


def _records(spec: SourceSpec) -> Iterator[Any]:
    where = spec.source
    try:
        from datasets import load_dataset
    except ImportError:
        fix = "pip install datasets, or export the data set to JSONL and name that file"
        raise MissingPackage("needs the pip package datasets", where=where, fix=fix) from None
    # At the start or in the middle, the library raises whatever network, parser or layout cause.
    try:
        records: Iterable[Any] = load_dataset(
            where.removeprefix("hub:"),
            spec.subset,
            split=spec.split,
            revision=spec.revision,
            streaming=True,
        )
        yield from records
    except Exception as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"split {spec.split!r} cannot be loaded: {cause}"
        checks = "check the name, the subset, the split and the network"
        fix = f"{checks}, or export the data set to JSONL"
        raise DataError(problem, where=where, fix=fix) from error
