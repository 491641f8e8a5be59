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

from bench.prompt_sets.data_package import DataPackage
from pipeline.records import Prompt

EVALS = DataPackage("evals", "evals", "MIT")

_PER_FOLDER = 16
_SMALLEST, _LARGEST = 30, 2000  # characters
_READ_AT_MOST = 200  # records of one file; some hold hundreds of thousands of variants

_OWN_LICENSE = (
    *("already_said_that", "ballots", "sandbagging", "schelling_point"),
    *("steganography", "text_compression", "theory_of_mind"),
)
_OFF_TOPIC = re.compile(
    r"exam|lexicon|rhym|cissp|cybersec|security|injection|shell|naughty|prompt-inj|override|"
    r"medmcqa|logiqa|coqa|quartz|banking77|jee|aime|upsc|mrpc|real_estate|cipher|hex|svg|puzzle|"
    r"raven|test_|human-safety|malicious|steg|sarcasm|adultery|part-of-speech|bigrams|smiles|"
    r"formal_logic|mazes|arc$|albanian|belarusian|blackfoot|canto|chinese|french|german|italian|"
    r"japan|korean|latin|mongolian|nepali|norwegian|polish|portuguese|russian|sindarin|skill_acq|"
    r"rot13|vigenere|numeral|matricies|mate-in-one|GOL|regex-match|detect-hshd|word_association|"
    r"product-matching|movement|reverse_string|first-letters|context-free"
)
_FORBIDS_EXPLANATION = re.compile(
    r"\bonly\b|\bexactly\b|\bconcise|\bnothing (else|but)\b|"
    r"\bmultiple[- ]choice\b|\byes or no\b|\btrue or false\b|\bY or N\b|\btrue/false\b|"
    r"\b(do not|don't|must not|without|no|any) (any )?(further |additional |other |extra )?"
    r"(expla|comment|text|justif|reason|word|punctuation|output)|"
    r"\b(single|one|1)[- ](word|letter|number|digit|character|line|integer|token)\b|"
    r"\bjust (the|a|your|answer|return|output|respond|say|with)\b|"
    r"\b(respond|reply|answer|output)\w*( \w+){0,3} (with|as|in)( \w+){0,3} "
    r"(number|word|letter|digit|integer|format|json|list|yes|no|true|false|option|choice)\b|"
    r"\bin the (format|form)\b|\bfollowing format\b|\bfew words\b|\bshort (answer|response)\b|"
    r"\bclassif(y|ier)\b|\b(answer|respond|reply)\w* ['\"]|"
    r"\bif (they|not|yes|no)\b.{0,40}\b(output|reply|type)\b|\b[A-D][).:] \S",
    re.IGNORECASE,
)


def read_evals() -> Iterator[Prompt]:
    """Chosen records of every folder, in the order of their names."""
    root = EVALS.find("registry/data")
    source = EVALS.source
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name in _OWN_LICENSE or _OFF_TOPIC.search(folder.name):
            continue
        for number, turn in enumerate(_chosen(folder), start=1):
            yield Prompt(
                sample_id=f"{folder.name}/{number}",
                source=source,
                license=EVALS.license,
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
    """Records at the head of one file; none where it is no JSONL (a git-lfs pointer, a list)."""
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
    if not isinstance(given, list) or not all(_is_message(item) for item in given):
        return None
    texts: list[tuple[Any, str]] = [(item.get("role"), item["content"].strip()) for item in given]
    user = [text for role, text in texts if role == "user"]
    system = [text for role, text in texts if role == "system" and not _says_nothing(text)]
    if len(user) != 1 or len(texts) > 2:
        return None
    if system and _FORBIDS_EXPLANATION.search(system[0]) and _is_full_question(user[0]):
        return user[0]
    return "\n\n".join([*system, *user])


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("content"), str)


def _says_nothing(system: str) -> bool:
    return system.startswith("You are a helpful assistant.")


def _is_full_question(turn: str) -> bool:
    return turn.endswith("?") and len(turn.split()) >= 6


def _is_suitable(turn: str) -> bool:
    is_text = _SMALLEST <= len(turn) <= _LARGEST and "\ufffd" not in turn and _is_english(turn)
    return is_text and not _FORBIDS_EXPLANATION.search(turn)


def _is_english(turn: str) -> bool:
    letters = sum(character.isascii() and character.isalpha() for character in turn)
    ascii_share = sum(character.isascii() for character in turn) / len(turn)
    return ascii_share >= 0.97 and letters >= 0.6 * len(turn)
