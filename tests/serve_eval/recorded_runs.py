"""What real servers answered to golden prompts, as `python -m tests.engines.record` kept it.

A recording becomes the SeenServer that check-serving or `eval --server` would have had.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from pipeline.config import LiveServerSection
from pipeline.records import Record
from pipeline.reports import EvalReport
from pipeline.serve_eval.questions import Question
from pipeline.serve_eval.servers.findings import SeenServer
from pipeline.serve_eval.servers.kinds import LiveServer, ServerRounds, rounds_of
from pipeline.serve_eval.servers.load import LiveReply, LoadRun

FOLDER = Path(__file__).parent / "recordings"
#: By prompt, of each token of the decoder's reply but the last.
Leads = dict[str, tuple[float, ...]]


class RecordedReply(NamedTuple):
    """Token ids, and what each round drafted and accepted; None: no rounds were reported."""

    ids: tuple[int, ...]
    ended: str  # finish_reason
    rounds: tuple[tuple[int, int], ...] | None


class RecordedRun(NamedTuple):
    """All golden prompts at one concurrency, by id."""

    concurrency: int
    replies: dict[str, RecordedReply]
    failed: dict[str, int]
    detail: str


class Recording(Record):
    """A server, and the findings that may name what is wrong with it."""

    name: str
    found: tuple[str, ...]
    server: dict[str, Any]
    drafts: int
    runs: tuple[RecordedRun, ...]
    leads: dict[str, Leads] = Field({})
    """By the type of the report whose replies it scored; {} of an older recording."""

    def seen(self, run: RecordedRun, report: EvalReport, *, listed: bool) -> SeenServer:
        """At one concurrency; without `listed` the server says nothing of single rounds, as without
        --per-request-spec-decode-metrics, and parted replies are asked for again."""
        assert report.golden
        golden = {each.id: each for each in report.golden.prompts}
        replies = []
        for name, each in run.replies.items():
            question = Question(name, "", golden[name].prompt_ids)
            rounds = self._rounds(each.rounds) if each.rounds else None
            if rounds and not listed:
                rounds = replace(rounds, in_order=())
            sent = len(question.context)
            parts = question, len(each.ids), each.ids, sent, each.ended
            replies.append(LiveReply(*parts, 0.0, None, rounds))
        section = LiveServerSection.model_validate({"url": "http://recorded"})
        failed = Counter(run.failed)
        load = LoadRun(run.concurrency, tuple(replies), failed, 1.0, None, None, run.detail)
        own = {each.id: each.counters for each in golden.values()}
        limit = report.golden.max_new_tokens
        leads = self.leads.get(report.settings.dtype, {})
        seen = SeenServer(LiveServer(**self.server), section, [load], limit, (), report, own, leads)
        return seen if listed else replace(seen, cut=self._cut(seen, run))

    def _rounds(self, rounds: Sequence[tuple[int, int]]) -> ServerRounds | None:
        drafted, accepted = zip(*rounds, strict=True)
        reported = {
            "acceptance_histogram": [accepted.count(each) for each in range(self.drafts + 1)],
            "num_spec_steps": len(rounds),
            "num_draft_tokens": sum(drafted),
            "num_spec_tokens": self.drafts,
            "per_step_drafted": drafted,
            "per_step_accepted": accepted,
        }
        return rounds_of(reported, 0, None)

    def _cut(self, seen: SeenServer, run: RecordedRun) -> dict[str, LiveReply]:
        """Of rounds up to the parting, where a limit of tokens would have ended them."""
        cut = {}
        whole = {each.question.request_id: each for each in seen.runs[0].replies}
        for parting in seen.partings:
            listed = run.replies[parting.prompt].rounds
            if parting.position < 2 or not listed:
                continue
            position, taken = 0, list[tuple[int, int]]()
            while position < parting.position - 1 and len(taken) < len(listed):
                taken.append(listed[len(taken)])
                position += taken[-1][1] + 1
            rounds = self._rounds(taken)
            assert rounds
            cut[parting.prompt] = replace(
                whole[parting.prompt], rounds=replace(rounds, in_order=())
            )
        return cut


class Recordings(Record):
    """All, and the decoder's reports, by type, that they are judged by."""

    reports: dict[str, EvalReport]
    servers: tuple[Recording, ...]

    @staticmethod
    def read(file: Path) -> Recordings:
        return Recordings.model_validate_json(gzip.decompress(file.read_bytes()))

    def write(self, file: Path) -> None:
        file.write_bytes(gzip.compress(self.model_dump_json().encode(), mtime=0))
