"""Personal data, secrets and quality: before generation in prompts, after it in replies.

A prompt can be changed, because the target has not read it yet. A reply cannot: its token ids are
those that were generated, and nobody tokenises it again. A finding there drops the sample.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.config import SynthSection
from pipeline.records import Prompt, Sample
from pipeline.synth.metadata import Metadata
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.privacy.ledger import Ledger, fingerprint, read_salt
from pipeline.synth.privacy.recognisers import patterns_digest
from pipeline.synth.privacy.replace import Pseudonyms, redacted
from pipeline.synth.privacy.secrets import SECRET_ENTITIES
from pipeline.synth.selection.quality import PromptOrSample, apply_steps, replies, reply_steps


class Screen:
    """The run's policy. Without `pii.enabled` no recogniser is loaded; quality still counts."""

    def __init__(self, section: SynthSection, *, seed: int = 0) -> None:
        self._action, self._seed = section.pii.action, seed
        self._filter = PiiFilter(section.pii, section.dlp) if section.pii.enabled else None
        self._ledger = Ledger(read_salt(section.pii.salt_variable)) if section.pii.enabled else None
        self.metadata = Metadata(section, self._filter, self._ledger)
        self._steps = reply_steps(section.quality)

    def prompts(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], Counter[str]]:
        """Clean, redacted or pseudonymised prompts, and the dropped ones by reason."""
        if self._filter is None:
            return list(prompts), Counter()
        prompts = self.metadata.clean(prompts)
        kept: list[Prompt] = []
        dropped: Counter[str] = Counter()
        records = [(prompt, _texts(prompt)) for prompt in prompts]
        for prompt, texts, findings in self._inspect(records, "prompts"):
            # Tools are no prose: with something else in a finding's place they may be none.
            in_tools = findings[-1:] if prompt.tools else []
            if self._action != "drop" and not any(in_tools):
                kept.append(self._changed(prompt, texts, findings))
            elif reason := _reason(findings if self._action == "drop" else in_tools):
                dropped[reason] += 1
            else:
                kept.append(prompt)
        return kept, dropped

    def samples(self, samples: Sequence[Sample]) -> tuple[list[Sample], Counter[str]]:
        """Samples whose replies are good and clean, and the dropped ones by reason."""
        good, dropped = apply_steps(samples, self._steps)
        if self._filter is None:
            return good, dropped
        kept: list[Sample] = []
        records = [(sample, list(replies(sample))) for sample in good]
        for sample, _, findings in self._inspect(records, "replies"):
            if reason := _reason(findings):
                dropped[reason] += 1
            else:
                kept.append(sample)
        return kept, dropped

    def take_audit(self) -> dict[str, Any]:
        """Findings since the last call, as `Ledger.take` gives them: counts and salted hashes."""
        return self._ledger.take() if self._ledger else {}

    def _inspect(
        self, records: Sequence[tuple[PromptOrSample, list[str]]], where: str
    ) -> Iterator[tuple[PromptOrSample, list[str], list[list[Finding]]]]:
        """Each record with its texts and their findings; all texts are inspected together."""
        assert self._filter is not None and self._ledger is not None
        all_findings = iter(self._filter.find_all([text for _, texts in records for text in texts]))
        for record, texts in records:
            findings = [next(all_findings) for _ in texts]
            for text, in_text in zip(texts, findings, strict=True):
                self._ledger.note(where, text, in_text)
            yield record, texts, findings

    def _changed(
        self, prompt: Prompt, texts: Sequence[str], findings: Sequence[Sequence[Finding]]
    ) -> Prompt:
        if not any(findings):
            return prompt
        names = Pseudonyms(self._seed, (prompt.source, prompt.sample_id))
        change = redacted if self._action == "redact" else names.apply
        changed = [change(text, in_text) for text, in_text in zip(texts, findings, strict=True)]
        system = changed.pop(0) if prompt.system is not None else None
        turns = tuple(changed[: len(prompt.turns)])
        return prompt.model_copy(update={"system": system, "turns": turns})


def pii_policy(section: SynthSection) -> dict[str, Any]:
    """What manifest and audit say of the policy."""
    pii = section.pii
    if not pii.enabled:
        return {"enabled": False}
    own = (recognizer.entity for recognizer in pii.recognizers)
    return {
        "enabled": True,
        "prompts": pii.action,
        "replies": "drop",
        "entities": sorted({*pii.entities, *own, *(SECRET_ENTITIES if pii.secrets else ())}),
        "score_threshold": pii.score_threshold,
        "thresholds": dict(sorted(pii.thresholds.items())),
        "dlp": section.dlp.backend,
        "spacy_model": pii.spacy_model,
    }


def screened_with(section: SynthSection) -> dict[str, str]:
    """What decides which texts are found: versions of the recognisers, our patterns, the salt.

    Two processes whose answers differ would give one run two filters.
    """
    if not section.pii.enabled:
        return {}
    spacy_model = section.pii.spacy_model
    packages = ("presidio-analyzer", "detect-secrets", *([spacy_model] if spacy_model else ()))
    versions = {f"pii.{package}": _version(package) for package in packages}
    salt = fingerprint(read_salt(section.pii.salt_variable))
    return {**versions, "pii.patterns": patterns_digest(), "pii.salt": salt}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _texts(prompt: Prompt) -> list[str]:
    """What the target would read: the record's own system prompt, its turns, its tools."""
    texts = (prompt.system, *prompt.turns, prompt.tools)
    return [text for text in texts if text is not None]


def _reason(findings: Sequence[Sequence[Finding]]) -> str | None:
    """A record counts once, under the first of its types in alphabetical order."""
    types = sorted({finding.entity for in_text in findings for finding in in_text})
    return f"pii:{types[0]}" if types else None
