"""What keeps a prompt out before any model is loaded: named steps, each a reason or None.

    terms:forbids_competing_models   its text came from a model whose terms forbid this use
    license:<spdx>                   its licence is not on the allow-list
    duplicate                        the same turns came earlier
    contaminated                     it matches a prompt of an excluded (evaluation) set

quality.py has the steps that judge the text itself.

Text is compared after normalisation: NFKC, lower case, word characters only.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from pipeline.prompts.records import FORBIDS_COMPETING_MODELS
from pipeline.records import Prompt
from pipeline.synth.seen import SeenDigests

#: A prompt's reason to be left out, or None.
Step = Callable[[Prompt], str | None]

_GRAM = 13  # words that two texts must share in a row to count as overlapping
_SHORTEST_WHOLE = 7  # an excluded turn of 7…12 words counts when it is contained whole
_DISTINCT_WORDS = 5  # alphabetic ones; rows of digits or table borders overlap by chance


def license_gate(allowed: Sequence[str]) -> Step:
    """Only licences on the list, and never a source whose terms forbid competing models.

    SPDX ids are compared without regard to case. Of `A OR B` one must be allowed, of `A AND B`
    both; an expression with brackets is not taken apart: it must be on the list as it stands.
    """
    known = {license.lower() for license in allowed}

    def step(prompt: Prompt) -> str | None:
        if prompt.license == FORBIDS_COMPETING_MODELS:
            return "terms:forbids_competing_models"
        return None if _is_allowed(prompt.license.lower(), known) else f"license:{prompt.license}"

    return step


def _is_allowed(expression: str, known: set[str]) -> bool:
    if expression in known or "(" in expression:
        return expression in known
    return any(
        all(license.strip() in known for license in choice.split(" and "))
        for choice in expression.split(" or ")
    )


def first_of_its_kind() -> Step:
    """Drops repetitions; remembers a digest of every prompt that it has passed, not its text."""
    seen = SeenDigests()

    def step(prompt: Prompt) -> str | None:
        return None if seen.add(duplicate_key(prompt)) else "duplicate"

    return step


def duplicate_key(prompt: Prompt) -> bytes:
    """16 bytes that two prompts share when they count as the same: of their normalised turns."""
    text = "\n".join(normalised(turn) for turn in prompt.turns)  # no turn has a line break now
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def decontaminate(excluded: Iterable[Prompt]) -> Step:
    """Drops prompts with a turn that equals, contains or overlaps one of an excluded prompt."""
    turns = [normalised(turn).split() for prompt in excluded for turn in prompt.turns]
    whole = {tuple(turn) for turn in turns if turn}
    grams = {gram for turn in turns for gram in _distinctive_grams(turn)}
    sizes = sorted({len(gram) for gram in grams})

    def step(prompt: Prompt) -> str | None:
        for turn in prompt.turns if whole else ():
            words = normalised(turn).split()
            overlaps = (gram in grams for size in sizes for gram in _windows(words, size))
            if tuple(words) in whole or any(overlaps):
                return "contaminated"
        return None

    return step


def normalised(text: str) -> str:
    """NFKC, lower case, runs of word characters joined by one space."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower()))


def _distinctive_grams(turn: list[str]) -> Iterator[tuple[str, ...]]:
    """Word sequences whose appearance elsewhere is no coincidence."""
    if len(turn) < _SHORTEST_WHOLE:
        return
    for gram in _windows(turn, min(len(turn), _GRAM)):
        if len({word for word in gram if word.isalpha()}) >= _DISTINCT_WORDS:
            yield gram


def _windows(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + size]) for start in range(len(words) - size + 1))
