"""All configured sources, one after another."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from pipeline.config import SourceSpec
from pipeline.errors import DataError
from pipeline.prompts.builtin import read_builtin
from pipeline.prompts.files import read_file
from pipeline.prompts.hub import read_hub
from pipeline.prompts.packages import read_package
from pipeline.prompts.records import FORBIDS_COMPETING_MODELS
from pipeline.records import Prompt


def load_prompts(specs: Sequence[SourceSpec], *, seed: int) -> list[Prompt]:
    """Prompts of every source in configured order, each within its own `limit`.

    Raises DataError for a missing or malformed source, MissingPackage for a pip package that is
    not installed.
    """
    prompts: list[Prompt] = []
    for spec in specs:
        records = itertools.islice(_read(spec), spec.read_at_most)
        of_source = [_with_configured_fields(prompt, spec) for prompt in records]
        if not of_source:
            fix = "remove the source or correct its path"
            raise DataError("holds no prompts", where=spec.source, fix=fix)
        prompts += balanced(of_source, spec.limit, seed)
    return prompts


def balanced(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts, spread evenly over categories, in their original order.

    The draw depends on the prompts and the seed alone, and a smaller draw is part of a larger one.
    """
    if limit is None or len(prompts) <= limit:
        return list(prompts)
    by_category: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    for category, indices in by_category.items():
        # A generator per category: adding a category does not reshuffle the others.
        random.Random(f"{seed}:{category}").shuffle(indices)
    drawn: list[int] = []
    while len(drawn) < limit:
        for category in sorted(by_category):
            if by_category[category] and len(drawn) < limit:
                drawn.append(by_category[category].pop())
    return [prompts[index] for index in sorted(drawn)]


def _read(spec: SourceSpec) -> Iterator[Prompt]:
    kind, separator, name = spec.source.partition(":")
    if separator and kind == "package":
        return read_package(name)
    if separator and kind == "builtin":
        return read_builtin(name)
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
    return prompt.model_copy(update={field: value for field, value in configured.items() if value})
