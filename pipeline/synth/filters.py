"""What keeps a prompt or a reply out without a model: named steps, each a reason or None.

    prompts   long                             longer than synth.max_characters
              terms:forbids_competing_models   from a model whose terms forbid this use
              license:<spdx>                   its licence is not on the allow-list
              duplicate                        the same system prompt and turns came earlier
              short  language:<code>  repetition  near_duplicate          (synth.quality)
              contaminated                     matches a prompt of an excluded (evaluation) set
    replies   reply_repetition  refusal                                   (synth.quality)

Duplicates are exact: NFC, and white space counts as one space. Excluded sets and near-duplicates
are compared word by word; punctuation that a copy may lose does not count, symbols do. Of scripts
that put no space between words (Han, kana, Thai and the like) each character is a word:

    Is 12 * 7 < 90, or not?    is · 12* · 7< · 90 · or · not
    C, C++ or C#?              c · c++ · or · c#
    Python是什么               python · 是 · 什 · 么

What came before is kept in SQLite files in TMPDIR that have no name and vanish with their object;
at most 128 MiB of each are in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import regex  # type: ignore[import-untyped]

from pipeline.config import QualitySection
from pipeline.errors import MissingPackage, StoreError
from pipeline.prompts.records import FORBIDS_COMPETING_MODELS
from pipeline.records import Prompt, Sample, canonical_json

#: A prompt's reason to be left out, or None.
Step = Callable[[Prompt], str | None]


class _Rows(NamedTuple):
    """How long a row of words must be to mean something."""

    gram: int  # words that two texts must share in a row to count as overlapping
    shortest: int  # an excluded turn shorter than a gram counts from here, contained whole
    distinct: int  # alphabetic ones of a gram; digits and table borders overlap by chance
    repeated: int  # a row of so many that comes again is a repetition; shorter ones are style


#: By what most words are. A word has one to two ideographs, and three letters or more.
_OF_WORDS = _Rows(gram=13, shortest=7, distinct=5, repeated=8)
_OF_IDEOGRAPHS = _Rows(gram=20, shortest=12, distinct=8, repeated=12)
_OF_LETTERS = _Rows(gram=40, shortest=24, distinct=10, repeated=24)
_IDEOGRAPHS = r"\p{Han}\p{Hiragana}\p{Katakana}"
#: All scripts that put no space between words.
_UNSPACED = rf"{_IDEOGRAPHS}\p{{Thai}}\p{{Lao}}\p{{Khmer}}\p{{Myanmar}}"
_CHARACTER = rf"[{_UNSPACED}][\p{{M}}ー]*+"
_IS_CHARACTER, _IS_IDEOGRAPH = regex.compile(_CHARACTER), regex.compile(rf"[{_IDEOGRAPHS}]")
#: Marks of sentences, quotes and brackets; a copy may have others. Not those of `!=` and `:=`.
_PUNCTUATION = regex.compile(r"""(?:[.,;:?!'"–—―、。؟،।\p{Pi}\p{Pf}\p{Ps}\p{Pe}](?!=))+""")
_WORD = regex.compile(
    rf"(?V1)[[\w\p{{M}}]--[{_UNSPACED}]]+(?:\s*+[^\w\p{{M}}\s]++)*+|{_CHARACTER}|[^\w\p{{M}}\s]+"
)
_SPLIT = regex.compile(rf"{_CHARACTER}|[^\s{_UNSPACED}]+")
_LETTERS = regex.compile(r"[\p{L}\p{M}]+[^\w\p{M}]*+$")


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
    """16 bytes that two prompts share when they are the same but for encoding, white space and the
    order of keys in tools."""
    tools = prompt.tools and canonical_json(json.loads(prompt.tools))
    texts = [prompt.system, tools, *prompt.turns]
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
    lettered = [bool(_LETTERS.match(word)) for word in turn]
    characters = [bool(_IS_CHARACTER.match(word)) for word in turn]
    for rows in (_OF_WORDS, _OF_IDEOGRAPHS, _OF_LETTERS) if any(characters) else (_OF_WORDS,):
        size = min(len(turn), rows.gram)
        for start, gram in enumerate(_windows(turn, size) if len(turn) >= rows.shortest else ()):
            own = slice(start, start + size)
            if len({*compress(gram, lettered[own])}) >= rows.distinct and rows is (
                _rows_of(gram) if any(characters[own]) else _OF_WORDS
            ):
                yield gram


def _rows_of(words: Sequence[str]) -> _Rows:
    characters = [word for word in words if _IS_CHARACTER.match(word)]
    if 2 * len(characters) <= len(words):
        return _OF_WORDS
    ideographs = sum(bool(_IS_IDEOGRAPH.match(character)) for character in characters)
    return _OF_IDEOGRAPHS if 2 * ideographs > len(characters) else _OF_LETTERS


def _windows(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + size]) for start in range(len(words) - size + 1))


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


PromptOrSample = TypeVar("PromptOrSample", Prompt, Sample)
_SHINGLE = 5  # words of one feature for near-duplicates
_LANGUAGE_CHARACTERS = 40  # too little to tell a language below
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
    rf"\W*{_REGRET}[\s,.!\-\u2014]*{_SUBJECT}\s*{_CANNOT}\b[^.\n]{{0,40}}?\b{_DOING}", re.IGNORECASE
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
        steps.append(language(section.languages))
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

    Of 12 or 24 characters in scripts that put no space between words.
    """
    words = text.split() if text.isascii() else _SPLIT.findall(text)
    row = _rows_of(words).repeated
    repeated = [False] * len(words)
    for start in repeated_rows(words, row):
        repeated[start : start + row] = [True] * row
    return sum(repeated) / len(words) if words else 0.0


def repeated_rows(items: Sequence[str] | Sequence[int], length: int) -> Iterator[int]:
    """Where rows of so many items begin that have come before."""
    seen: set[tuple[object, ...]] = set()
    for start in range(len(items) - length + 1):
        row = tuple(items[start : start + length])
        if row in seen:
            yield start
        seen.add(row)


def language(codes: Sequence[str]) -> Callable[[Prompt], str | None]:
    """Prompts in other languages. Raises MissingPackage without py3langid."""
    known = {*(code.lower() for code in codes), _NO_LANGUAGE, None}
    code_of = language_of("synth.quality.languages")

    def step(prompt: Prompt) -> str | None:
        code = code_of(prompt)
        return None if code in known else f"language:{code}"

    return step


def language_of(where: str) -> Callable[[Prompt], str | None]:
    """The ISO 639-1 code of all turns by py3langid, `zxx` for code, None for
    less than 40 characters.

    Raises MissingPackage without py3langid, naming the field `where`.
    """
    try:
        from py3langid import classify  # type: ignore[import-untyped]
    except ImportError:
        raise _missing("py3langid", where) from None

    def code_of(prompt: Prompt) -> str | None:
        text = "\n".join(prompt.turns)
        return str(classify(text)[0]) if len(text) >= _LANGUAGE_CHARACTERS else None

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


_DIGEST_BYTES = 16
_BAND_BYTES = 7  # SQLite's integers have eight, with a sign
_MEMORY_KIB = 128 << 10
_SETTINGS = (
    f"PRAGMA cache_size = -{_MEMORY_KIB}",
    "PRAGMA journal_mode = OFF",
    "PRAGMA synchronous = OFF",
    "BEGIN",
)


class SeenDigests:
    """A set of digests of 16 bytes: about 25 bytes each."""

    def __init__(self) -> None:
        self._rows = _open("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, digest: bytes) -> bool:
        """Whether it is new. Raises StoreError when the disk is full."""
        assert len(digest) == _DIGEST_BYTES
        with _explain_full_disk():
            added = self._rows.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        return added.rowcount == 1


class SeenSketches:
    """MinHash sketches, found again by any band that they share (locality-sensitive hashing).

        sketch   h0 h1 … h12 │ h13 … h25 │ …       32 bits each
        bands    └── 7 bytes ┘ └─────────┘         equal in one of them: a candidate

    About a kilobyte each. `bands` are the ranges [start, end) of a sketch.
    """

    def __init__(self, bands: Sequence[tuple[int, int]]) -> None:
        self._bands, self._count = bands, 0
        self._rows = _open(
            "CREATE TABLE sketches (id INTEGER PRIMARY KEY, sketch BLOB)",
            "CREATE TABLE bands (band INTEGER, id INTEGER, PRIMARY KEY (band, id)) WITHOUT ROWID",
        )

    def candidates(self, sketch: bytes) -> Iterator[bytes]:
        """Sketches that share a band with this one."""
        bands = self._digests(sketch)
        marks = ", ".join("?" * len(bands))
        among = f"SELECT id FROM bands WHERE band IN ({marks})"
        rows = self._rows.execute(f"SELECT sketch FROM sketches WHERE id IN ({among})", bands)
        return (row[0] for row in rows)

    def add(self, sketch: bytes) -> None:
        """Raises StoreError when the disk is full."""
        self._count += 1
        bands = [(band, self._count) for band in set(self._digests(sketch))]
        with _explain_full_disk():
            self._rows.execute("INSERT INTO sketches VALUES (?, ?)", (self._count, sketch))
            self._rows.executemany("INSERT INTO bands VALUES (?, ?)", bands)

    def _digests(self, sketch: bytes) -> list[int]:
        """Of the bands; the number of a band counts, so that different ones never look equal."""
        return [
            int.from_bytes(
                hashlib.blake2b(
                    sketch[4 * start : 4 * end], digest_size=_BAND_BYTES, key=bytes([number])
                ).digest()
            )
            for number, (start, end) in enumerate(self._bands)
        ]


def _open(*tables: str) -> sqlite3.Connection:
    rows = sqlite3.connect("", isolation_level=None)
    for statement in (*_SETTINGS, *tables):
        rows.execute(statement)
    return rows


@contextmanager
def _explain_full_disk() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        problem = f"which prompts came before cannot be noted: {error}"
        fix = "free some space there, or set TMPDIR to a directory of a larger disk"
        raise StoreError(problem, where=tempfile.gettempdir(), fix=fix) from error
