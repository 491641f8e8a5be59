"""The prompts of a run, selected once: filtered, drawn, and stored by shards.

    sources ──► filters, draw (stream.py) ──► prompts/NAME, one shard at a time ──► selection.json

Nothing is held in memory but the prompts of a few shards. Killed before the selection is there, a
run selects again and ends with the same one; afterwards no start reads a source again.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

from pipeline.config import RunConfig, SynthSection
from pipeline.console import notice
from pipeline.errors import ConfigError, StageConflict, StoreError
from pipeline.prompts.changes import fingerprints, notice_changes
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
from pipeline.synth.selection.estimate import PromptCounts, count_selection, estimate_prompts
from pipeline.synth.selection.stream import PromptStream, Tally

__all__ = [
    "PROMPTS",
    "SELECTION",
    "PromptCounts",
    "PromptShard",
    "Selection",
    "find_selection",
    "load_prompt_shard",
    "prompt_counts",
    "select",
    "synth_section",
]

#: What of the section decides which prompts go into which shard.
_DECIDING = {
    *("sources", "exclude", "allowed_licenses", "quality"),
    *("balance", "category_shares", "max_characters", "max_prompts", "max_turns", "shard_prompts"),
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
        notice_changes("synth", (*section.sources, *section.exclude), there.files)
        return there
    files = fingerprints((*section.sources, *section.exclude))
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
        asked=tally.asked,
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
    sizes = location.child(PROMPTS).sizes()
    for shard in selection.shards:
        if sizes.get(shard.file) != shard.bytes:
            where, fix = location.child(PROMPTS).where(shard.file), "run the same command again"
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
