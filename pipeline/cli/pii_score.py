"""How well personal data is found, measured on labelled text: `eagle3 pii-score FILE…`.

A record with `spans` is labelled:   {"text", "spans": [{"start", "end", "type"}]}, offsets in
                                     characters, end exclusive
A record with `turns` is a prompt:   every finding in it counts as a false alarm

    recall      gold spans of a type that some finding of that type overlaps, of all its gold spans
    precision   findings of a type that overlap some gold span of that type, of all its findings
    overlap     at least one character in common

Recall and precision are taken with every measured entity switched on, and of findings of reserved
values too: it is detection that they measure. False alarms are taken with the policy as it is
configured, which leaves reserved values alone. In a record with `meta.entity_under_test` only that
type is labelled, so only that type is scored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.config import DlpSection, PiiSection
from pipeline.errors import DataError
from pipeline.prompts.files import read_jsonl
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.privacy.finding import Finding, without_overlap
from pipeline.synth.privacy.secrets import SECRET_ENTITIES

#: Names that label sets use → the entity here. A type that is neither is left out.
ALIASES = {
    "IBAN": "IBAN_CODE",
    "CRYPTO_WALLET": "CRYPTO",
    "SSN": "US_SSN",
    "EMAIL": "EMAIL_ADDRESS",
    "PHONE": "PHONE_NUMBER",
    "STREET_ADDRESS": "ADDRESS",
    "IP": "IP_ADDRESS",
    "NAME": "PERSON",
}
#: Measured types. ADDRESS and PERSON are measured whether or not the policy has them on.
MEASURED = (
    "EMAIL_ADDRESS", "PHONE_NUMBER", "CREDIT_CARD", "IBAN_CODE", "US_SSN", "IP_ADDRESS", "API_KEY",
    "PASSWORD", "PRIVATE_KEY", "CRYPTO", "MEDICAL_LICENSE", "PERSON", "ADDRESS",
)  # fmt: skip
FULL_NAME = "PERSON (two words or more)"
_DEFINITION = (
    "a finding and a gold span of the same type agree when they have at least one character in"
    " common"
)
_CHUNK = 512  # texts analysed together


class GoldSpan(NamedTuple):
    """Characters [start, end) that are labelled as an entity."""

    start: int
    end: int
    entity: str


@dataclass
class EntityCounts:
    """Gold spans and findings of one entity, and how many of each agree with some of the other."""

    gold: int = 0
    gold_matched: int = 0
    findings: int = 0
    findings_matched: int = 0

    @property
    def recall(self) -> float | None:
        return round(self.gold_matched / self.gold, 4) if self.gold else None

    @property
    def precision(self) -> float | None:
        return round(self.findings_matched / self.findings, 4) if self.findings else None

    def add(self, gold: Sequence[GoldSpan], findings: Sequence[Finding]) -> None:
        """Count the spans and findings of one text."""
        self.gold += len(gold)
        self.gold_matched += sum(any(_overlap(span, f) for f in findings) for span in gold)
        self.findings += len(findings)
        self.findings_matched += sum(any(_overlap(span, f) for span in gold) for f in findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "recall": self.recall,
            "precision": self.precision,
            "gold": self.gold,
            "found": self.findings,
        }


@dataclass
class Score:
    """Counts over all files."""

    entities: dict[str, EntityCounts] = field(default_factory=dict)
    labelled: int = 0
    prompts: int = 0
    flagged: int = 0
    flagged_by: Counter[str] = field(default_factory=Counter)
    rates: dict[str, float] = field(default_factory=dict)  # texts a second

    def as_json(self) -> dict[str, Any]:
        """The scores with their definition."""
        return {
            "definition": _DEFINITION,
            "labelled_records": self.labelled,
            "entities": {
                name: counts.as_json()
                for name, counts in self.entities.items()
                if counts.gold or counts.findings
            },
            "prompts": {
                "records": self.prompts,
                "flagged": self.flagged,
                "false_positive_rate": (
                    round(self.flagged / self.prompts, 5) if self.prompts else None
                ),
                "by_entity": dict(sorted(self.flagged_by.items())),
            },
            "per_second": {name: round(rate, 1) for name, rate in self.rates.items()},
        }


def score_files(files: Sequence[str], policy: PiiSection, dlp: DlpSection | None = None) -> Score:
    """Score every record. Raises DataError for one that is neither labelled nor a prompt."""
    records = [_checked(record, where) for file in files for where, record in read_jsonl(file)]
    labelled = [record for record in records if "spans" in record]
    prompts = [record["turns"] for record in records if "spans" not in record]
    score = Score(labelled=len(labelled), prompts=len(prompts))
    if labelled:
        _score_labelled(score, labelled, policy, dlp)
    if prompts:
        _score_prompts(score, prompts, policy, dlp)
    return score


def _checked(record: Any, where: str) -> dict[str, Any]:
    fields = record if isinstance(record, dict) else {}
    if isinstance(fields.get("turns"), list):
        return fields
    if not isinstance(fields.get("text"), str) or not isinstance(fields.get("spans"), list):
        fix = 'write {"text", "spans": [{"start", "end", "type"}]} or {"turns": ["…"]}'
        raise DataError("is neither labelled nor a prompt", where=where, fix=fix)
    if not all(_is_span(span) for span in fields["spans"]):
        fix = 'write {"start": 3, "end": 9, "type": "PERSON"}'
        raise DataError("has a span without start, end and type", where=f"{where}: spans", fix=fix)
    return fields


def _is_span(span: Any) -> bool:
    kinds = {"start": int, "end": int, "type": str}
    return isinstance(span, dict) and all(isinstance(span.get(key), kinds[key]) for key in kinds)


def _score_labelled(
    score: Score, records: Sequence[dict[str, Any]], policy: PiiSection, dlp: DlpSection | None
) -> None:
    entities = tuple(sorted({*policy.entities, *MEASURED} - set(SECRET_ENTITIES)))
    pii = PiiFilter(policy.model_copy(update={"entities": entities, "secrets": True}), dlp)
    score.entities = {name: EntityCounts() for name in (*MEASURED, FULL_NAME)}
    name, texts = "all entities, with spaCy's entity recogniser", [r["text"] for r in records]
    findings_of_texts = _find_timed(score, name, pii.find_overlapping, texts, len(records))
    for record, findings in zip(records, findings_of_texts, strict=True):
        _score_record(score.entities, record, _merged_within_entity(findings))
    # No finding looks for full names only, so their precision would say nothing.
    score.entities[FULL_NAME].findings = 0


def _score_record(
    counts: dict[str, EntityCounts], record: dict[str, Any], findings: Sequence[Finding]
) -> None:
    gold = [
        GoldSpan(span["start"], span["end"], ALIASES.get(span["type"], span["type"]))
        for span in record["spans"]
    ]
    only = (record.get("meta") or {}).get("entity_under_test")
    for entity in MEASURED:
        if only is None or entity == ALIASES.get(only, only):
            of_type = [span for span in gold if span.entity == entity]
            counts[entity].add(of_type, [f for f in findings if f.entity == entity])
    persons = [span for span in gold if span.entity == "PERSON"]
    full = [span for span in persons if len(record["text"][span.start : span.end].split()) > 1]
    counts[FULL_NAME].add(full, [f for f in findings if f.entity == "PERSON"])


def _merged_within_entity(findings: Sequence[Finding]) -> list[Finding]:
    """Several recognisers of one entity may agree; that is one finding."""
    return [
        merged
        for entity in sorted({f.entity for f in findings})
        for merged in without_overlap(f for f in findings if f.entity == entity)
    ]


def _overlap(span: GoldSpan, finding: Finding) -> bool:
    return finding.start < span.end and span.start < finding.end


def _score_prompts(
    score: Score, prompts: Sequence[Sequence[str]], policy: PiiSection, dlp: DlpSection | None
) -> None:
    pii = PiiFilter(policy, dlp)
    recognisers = "with spaCy's entity recogniser" if pii.uses_ner else "patterns and secrets"
    texts = [turn for turns in prompts for turn in turns]
    findings = _find_timed(score, f"policy, {recognisers}", pii.find_all, texts, len(prompts))
    remaining = iter(findings)
    for turns in prompts:
        entities = {finding.entity for _ in turns for finding in next(remaining)}
        score.flagged += bool(entities)
        score.flagged_by.update(entities)


def _find_timed(
    score: Score,
    name: str,
    find: Callable[[Sequence[str]], list[list[Finding]]],
    texts: Sequence[str],
    records: int,
) -> list[list[Finding]]:
    """What `find` gives for each text; sets the rate called `name`, in records a second."""
    find(["warm-up"])
    begun = time.perf_counter()
    chunks = (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))
    findings = [of_text for chunk in chunks for of_text in find(chunk)]
    score.rates[name] = records / (time.perf_counter() - begun)
    return findings


def print_score(score: Score) -> None:
    """The scores as tables."""
    from pipeline.console import console

    if score.labelled:
        console.print(_table(score))
    if score.prompts:
        by_entity = ", ".join(f"{name} {count}" for name, count in sorted(score.flagged_by.items()))
        flagged = f"{score.flagged:,} of {score.prompts:,} prompts flagged"
        console.print(f"{flagged} ({score.flagged / score.prompts:.2%}): {by_entity or 'none'}")
    for name, rate in score.rates.items():
        console.print(f"{rate:,.0f} a second: {name}")


def _table(score: Score) -> Any:
    from rich.table import Table

    title = f"{score.labelled:,} labelled records"
    columns = ("entity", "recall", "precision", "gold spans", "findings")
    table = Table(*columns, title=title, title_justify="left")
    for name, counts in score.entities.items():
        if counts.gold or counts.findings:
            ratios = (counts.recall, counts.precision)
            cells = ["–" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
            findings = f"{counts.findings:,}" if counts.findings else "–"
            table.add_row(name, *cells, f"{counts.gold:,}", findings)
    return table
