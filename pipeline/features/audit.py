"""audit.json of the states: how far replies agree with the teacher, from the shards' entries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.errors import DataError
from pipeline.target.agreement import CAUSES, Agreement, problem_of

AUDIT = "audit.json"
_SCHEMA_VERSION = 1
#: Samples that are listed.
_FARTHEST = 10


class RepliesAudit:
    """Pools what each shard says of its replies."""

    def __init__(self) -> None:
        self._pooled, self._farthest = Agreement(), list[dict[str, Any]]()
        self._rendered, self._most_beyond, self._gap_steps = 0, 0.0, 0.0

    def add(self, tallies: Mapping[str, Any]) -> None:
        """Of one shard; those of older versions say nothing."""
        self._pooled += Agreement.read(tallies.get("agreement", {}))
        self._most_beyond = max(self._most_beyond, tallies.get("most_beyond", 0.0))
        self._gap_steps = max(self._gap_steps, tallies.get("gap_steps", 0.0))
        self._rendered += tallies.get("rendered", 0)
        self._farthest += tallies.get("farthest", [])
        self._farthest.sort(
            key=lambda each: (-Agreement.read(each).distance, each["source"], each["sample_id"])
        )
        del self._farthest[_FARTHEST:]

    def check(self, where: str) -> None:
        """Raise DataError where all shards together show what none showed alone."""
        if problem := problem_of(self._pooled, self._most_beyond):
            worst = self._farthest[0]
            named = f"{where}: sample {worst['sample_id']} of {worst['source']}, the farthest"
            raise DataError(problem, where=named, fix=CAUSES)

    @property
    def figures(self) -> dict[str, Any]:
        """What the manifest carries; empty where no reply was scored."""
        figures = self._pooled.figures()
        figures |= {"gap_steps": self._gap_steps} if figures else {}
        return figures | ({"rendered_samples": self._rendered} if self._rendered else {})

    def as_json(self) -> str:
        """The file. It quotes no prompt and no reply."""
        body = {
            "schema_version": _SCHEMA_VERSION,
            "replies": self.figures,
            "farthest": [
                {
                    "sample_id": each["sample_id"],
                    "source": each["source"],
                    **Agreement.read(each).figures(),
                }
                for each in self._farthest
            ],
        }
        return json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
