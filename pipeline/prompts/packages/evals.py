"""OpenAI Evals: user-contributed tasks, chosen for prompts that ask for sentences.

The registry holds hundreds of folders, most of which test one terse answer a record. Taken is a
record that passes all of these, at most `_PER_FOLDER` from one folder:

    folder    not one that carries a licence of its own (the package's LICENSE.md lists them), nor
              exams, benchmarks copied from elsewhere, security, other languages, ciphers and grids
    input     one system and one user message, or a text; few-shot conversations are left out
    wording   does not forbid an explanation ("only", "exactly", "one word", "do not explain", …)
    English   at least 97 % ASCII characters, and at least 3 in 5 of the characters are letters

Where only the system message forbids an explanation and the user's is a full question, the
question is taken without the system message. The fields with ideal answers are never read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.prompts.packages.carrier import Carrier
from pipeline.records import Prompt

CARRIER = Carrier("evals", "evals", "MIT")

_PER_FOLDER = 16
_SMALLEST, _LARGEST = 30, 2000  # characters
_READ_AT_MOST = 200  # records of one file; some hold hundreds of thousands of variants

_OWN_LICENSE = frozenset(
    {
        "already_said_that",
        "ballots",
        "sandbagging",
        "schelling_point",
        "steganography",
        "text_compression",
        "theory_of_mind",
    }
)
_OFF_TOPIC = re.compile(
    r"exam|lexicon|rhym|cissp|cybersec|security|injection|shell|naughty|prompt-inj|override|medmcqa|logiqa|coqa|quartz|banking77|jee|aime|upsc|"
    r"mrpc|real_estate|cipher|hex|svg|puzzle|raven|test_|human-safety|malicious|steg|sarcasm|adultery|part-of-speech|bigrams|smiles|formal_logic|mazes|arc$|"
    r"albanian|belarusian|blackfoot|canto|chinese|french|german|italian|japan|korean|latin|mongolian|nepali|norwegian|polish|portuguese|russian|sindarin|skill_acq|"
    r"rot13|vigenere|numeral|matricies|mate-in-one|GOL|regex-match|detect-hshd|word_association|product-matching|movement|reverse_string|first-letters|context-free"
)
_FORBIDS_EXPLANATION = re.compile(
    r"\bonly\b|\bexactly\b|\bconcise|\bnothing (else|but)\b|\bmultiple[- ]choice\b|\byes or no\b|\btrue or false\b|\bY or N\b|\btrue/false\b|"
    r"\b(do not|don't|must not|without|no|any) (any )?(further |additional |other |extra )?(expla|comment|text|justif|reason|word|punctuation|output)|"
    r"\b(single|one|1)[- ](word|letter|number|digit|character|line|integer|token)\b|\bjust (the|a|your|answer|return|output|respond|say|with)\b|"
    r"\b(respond|reply|answer|output)\w*( \w+){0,3} (with|as|in)( \w+){0,3} "
    r"(number|word|letter|digit|integer|format|json|list|yes|no|true|false|option|choice)\b|"
    r"\bin the (format|form)\b|\bfollowing format\b|\bfew words\b|\bshort (answer|response)\b|\bclassif(y|ier)\b|\b(answer|respond|reply)\w* ['\"]|"
    r"\bif (they|not|yes|no)\b.{0,40}\b(output|reply|type)\b|\b[A-D][).:] \S",
    re.IGNORECASE,
)


def read() -> Iterator[Prompt]:
    """Chosen records of every folder, in the order of their names."""
    root = CARRIER.find("registry/data")
    source = CARRIER.source
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name in _OWN_LICENSE or _OFF_TOPIC.search(folder.name):
            continue
        for number, turn in enumerate(_chosen(folder), start=1):
            yield Prompt(
                sample_id=f"{folder.name}/{number}",
                source=source,
                license=CARRIER.license,
                category="instruction",
                turns=(turn,),
            )


def _chosen(folder: Path) -> list[str]:
    """At most `_PER_FOLDER` different turns, evenly spaced over the folder's suitable ones."""
    suitable: dict[str, None] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for record in _samples(path):
            turn = _turn(record)
            if turn and _is_suitable(turn):
                suitable[turn] = None
    turns = list(suitable)
    step = max(1, len(turns) // _PER_FOLDER)
    return turns[::step][:_PER_FOLDER]


def _samples(path: Path) -> Iterator[Any]:
    """Records at the head of one file; none of a file that is no JSONL (a git-lfs pointer, a pretty-printed list)."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in itertools.islice(file, _READ_AT_MOST):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def _turn(record: Any) -> str | None:
    """The record's input as one user turn; None when it is no sample or no single question."""
    given = record.get("input") if isinstance(record, dict) else None
    if isinstance(given, str):
        return given.strip()
    if not isinstance(given, list) or not all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in given
    ):
        return None
    said: list[tuple[Any, str]] = [
        (message.get("role"), message["content"].strip()) for message in given
    ]
    user = [text for role, text in said if role == "user"]
    system = [
        text
        for role, text in said
        if role == "system" and not text.startswith("You are a helpful assistant.")
    ]
    if len(user) != 1 or len(said) > 2:
        return None
    if (
        system
        and _FORBIDS_EXPLANATION.search(system[0])
        and user[0].endswith("?")
        and len(user[0].split()) >= 6
    ):
        return user[0]
    return "\n\n".join([*system, *user])


def _is_suitable(turn: str) -> bool:
    return (
        _SMALLEST <= len(turn) <= _LARGEST
        and "\ufffd" not in turn
        and _is_english(turn)
        and not _FORBIDS_EXPLANATION.search(turn)
    )


def _is_english(turn: str) -> bool:
    letters = sum(character.isascii() and character.isalpha() for character in turn)
    ascii_share = sum(character.isascii() for character in turn) / len(turn)
    return ascii_share >= 0.97 and letters >= 0.6 * len(turn)
