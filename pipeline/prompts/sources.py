"""All configured sources, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.config import SourceSpec
from pipeline.errors import DataError
from pipeline.prompts.bad_records import BadRecords
from pipeline.prompts.draw import EVEN, Balance, draw
from pipeline.prompts.files import read_file
from pipeline.prompts.hub import read_hub
from pipeline.prompts.ids import IsNew, remembered, source_names, with_unique_ids
from pipeline.prompts.records import FORBIDS_COMPETING_MODELS
from pipeline.records import Prompt


def load_prompts(specs: Sequence[SourceSpec], *, seed: int) -> list[Prompt]:
    """As `stream_prompts`, all of them in memory."""
    return list(stream_prompts(specs, seed=seed))


def stream_prompts(
    specs: Sequence[SourceSpec],
    *,
    seed: int,
    balance: Balance = EVEN,
    bad: BadRecords | None = None,
    is_new: IsNew | None = None,
) -> Iterator[Prompt]:
    """Prompts of every source in configured order, each within its own `limit`, one at a time.

    Draws follow `balance`. No two prompts have both source and id in common; `is_new` remembers
    which there were. Raises DataError for a missing or malformed source, and a bad record unless it
    may go into `bad`; MissingPackage for a hub data set without datasets. A source that cannot be
    read at all is told before the first prompt.
    """
    is_new = is_new or remembered()
    for spec in specs:
        if next(read_source(spec, None if bad is None else BadRecords()), None) is None:
            fix = "remove the source or correct its path"
            raise DataError("holds no prompts", where=spec.source, fix=fix)
    for spec, name in zip(specs, source_names(specs), strict=True):
        prompts = with_unique_ids(read_source(spec, bad, name), is_new)
        yield from draw(prompts, spec.limit, seed, balance)


def read_source(
    spec: SourceSpec, bad: BadRecords | None = None, name: str | None = None
) -> Iterator[Prompt]:
    """Prompts of one source, from `read_at_most` records; its `limit` is the caller's to draw."""
    prompts = _read(spec, bad, name or source_names([spec])[0])
    return (_with_configured_fields(prompt, spec) for prompt in prompts)


def _read(spec: SourceSpec, bad: BadRecords | None, name: str) -> Iterator[Prompt]:
    kind, separator, _ = spec.source.partition(":")
    if separator and kind == "hub":
        return read_hub(spec, name, bad)
    return read_file(spec, name, bad)


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
