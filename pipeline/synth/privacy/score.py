"""How well personal data is found, measured on labelled text: `eagle3 pii-score FILE…`.

A record with `spans` is labelled:   {"text", "spans": [{"start", "end", "type"}]}, offsets in characters, end exclusive
A record with `turns` is a prompt:   whatever is found in it counts as a false alarm

    recall      gold spans of a type that some finding of that type overlaps, of all its gold spans
    precision   findings of a type that overlap some gold span of that type, of all its findings
    overlap     at least one character in common

Recall and precision are taken with every measured entity switched on, false alarms with the
policy as it is configured. In a record with `meta.entity_under_test` only that type is labelled,
so only that type is scored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import DlpSection, PiiSection
from pipeline.errors import DataError
from pipeline.prompts.files import read_jsonl
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.privacy.finding import Finding, without_overlap

#: Names that label sets use → the entity that finds them. A type that is not here and no entity either is left out.
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
    "EMAIL_ADDRESS",
    "PHONE_NUMBER",
    "CREDIT_CARD",
    "IBAN_CODE",
    "US_SSN",
    "IP_ADDRESS",
    "API_KEY",
    "PASSWORD",
    "PRIVATE_KEY",
    "CRYPTO",
    "MEDICAL_LICENSE",
    "PERSON",
    "ADDRESS",
)
FULL_NAME = "PERSON (two words or more)"
_CHUNK = 512  # records scored together


@dataclass
class EntityCounts:
    """Counts of one entity."""

    gold: int = 0
    hit: int = 0
    found: int = 0
    right: int = 0

    @property
    def recall(self) -> float | None:
        return round(self.hit / self.gold, 4) if self.gold else None

    @property
    def precision(self) -> float | None:
        return round(self.right / self.found, 4) if self.found else None


@dataclass
class Score:
    """What the files gave."""

    entities: dict[str, EntityCounts] = field(default_factory=dict)
    labelled: int = 0
    prompts: int = 0
    flagged: int = 0
    flagged_by: Counter[str] = field(default_factory=Counter)
    rates: dict[str, float] = field(default_factory=dict)  # texts a second

    def as_json(self) -> dict[str, Any]:
        """The scores with their definition."""
        entities = {
            name: {
                "recall": tally.recall,
                "precision": tally.precision,
                "gold": tally.gold,
                "found": tally.found,
            }
            for name, tally in self.entities.items()
            if tally.gold or tally.found
        }
        share = round(self.flagged / self.prompts, 5) if self.prompts else None
        return {
            "definition": "a finding and a gold span of the same type agree when they have at least one character in common",
            "labelled_records": self.labelled,
            "entities": entities,
            "prompts": {
                "records": self.prompts,
                "flagged": self.flagged,
                "false_positive_rate": share,
                "by_entity": dict(sorted(self.flagged_by.items())),
            },
            "per_second": {name: round(rate, 1) for name, rate in self.rates.items()},
        }


def score_files(files: Sequence[str], policy: PiiSection, dlp: DlpSection | None = None) -> Score:
    """Score every record of the files. Raises DataError for one that is neither labelled nor a prompt."""
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
    if isinstance(record, dict) and isinstance(record.get("turns"), list):
        return record
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("text"), str)
        or not isinstance(record.get("spans"), list)
    ):
        raise DataError(
            "is neither labelled nor a prompt",
            where=where,
            fix='write {"text", "spans": [{"start", "end", "type"}]} or {"turns": ["…"]}',
        )
    for span in record["spans"]:
        if not isinstance(span, dict) or not all(
            isinstance(span.get(key), kind)
            for key, kind in (("start", int), ("end", int), ("type", str))
        ):
            raise DataError(
                "has a span without start, end and type",
                where=f"{where}: spans",
                fix='write {"start": 3, "end": 9, "type": "PERSON"}',
            )
    return record


def _score_labelled(
    score: Score, records: Sequence[dict[str, Any]], policy: PiiSection, dlp: DlpSection | None
) -> None:
    entities = tuple(
        sorted({*policy.entities, *(set(MEASURED) - {"API_KEY", "PASSWORD", "PRIVATE_KEY"})})
    )
    everything = PiiFilter(policy.model_copy(update={"entities": entities, "secrets": True}), dlp)
    score.entities = {name: EntityCounts() for name in (*MEASURED, FULL_NAME)}
    found = _timed(
        score,
        "all entities, with spaCy's entity recogniser",
        everything,
        [record["text"] for record in records],
    )
    for record, findings in zip(records, found, strict=True):
        only = (record.get("meta") or {}).get("entity_under_test")
        gold = [
            (span["start"], span["end"], ALIASES.get(span["type"], span["type"]))
            for span in record["spans"]
        ]
        findings = _distinct(findings)
        for entity in MEASURED if only is None else {ALIASES.get(only, only)} & set(MEASURED):
            _count(
                score.entities[entity],
                [span for span in gold if span[2] == entity],
                [finding for finding in findings if finding.entity == entity],
            )
        names = [
            span
            for span in gold
            if span[2] == "PERSON" and len(record["text"][span[0] : span[1]].split()) > 1
        ]
        _count(
            score.entities[FULL_NAME],
            names,
            [finding for finding in findings if finding.entity == "PERSON"],
        )
    score.entities[FULL_NAME].found = 0  # a finding cannot be told to look for full names only


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Several finders of one type may agree; that is one finding."""
    types = {finding.entity for finding in findings}
    return [
        found
        for entity in sorted(types)
        for found in without_overlap(finding for finding in findings if finding.entity == entity)
    ]


def _count(
    tally: EntityCounts, gold: Sequence[tuple[int, int, str]], findings: Sequence[Finding]
) -> None:
    tally.gold += len(gold)
    tally.found += len(findings)
    tally.hit += sum(
        any(finding.start < end and start < finding.end for finding in findings)
        for start, end, _ in gold
    )
    tally.right += sum(
        any(finding.start < end and start < finding.end for start, end, _ in gold)
        for finding in findings
    )


def _score_prompts(
    score: Score, prompts: Sequence[Sequence[str]], policy: PiiSection, dlp: DlpSection | None
) -> None:
    configured = PiiFilter(policy, dlp)
    name = (
        "policy, with spaCy's entity recogniser"
        if configured.uses_ner
        else "policy, patterns and secrets"
    )
    found = iter(
        _timed(
            score,
            name,
            configured,
            [turn for turns in prompts for turn in turns],
            records=len(prompts),
        )
    )
    for turns in prompts:
        types = {finding.entity for _ in turns for finding in next(found)}
        score.flagged += bool(types)
        score.flagged_by.update(types)


def _timed(
    score: Score, name: str, pii: PiiFilter, texts: Sequence[str], *, records: int | None = None
) -> Iterable[list[Finding]]:
    pii.find_all(["warm-up"])
    begun = time.perf_counter()
    found = [
        findings
        for start in range(0, len(texts), _CHUNK)
        for findings in pii.opinions(texts[start : start + _CHUNK])
    ]
    score.rates[name] = (records or len(texts)) / (time.perf_counter() - begun)
    return found


def print_score(score: Score) -> None:
    """The scores as tables."""
    from rich.table import Table

    from pipeline.console import console

    if score.labelled:
        table = Table(
            "entity",
            "recall",
            "precision",
            "gold spans",
            "findings",
            title=f"{score.labelled:,} labelled records",
            title_justify="left",
        )
        for name, values in score.as_json()["entities"].items():
            shares = (
                "–" if share is None else f"{share:.3f}"
                for share in (values["recall"], values["precision"])
            )
            table.add_row(
                name,
                *shares,
                f"{values['gold']:,}",
                f"{values['found']:,}" if values["found"] else "–",
            )
        console.print(table)
    if score.prompts:
        types = (
            ", ".join(f"{entity} {count}" for entity, count in sorted(score.flagged_by.items()))
            or "none"
        )
        console.print(
            f"{score.flagged:,} of {score.prompts:,} prompts flagged ({score.flagged / score.prompts:.2%}): {types}"
        )
    for name, rate in score.rates.items():
        console.print(f"{rate:,.0f} a second: {name}")
