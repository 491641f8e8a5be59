"""The prompts of a run, selected once: filtered, drawn, and stored by shards.

    sources ─► licences, duplicates, quality, evaluation sets ─► draw of max_prompts
            ─► prompts/NAME, one shard at a time ─► selection.json

Memory holds the prompts of a few shards and what the filters remember: at most 128 MiB each for
duplicates and near-duplicates, the rest is on disk; with `max_prompts` nine bytes a prompt. Killed
before the selection is written, a run selects again and ends with the same one; afterwards no start
reads a source again.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from pipeline.config import RunConfig, SourceSpec, SynthSection
from pipeline.console import notice
from pipeline.errors import ConfigError, DataError, StageConflict, StoreError
from pipeline.prompts import stream_prompts
from pipeline.prompts.bad_records import BadRecords
from pipeline.prompts.changes import fingerprints, notice_changes
from pipeline.prompts.draw import Balance, Group, by_category, draw
from pipeline.prompts.sources import estimate_records, read_source, record_bytes
from pipeline.records import Prompt, digest
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location
from pipeline.store.samples import (
    PROMPTS,
    SELECTION,
    PromptShard,
    Selection,
    create_selection,
    delete_prompts,
    find_selection,
    load_prompt_shard,
    write_prompts,
)
from pipeline.synth.filters import (
    SeenDigests,
    Step,
    decontaminate,
    first_of_its_kind,
    language_of,
    license_gate,
    max_length,
    passing,
    prompt_steps,
)

__all__ = [
    "PROMPTS",
    "SELECTION",
    "PromptCounts",
    "PromptShard",
    "Selection",
    "draws_from",
    "find_selection",
    "load_prompt_shard",
    "position",
    "prompt_counts",
    "select",
    "synth_section",
]
#: What of the section decides which prompts go into which shard.
_DECIDING = {
    *("sources", "exclude", "allowed_licenses", "quality"),
    *("balance", "category_shares", "max_characters", "max_prompts", "max_turns", "share"),
    "shard_prompts",
}
_CONCURRENT_WRITES = 8
#: Reasons with their counts, as they may be shown.
CleanReasons = Callable[[Mapping[str, int]], dict[str, int]]


def synth_section(config: RunConfig) -> SynthSection:
    """The section that this stage needs; ConfigError without one."""
    if config.synth is None:
        fix = "add a synth section with `sources`"
        raise ConfigError("required but not set", where="config: synth", fix=fix)
    return config.synth


def select(config: RunConfig, location: Location, clean_reasons: CleanReasons = dict) -> Selection:
    """The committed selection of the synth stage at `location`, or one that is made now.

    `clean_reasons` takes personal data out of what prompts were left out for.

    Raises DataError when no prompt is left, and StageConflict when the selection that is there is
    for another configuration, or another process has just made one with other prompts.
    """
    section = synth_section(config)
    if there := find_selection(location):
        _refuse_other_inputs(there, _inputs(config), location)
        notice_changes("synth", (*section.sources, *section.excluded_sources), there.files)
        return there
    files = fingerprints((*section.sources, *section.excluded_sources))
    location.child(PROMPTS).sweep()
    stream, tally = PromptStream(section, config.run.seed), Tally(section)
    cuts = _cut(tally.counting(stream), section.shard_prompts)
    shards = _write_all(location, cuts)
    if stream.bad.counts:
        notice("synth", str(stream.bad), records=dict(stream.bad.counts))
    selection = Selection(
        inputs=_inputs(config),
        loaded=stream.loaded,
        rejected=dict(sorted(clean_reasons(stream.rejected).items())),
        turns=tally.turns,
        asked=tally.total_turns,
        characters=tally.characters,
        shards=tuple(shards),
        files=files,
    )
    _require_files(location, selection)
    first = create_selection(location, selection)
    if first != selection:
        delete_prompts(location, (shard.file for shard in shards))  # nobody's
        _refuse_other_inputs(first, selection.inputs, location)
        _refuse_other_prompts(first, selection, location)
    return first


def prompt_counts(config: RunConfig) -> PromptCounts:
    """How many prompts there will be, for a plan: nothing is written.

    From the selection where there is one, otherwise from the sources: read whole when they are
    small, estimated when not. Raises as `select` does.
    """
    section = synth_section(config)
    if selection := find_selection(stage_location(config.run.uri, "synth")):
        return count_selection(selection)
    return estimate_prompts(section, config.run.seed)


def _inputs(config: RunConfig) -> str:
    """Keys that are at their default do not count: those added later change no digest."""
    section = synth_section(config)
    deciding = section.model_dump(mode="json", include=_DECIDING, exclude_defaults=True)
    fields: dict[str, Any] = {**deciding, "seed": config.run.seed}
    return digest(fields)[:16]


def draws_from(config: RunConfig, selection: Selection) -> bool:
    """Whether the configuration selects the prompts of an earlier `selection`, or a share."""
    section = synth_section(config).model_copy(update={"share": 1.0})
    whole = config.model_copy(update={"synth": section})
    return selection.inputs in (_inputs(config), _inputs(whole))


def _cut(prompts: Iterable[Prompt], size: int) -> Iterator[list[Prompt]]:
    remaining = iter(prompts)
    while cut := list(islice(remaining, size)):
        yield cut


def _write_all(location: Location, cuts: Iterable[list[Prompt]]) -> list[PromptShard]:
    """A store may take a while for each file: a few are on their way at one time, never more."""
    write = partial(write_prompts, location, attempt=secrets.token_hex(8))
    shards: list[PromptShard] = []
    waiting: deque[Future[PromptShard]] = deque()
    with ThreadPoolExecutor(_CONCURRENT_WRITES, thread_name_prefix="prompts") as pool:
        for index, cut in enumerate(cuts):
            if len(waiting) == _CONCURRENT_WRITES:
                shards.append(waiting.popleft().result())
            waiting.append(pool.submit(write, index, cut))
        shards += [future.result() for future in waiting]
    return shards


def _require_files(location: Location, selection: Selection) -> None:
    """Raises StoreError when somebody has removed files while others were written."""
    folder = location.child(PROMPTS)
    sizes = folder.sizes()
    for shard in selection.shards:
        if sizes.get(shard.file) == shard.bytes:
            continue
        info = folder.info_if_there(shard.file)  # a listing may be an old one
        if info is None or info.size != shard.bytes:
            where, fix = folder.where(shard.file), "run the same command again"
            raise StoreError("was removed while prompts were selected", where=where, fix=fix)


def _refuse_other_inputs(there: Selection, inputs: str, location: Location) -> None:
    if there.inputs != inputs:
        raise StageConflict(
            "holds the prompts of other sources, filters or shards than the configuration's",
            where=location.where(SELECTION),
            fix="pass --force to discard that work, or choose another run.uri=…",
        )


def _refuse_other_prompts(first: Selection, ours: Selection, location: Location) -> None:
    if difference := ours.difference(first):
        raise StageConflict(
            f"another process selected other prompts at the same time: {difference}",
            where=location.where(SELECTION),
            fix="give all processes the same files, hub data sets by `revision`, and run again",
        )


def position(prompt: Prompt) -> float:
    """Where in [0, 1) its source and id put a prompt."""
    return int(digest([prompt.source, prompt.sample_id])[:13], 16) / 16**13


#: Categories that an error names.
_NAMED_CATEGORIES = 8


class PromptStream:
    """Which prompts go in. The same section, seed and files give the same ones in the same order.

    `loaded` and `rejected` count what has been read so far; they add up when all has been.
    """

    def __init__(self, section: SynthSection, seed: int) -> None:
        self.loaded = 0
        self.rejected: Counter[str] = Counter()
        self.bad = BadRecords()
        self._section, self._seed, self._balance = section, seed, balance_of(section)
        self._missing = set(section.category_shares)  # of which no prompt has been read
        self._categories: set[str] = set()  # a few that there are

    def __iter__(self) -> Iterator[Prompt]:
        """Once. Raises DataError when nothing is left."""
        section, selected = self._section, 0
        passed = passing(self._load(), filters(section, self._seed), self.rejected)
        drawn = 0
        for prompt in draw(passed, section.max_prompts, self._seed, self._balance):
            drawn += 1
            if position(prompt) < section.share:
                selected += 1
                yield prompt
        drawn_from = self.loaded - self.rejected.total()
        left_out = {"max_prompts": drawn_from - drawn, "share": drawn - selected}
        self.rejected.update({reason: count for reason, count in left_out.items() if count})
        if not selected:
            reasons = ", ".join(f"{each} {count}" for each, count in sorted(self.rejected.items()))
            problem = f"none of {self.loaded} prompts is left after the filters ({reasons})"
            fix = "add sources, set their `license`, or widen synth.allowed_licenses"
            raise DataError(problem, where="synth.sources", fix=fix)

    def _load(self) -> Iterator[Prompt]:
        prompts = stream_prompts(
            self._section.sources,
            seed=self._seed,
            balance=self._balance,
            bad=self.bad,
            is_new=SeenDigests().add,
        )
        for prompt in prompts:
            self.loaded += 1
            self._missing.discard(prompt.category)
            if len(self._categories) < _NAMED_CATEGORIES:
                self._categories.add(prompt.category)
            yield prompt
        if self._missing:
            where = f"synth.category_shares.{min(self._missing)}"
            fix = f"leave it out; there are for example {', '.join(sorted(self._categories))}"
            raise DataError("no prompt is of this category", where=where, fix=fix)
        self.loaded += self.bad.counts.total()
        self.rejected.update(self.bad.counts)


class Tally:
    """Sums over prompts, of the turns that are asked: `synth.max_turns` of each."""

    def __init__(self, section: SynthSection) -> None:
        self.prompts = self.total_turns = self.characters = 0
        self.turns = 0  # of the longest
        self._max_turns = section.max_turns

    def add(self, prompt: Prompt) -> None:
        turns = prompt.turns[: self._max_turns]
        self.prompts += 1
        self.total_turns += len(turns)
        self.characters += sum(map(len, turns))
        self.turns = max(self.turns, len(turns))

    def counting(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        """The same prompts, each counted on its way."""
        for prompt in prompts:
            self.add(prompt)
            yield prompt


def balance_of(section: SynthSection) -> Balance:
    """How much draws take of what. Raises MissingPackage without py3langid, for languages."""
    parts: list[Group] = []
    if "category" in section.balance:
        parts.append(by_category)
    if "language" in section.balance:
        code_of = language_of("synth.balance")
        parts.append(lambda prompt: code_of(prompt) or "short")
    return Balance(
        lambda prompt: "\t".join(part(prompt) for part in parts), section.category_shares
    )


def filters(section: SynthSection, seed: int) -> list[Step]:
    """Every filter that needs no model, in the order in which it may claim a prompt."""
    steps = [
        max_length(section.max_characters),
        license_gate(section.allowed_licenses),
        first_of_its_kind(),
    ]
    excluded = stream_prompts(section.excluded_sources, seed=seed)
    return [*steps, *prompt_steps(section.quality), decontaminate(excluded)]


#: Sources of fewer bytes of records are read whole.
SMALL_BYTES = 16 << 20
#: Records that stand for larger ones, over all sources and of each at least.
_SAMPLE, _SAMPLE_OF_EACH = 5000, 50


class PromptCounts(NamedTuple):
    """What a plan needs to know. The turns are those that are asked: `max_turns` of a prompt."""

    loaded: int  # prompts that the sources give
    prompts: int  # those that pass the filters and the draws
    total_turns: int  # turns, over all prompts
    characters: int  # in those turns
    basis: str  # what this rests on


def count_selection(selection: Selection) -> PromptCounts:
    """Of prompts that are selected."""
    total_turns, characters = selection.asked, selection.characters
    basis = "the prompts that this run has selected"
    return PromptCounts(selection.loaded, selection.prompts, total_turns, characters, basis)


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
    return PromptCounts(stream.loaded, tally.prompts, tally.total_turns, tally.characters, basis)


def _extrapolate(section: SynthSection, seed: int) -> PromptCounts:
    steps, at_most = filters(section, seed), max(_SAMPLE // len(section.sources), _SAMPLE_OF_EACH)
    sampled = [_Sampled(spec, section, steps, at_most) for spec in section.sources]
    loaded = sum(each.records for each in sampled)
    passed = sum(each.scale * each.tally.prompts for each in sampled)
    drawn = min(1.0, (section.max_prompts or passed) / passed) if passed else 0.0
    share = drawn * section.share
    read = sum(each.read for each in sampled)
    unknown = sum(each.is_unknown for each in sampled)
    basis = f"estimated from {read:,} records and the sizes of the sources"
    if unknown:
        basis += f", of which {unknown} do not tell theirs and may hold more"
    return PromptCounts(
        loaded=loaded,
        prompts=round(share * passed),
        total_turns=round(share * sum(each.scale * each.tally.total_turns for each in sampled)),
        characters=round(share * sum(each.scale * each.tally.characters for each in sampled)),
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
        estimate = self.read if self.read <= at_most else estimate_records(spec)
        self.is_unknown = estimate is None
        limits = [limit for limit in (spec.read_at_most, spec.limit) if limit]
        self.records = min([max(estimate or 0, self.read), *limits])
        self.scale = self.records / self.read
        self.tally = Tally(section)
        for prompt in passing(prompts, steps, Counter()):
            self.tally.add(prompt)
