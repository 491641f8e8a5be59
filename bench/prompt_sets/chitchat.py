"""Chitchat: open conversations between two people; one side of each becomes the user.

A conversation alternates between two senders, each of whose turns is one or more short messages:

    A "Hello" "How are you?"   B "fine, you?"   A "I took a nap"   …
      └──── turn 1 ────┘                          └─── turn 2 ──┘

The side of the one who speaks first is taken, so turn 1 needs nothing before it. Openings such as
"Hi" are joined to what the same person says next, because a greeting alone draws a greeting.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from bench.prompt_sets.data_package import DataPackage
from pipeline.errors import DataError
from pipeline.records import Prompt

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
