"""Quality, as named steps: each looks at one record and gives a reason to leave it out, or None.

    prompts   short  language:<code>  repetition  near_duplicate
    replies   reply_repetition  refusal

`synth.quality` switches them; what is not switched on is not built. Every reason is counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.config import QualitySection
from pipeline.errors import MissingPackage
from pipeline.records import Prompt, Sample
from pipeline.synth.selection.filters import words_of
from pipeline.synth.selection.seen import SeenSketches

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PromptOrSample = TypeVar("PromptOrSample", Prompt, Sample)

#: A row of so many words that comes again is a repetition; shorter ones are style.
_REPEATED_WORDS = 8
_SHINGLE = 5  # words of one feature for near-duplicates
_NO_LANGUAGE = "zxx"  # ISO 639's code for text in none, such as a program
_PERMUTATIONS = 128  # of a MinHash: similarity is estimated to about 1/sqrt(128) = 0.09

#: How replies begin that decline, in the words of today's assistants.
_REGRET = (
    r"(?:(?:i[\'\u2019]?m|i am) (?:really |very |truly )?sorry|(?:my )?apologies|i apologi[sz]e"
    r"|unfortunately|as an ai(?: language model| assistant)?)?"
)
_CANNOT = (
    r"(?:can(?:no|[\'\u2019])t|can not|am unable to|unable to|not able to|won[\'\u2019]t|will not"
    r"|do not feel comfortable|must decline|have to decline)"
)
_DOING = (
    r"(?:assist|help|provide|fulfil+|comply|engage|continue|create|generate|answer|do that|support"
    r"|write|share|offer)"
)
_SUBJECT = r"(?:but )?(?:that )?(?:i[\'\u2019]?m|i am|i)?"
_REFUSAL = re.compile(
    rf"\W*{_REGRET}[\s,.!\-\u2014]*{_SUBJECT}\s*{_CANNOT}\b[^.\n]{{0,40}}?\b{_DOING}",
    re.IGNORECASE,
)


def apply_steps(
    records: Iterable[PromptOrSample], steps: Sequence[Callable[[PromptOrSample], str | None]]
) -> tuple[list[PromptOrSample], Counter[str]]:
    """Records that pass all steps, and the others counted by the first reason that a step gave."""
    rejected: Counter[str] = Counter()
    return list(passing(records, steps, rejected)), rejected


def passing(
    records: Iterable[PromptOrSample],
    steps: Sequence[Callable[[PromptOrSample], str | None]],
    rejected: Counter[str],
) -> Iterator[PromptOrSample]:
    """As `apply_steps`, one at a time; `rejected` counts as it goes."""
    for record in records:
        reason = next((reason for step in steps if (reason := step(record))), None)
        if reason:
            rejected[reason] += 1
        else:
            yield record


def prompt_steps(section: QualitySection) -> list[Callable[[Prompt], str | None]]:
    """The section's steps for prompts, cheap ones first. Exact duplicates are in filters.py."""
    steps = [min_length(section.min_characters)]
    if section.max_prompt_repetition is not None:
        steps.append(prompt_repetition(section.max_prompt_repetition))
    if section.languages:
        steps.append(language(section.languages, section.min_language_characters))
    if section.near_duplicates is not None:
        steps.append(near_duplicates(section.near_duplicates))
    return steps


def reply_steps(section: QualitySection) -> list[Callable[[Sample], str | None]]:
    """The section's steps for samples; a sample fails as a whole when one of its replies does."""
    steps: list[Callable[[Sample], str | None]] = []
    if section.max_reply_repetition is not None:
        steps.append(reply_repetition(section.max_reply_repetition))
    if section.refusals == "drop":
        steps.append(refusal)
    return steps


def replies(sample: Sample) -> Iterator[str]:
    """What the target replied, turn by turn."""
    return (message.content for message in sample.messages if message.role == "assistant")


def min_length(shortest: int) -> Callable[[Prompt], str | None]:
    """Characters over all turns, blanks at the ends not counted."""

    def step(prompt: Prompt) -> str | None:
        return "short" if sum(len(turn.strip()) for turn in prompt.turns) < shortest else None

    return step


def prompt_repetition(most: float) -> Callable[[Prompt], str | None]:
    """Prompts that say the same over and over."""

    def step(prompt: Prompt) -> str | None:
        repeats = any(repeated_share(turn) > most for turn in prompt.turns)
        return "repetition" if repeats else None

    return step


def reply_repetition(most: float) -> Callable[[Sample], str | None]:
    """Replies that fell into a loop."""

    def step(sample: Sample) -> str | None:
        repeats = any(repeated_share(reply) > most for reply in replies(sample))
        return "reply_repetition" if repeats else None

    return step


def refusal(sample: Sample) -> str | None:
    """Replies that decline what was asked."""
    return "refusal" if any(_REFUSAL.match(reply) for reply in replies(sample)) else None


def repeated_share(text: str) -> float:
    """Share of the words that lie in a row of eight which has come before in the text.

    a b c d e f g h   a b c d e f g h   i j     →  8 of 18 words
                      └ seen before ┘
    """
    words = text.split()
    seen: set[tuple[str, ...]] = set()
    repeated = [False] * len(words)
    for start in range(len(words) - _REPEATED_WORDS + 1):
        row = tuple(words[start : start + _REPEATED_WORDS])
        if row in seen:
            repeated[start : start + _REPEATED_WORDS] = [True] * _REPEATED_WORDS
        seen.add(row)
    return sum(repeated) / len(words) if words else 0.0


def language(kept: Sequence[str], shortest: int) -> Callable[[Prompt], str | None]:
    """Prompts in other languages. Raises MissingPackage without py3langid."""
    known = {*(code.lower() for code in kept), _NO_LANGUAGE, None}
    code_of = language_of(shortest, "synth.quality.languages")

    def step(prompt: Prompt) -> str | None:
        code = code_of(prompt)
        return None if code in known else f"language:{code}"

    return step


def language_of(shortest: int, where: str) -> Callable[[Prompt], str | None]:
    """The ISO 639-1 code of all turns by py3langid, `zxx` for code, None for fewer characters.

    Raises MissingPackage without py3langid, naming the field `where`.
    """
    try:
        from py3langid import classify  # type: ignore[import-untyped]
    except ImportError:
        raise _missing("py3langid", where) from None

    def code_of(prompt: Prompt) -> str | None:
        text = "\n".join(prompt.turns)
        return str(classify(text)[0]) if len(text) >= shortest else None

    return code_of


def near_duplicates(similarity: float) -> Callable[[Prompt], str | None]:
    """Prompts whose word 5-grams mostly occur in one earlier prompt.

    MinHash with locality-sensitive hashing (Broder 1997), over sketches on the disk. Raises
    MissingPackage without datasketch.
    """
    import numpy as np

    try:
        from datasketch import MinHash, MinHashLSH  # type: ignore[import-untyped]
    except ImportError:
        raise _missing("datasketch", "synth.quality.near_duplicates") from None
    empty = MinHash(num_perm=_PERMUTATIONS, seed=1)  # its permutations take a while to draw
    # It knows the bands for a similarity; its own index would be in memory.
    passed = SeenSketches(MinHashLSH(threshold=similarity, num_perm=_PERMUTATIONS).hashranges)

    def step(prompt: Prompt) -> str | None:
        sketch = _sketch(prompt, empty)
        # The bands propose; the sketches themselves decide.
        for other in passed.candidates(sketch.tobytes()):
            if np.mean(sketch == np.frombuffer(other, np.uint32)) >= similarity:
                return "near_duplicate"
        passed.add(sketch.tobytes())
        return None

    return step


def _sketch(prompt: Prompt, empty: Any) -> NDArray[np.uint32]:
    """[128] minima of the hashes of the prompt's shingles; `empty` is a MinHash of none."""
    import numpy as np

    sketch = empty.copy()
    shingles = {shingle.encode() for turn in prompt.turns for shingle in _shingles(turn)}
    sketch.update_batch(sorted(shingles))
    minima: NDArray[np.uint32] = sketch.hashvalues.astype(np.uint32)
    return minima


def _shingles(text: str) -> Iterator[str]:
    words = words_of(text)
    for start in range(max(1, len(words) - _SHINGLE + 1)):
        yield " ".join(words[start : start + _SHINGLE])


def _missing(package: str, where: str) -> MissingPackage:
    problem, fix = f"needs the pip package {package}", f"pip install {package}"
    return MissingPackage(problem, where=where, fix=fix)
