"""All configured sources, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter

from pipeline.config import SourceSpec
from pipeline.errors import DataError
from pipeline.prompts.draw import Group, draw
from pipeline.prompts.files import read_file
from pipeline.prompts.hub import read_hub
from pipeline.prompts.records import FORBIDS_COMPETING_MODELS
from pipeline.records import Prompt


def load_prompts(specs: Sequence[SourceSpec], *, seed: int) -> list[Prompt]:
    """As `stream_prompts`, all of them in memory."""
    return list(stream_prompts(specs, seed=seed))


def stream_prompts(
    specs: Sequence[SourceSpec], *, seed: int, group: Group = attrgetter("category")
) -> Iterator[Prompt]:
    """Prompts of every source in configured order, one at a time. Draws of a
    `limit` are even over groups.

    Raises DataError for a missing or malformed source, MissingPackage for a hub data set without
    datasets. A source that cannot be read at all is told before the first prompt.
    """
    for spec in specs:
        if next(read_source(spec), None) is None:
            fix = "remove the source or correct its path"
            raise DataError("holds no prompts", where=spec.source, fix=fix)
    for spec in specs:
        yield from draw(read_source(spec), spec.limit, seed, group)


def read_source(spec: SourceSpec) -> Iterator[Prompt]:
    """Prompts of one source, `read_at_most` of them; its `limit` is the caller's to draw."""
    records = itertools.islice(_read(spec), spec.read_at_most)
    return (_with_configured_fields(prompt, spec) for prompt in records)


def _read(spec: SourceSpec) -> Iterator[Prompt]:
    kind, separator, name = spec.source.partition(":")
    if separator and kind == "hub":
        return read_hub(name, spec)
    return read_file(spec.source, field=spec.field)


def _with_configured_fields(prompt: Prompt, spec: SourceSpec) -> Prompt:
    """The source's configured licence, category and sampling win over the record's own.

    Forbidding terms win over any licence.
    """
    forbidden = spec.forbids_competing_models or prompt.license == FORBIDS_COMPETING_MODELS
    configured = {
        "license": FORBIDS_COMPETING_MODELS if forbidden else spec.license,
        "category": spec.category,
        "sampling": spec.sampling,
    }
    update = {field: value for field, value in configured.items() if value}
    return prompt.model_copy(update=update) if update else prompt
