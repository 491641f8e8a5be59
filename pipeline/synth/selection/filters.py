"""What keeps a prompt out before any model is loaded: named steps, each a reason or None.

    long                             longer than synth.max_characters
    terms:forbids_competing_models   its text came from a model whose terms forbid this use
    license:<spdx>                   its licence is not on the allow-list
    duplicate                        the same system prompt and turns came earlier
    contaminated                     it matches a prompt of an excluded (evaluation) set

quality.py has the steps that judge the text itself.

Duplicates are exact: NFC, and white space counts as one space. Excluded sets and near-duplicates
are compared word by word, where punctuation that a copy may lose does not count, and symbols do:

    Is 12 * 7 < 90, or not?    is · 12* · 7< · 90 · or · not
    C, C++ or C#?              c · c++ · or · c#
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

import regex  # type: ignore[import-untyped]

from pipeline.prompts.records import FORBIDS_COMPETING_MODELS
from pipeline.records import Prompt, canonical_json
from pipeline.synth.selection.seen import SeenDigests

#: A prompt's reason to be left out, or None.
Step = Callable[[Prompt], str | None]

_GRAM = 13  # words that two texts must share in a row to count as overlapping
_SHORTEST_WHOLE = 7  # an excluded turn of 7…12 words counts when it is contained whole
#: Marks of sentences, quotes and brackets; a copy may have others. Not those of `!=` and `:=`.
_PUNCTUATION = regex.compile(r"""(?:[.,;:?!'"–—―、。؟،।\p{Pi}\p{Pf}\p{Ps}\p{Pe}](?!=))+""")
_WORD = regex.compile(r"[\w\p{M}]+(?:\s*+[^\w\p{M}\s]++)*+|[^\w\p{M}\s]+")
_LETTERS = regex.compile(r"[\p{L}\p{M}]+[^\w\p{M}]*+$")
_DISTINCT_WORDS = 5  # alphabetic ones; rows of digits or table borders overlap by chance


def max_length(most: int) -> Step:
    """Characters of the system prompt, the tools and all turns."""

    def step(prompt: Prompt) -> str | None:
        texts = (prompt.system or "", prompt.tools or "", *prompt.turns)
        return "long" if sum(map(len, texts)) > most else None

    return step


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
    """16 bytes that two prompts share when they are the same but for encoding and white space."""
    texts = [prompt.system, prompt.tools, *prompt.turns]
    same = [text and " ".join(unicodedata.normalize("NFC", text).split()) for text in texts]
    return hashlib.blake2b(canonical_json(same).encode(), digest_size=16).digest()


def decontaminate(excluded: Iterable[Prompt]) -> Step:
    """Drops prompts with a turn that equals, contains or overlaps one of an excluded prompt."""
    turns = [words_of(turn) for prompt in excluded for turn in prompt.turns]
    whole = {tuple(turn) for turn in turns if turn}
    grams = {gram for turn in turns for gram in _distinctive_grams(turn)}
    sizes = sorted({len(gram) for gram in grams})

    def step(prompt: Prompt) -> str | None:
        for turn in prompt.turns if whole else ():
            words = words_of(turn)
            overlaps = (gram in grams for size in sizes for gram in _windows(words, size))
            if tuple(words) in whole or any(overlaps):
                return "contaminated"
        return None

    return step


def words_of(text: str) -> list[str]:
    """NFKC, lower case; each word with its combining marks and the symbols that follow it.

    Symbols that follow no word are a word of their own.
    """
    plain = _PUNCTUATION.sub(" ", unicodedata.normalize("NFKC", text).lower())
    return ["".join(word.split()) for word in _WORD.findall(plain)]


def _distinctive_grams(turn: list[str]) -> Iterator[tuple[str, ...]]:
    """Word sequences whose appearance elsewhere is no coincidence."""
    if len(turn) < _SHORTEST_WHOLE:
        return
    for gram in _windows(turn, min(len(turn), _GRAM)):
        if len({word for word in gram if _LETTERS.match(word)}) >= _DISTINCT_WORDS:
            yield gram


def _windows(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + size]) for start in range(len(words) - size + 1))
