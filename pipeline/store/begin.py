"""begin.json: whose work a stage's directory holds.

Whoever comes first creates it, with all that shapes the output; everybody else, at the same time or
a year later, compares. Work for other inputs is refused by the keys that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from pydantic import AwareDatetime, Field

from pipeline.config import RunConfig
from pipeline.records import SCHEMA_VERSION, Manifest, Record, Stage, canonical_json
from pipeline.store.location import Location

BEGIN = "begin.json"
#: Characters of a value that a message shows.
_SHOWN = 60


class Begin(Record):
    """What decides a stage's output: work on equal inputs is continued, on others never."""

    stage: Stage
    schema_version: int = SCHEMA_VERSION
    config_hash: str  # of `shaping`
    parent_hash: str | None  # `content_hash` of the parent's manifest
    shaping: dict[str, Any] | None = None  # the configuration; versions before 4 kept its hash only
    #: What else shapes the output: facts of the target, versions of filters. One that an older
    #: version did not know is not compared.
    made_with: dict[str, str] = Field({})
    #: When chat templates that write a date say it is, for every process and attempt: when the
    #: stage was begun. None where it does not matter, and in work that older versions began.
    clock: AwareDatetime | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        stage: Stage,
        parent: Manifest | None,
        made_with: Mapping[str, str],
        clock: datetime | None = None,
    ) -> Begin:
        """What a stage begun now would be."""
        return cls(
            stage=stage,
            config_hash=config.section_hash(stage),
            parent_hash=parent.content_hash if parent else None,
            shaping=config.shaping(stage),
            made_with=dict(made_with),
            clock=clock,
        )

    def create(self, location: Location) -> Begin:
        """Write it to the stage at `location` unless there is one; returns the one that is there.

        Raises CorruptShard for a file that is none.
        """
        return _parse_begin(location, location.create(BEGIN, canonical_json(self.dump()).encode()))

    def dump(self) -> dict[str, Any]:
        without = {"clock"} if self.clock is None else None
        return self.model_dump(mode="json", exclude=without)

    def changes(self, now: Begin, config: RunConfig) -> dict[str, tuple[str, str]]:
        """Key → its value here and `now`, of all that differ; `config` is what `now` was made of.

        A key that did not exist here yet had the value that is the default now.
        """
        changes = {}
        if self.parent_hash != now.parent_hash:
            changes["parent"] = _short_hash(self.parent_hash), _short_hash(now.parent_hash)
        for name in self.made_with.keys() & now.made_with.keys():
            if self.made_with[name] != now.made_with[name]:
                changes[name] = _short_value(self.made_with[name]), _short_value(now.made_with[name])
        if self.shaping is None or now.shaping is None:
            if self.config_hash != now.config_hash:
                changes["config"] = _short_hash(self.config_hash), _short_hash(now.config_hash)
            return changes
        before, after = dict(_leaves(self.shaping)), dict(_leaves(now.shaping))
        for keys, value in after.items():
            was = before[keys] if keys in before else config.default(keys)
            if was != value:
                changes[_key_name(keys)] = _short_value(was), _short_value(value)
        return changes


def read_begin(location: Location) -> Begin | None:
    """Of the stage at `location`; None for one that has not begun. Raises CorruptShard."""
    return _parse_begin(location, location.read(BEGIN)) if location.exists(BEGIN) else None


def _parse_begin(location: Location, data: bytes) -> Begin:
    stage = location.uri.rsplit("/", 1)[-1]
    fix = f"restore the file, or run `eagle3 {stage} --force`"
    return Begin.parse(data, where=location.where(BEGIN), fix=fix)


def _leaves(
    fields: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _key_name(keys: tuple[str, ...]) -> str:
    """As a user writes it."""
    return "run.seed" if keys == ("seed",) else ".".join(keys)


def _short_value(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _short_hash(value: str | None) -> str:
    return value[:16] if value else "none"
