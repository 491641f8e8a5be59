"""The prompts that pass all filters which need no model, one at a time.

    sources ──► licences, duplicates, quality, evaluation sets ──► draw of max_prompts ──► prompts

In memory is what the filters remember: at most 128 MiB each for duplicates and near-duplicates,
the rest being on the disk; with `max_prompts` nine bytes a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pipeline.config import SynthSection
from pipeline.errors import DataError
from pipeline.prompts import stream_prompts
from pipeline.prompts.bad_records import BadRecords
from pipeline.prompts.draw import Balance, Group, by_category, draw
from pipeline.records import Prompt
from pipeline.synth.selection.filters import (
    Step,
    decontaminate,
    first_of_its_kind,
    license_gate,
    max_length,
)
from pipeline.synth.selection.quality import language_of, passing, prompt_steps
from pipeline.synth.selection.seen import SeenDigests

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
        for prompt in draw(passed, section.max_prompts, self._seed, self._balance):
            selected += 1
            yield prompt
        drawn_from = self.loaded - self.rejected.total()
        if selected < drawn_from:
            self.rejected["max_prompts"] = drawn_from - selected
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
        self.prompts = self.asked = self.characters = 0
        self.turns = 0  # of the longest
        self._max_turns = section.max_turns

    def add(self, prompt: Prompt) -> None:
        turns = prompt.turns[: self._max_turns]
        self.prompts += 1
        self.asked += len(turns)
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
        code_of = language_of(section.quality.min_language_characters, "synth.balance")
        parts.append(lambda prompt: code_of(prompt) or "short")
    return Balance(
        lambda prompt: "\t".join(part(prompt) for part in parts), section.category_shares
    )


def filters(section: SynthSection, seed: int) -> list[Step]:
    """Every filter that needs no model, in the order in which it may claim a prompt."""
    steps = [max_length(section.max_characters), license_gate(section.allowed_licenses)]
    if section.quality.duplicates:
        steps.append(first_of_its_kind())
    excluded = stream_prompts(section.exclude, seed=seed)
    return [*steps, *prompt_steps(section.quality), decontaminate(excluded)]
