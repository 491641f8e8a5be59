"""How many prompts synth will have, before it has selected them."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple

from pipeline.config import SourceSpec, SynthSection
from pipeline.errors import DataError
from pipeline.prompts.bad_records import BadRecords
from pipeline.prompts.extent import estimate_records, record_bytes
from pipeline.prompts.sources import read_source
from pipeline.store.samples import Selection
from pipeline.synth.selection.filters import Step
from pipeline.synth.selection.quality import passing
from pipeline.synth.selection.stream import PromptStream, Tally, filters

#: Sources of fewer bytes of records are read whole.
SMALL_BYTES = 16 << 20
#: Records that stand for larger ones, over all sources and of each at least.
_SAMPLE, _SAMPLE_OF_EACH = 5000, 50


class PromptCounts(NamedTuple):
    """What a plan needs to know. The turns are those that are asked: `max_turns` of a prompt."""

    loaded: int  # prompts that the sources give
    prompts: int  # those that pass the filters and the draws
    asked: int  # turns, over all prompts
    characters: int  # in those turns
    basis: str  # what this rests on


def count_selection(selection: Selection) -> PromptCounts:
    """Of prompts that are selected."""
    asked, characters = selection.asked, selection.characters
    basis = "the prompts that this run has selected"
    return PromptCounts(selection.loaded, selection.prompts, asked, characters, basis)


def estimate_prompts(section: SynthSection, seed: int) -> PromptCounts:
    """Of those that will be. Raises DataError and MissingPackage as reading the sources does."""
    sizes = [record_bytes(spec) for spec in section.sources]
    if all(size is not None for size in sizes) and sum(filter(None, sizes)) <= SMALL_BYTES:
        return _count(section, seed)
    return _extrapolate(section, seed)


def _count(section: SynthSection, seed: int) -> PromptCounts:
    stream, tally = PromptStream(section, seed), Tally(section)
    for prompt in stream:
        tally.add(prompt)
    basis = "all prompts of the sources, filtered"
    return PromptCounts(stream.loaded, tally.prompts, tally.asked, tally.characters, basis)


def _extrapolate(section: SynthSection, seed: int) -> PromptCounts:
    steps, at_most = filters(section, seed), max(_SAMPLE // len(section.sources), _SAMPLE_OF_EACH)
    sampled = [_Sampled(spec, section, steps, at_most) for spec in section.sources]
    loaded = sum(each.records for each in sampled)
    passed = sum(each.scale * each.tally.prompts for each in sampled)
    kept = min(1.0, (section.max_prompts or passed) / passed) if passed else 0.0
    read = sum(each.read for each in sampled)
    unknown = sum(each.is_unknown for each in sampled)
    basis = f"estimated from {read:,} records and the sizes of the sources"
    if unknown:
        basis += f", of which {unknown} do not tell theirs and may hold more"
    return PromptCounts(
        loaded=loaded,
        prompts=round(kept * passed),
        asked=round(kept * sum(each.scale * each.tally.asked for each in sampled)),
        characters=round(kept * sum(each.scale * each.tally.characters for each in sampled)),
        basis=basis,
    )


class _Sampled:
    """The first records of a source, and how many they stand for."""

    def __init__(
        self, spec: SourceSpec, section: SynthSection, steps: list[Step], at_most: int
    ) -> None:
        prompts = list(islice(read_source(spec, BadRecords()), at_most + 1))
        if not prompts:
            fix = "remove the source or correct its path"
            raise DataError("holds no prompts", where=spec.source, fix=fix)
        self.read = len(prompts)
        told = self.read if self.read <= at_most else estimate_records(spec)
        self.is_unknown = told is None
        limits = [limit for limit in (spec.read_at_most, spec.limit) if limit]
        self.records = min([max(told or 0, self.read), *limits])
        self.scale = self.records / self.read
        self.tally = Tally(section)
        for prompt in passing(prompts, steps, Counter()):
            self.tally.add(prompt)
