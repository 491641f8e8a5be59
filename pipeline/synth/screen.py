"""Personal data, secrets and quality: before generation in prompts, after it in responses.

A prompt can be changed, because the target has not read it yet. A response cannot: its token ids
are those that were generated, and nobody tokenises it again. A finding there drops the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pipeline.config import SynthSection
from pipeline.records import Prompt, Sample
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.privacy.ledger import Ledger, read_salt
from pipeline.synth.privacy.replace import Pseudonyms, is_invented, redacted
from pipeline.synth.quality import apply_steps, reply_steps

Record = TypeVar("Record", Prompt, Sample)


class Screen:
    """The run's policy. Without `pii.enabled` only the quality filters work and no recogniser is loaded."""

    def __init__(self, section: SynthSection, *, seed: int = 0) -> None:
        self._action, self._seed = section.pii.action, seed
        self._filter = PiiFilter(section.pii, section.dlp) if section.pii.enabled else None
        self._ledger = Ledger(read_salt(section.pii.salt_variable)) if section.pii.enabled else None
        self._steps = reply_steps(section.quality)

    def prompts(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], Counter[str]]:
        """Clean, redacted or pseudonymised prompts, and the dropped ones by reason."""
        if self._filter is None:
            return list(prompts), Counter()
        kept: list[Prompt] = []
        dropped: Counter[str] = Counter()
        for prompt, texts, found in self._found(
            [(prompt, _texts(prompt)) for prompt in prompts], "prompts"
        ):
            if self._action != "drop":
                kept.append(self._changed(prompt, texts, found))
            elif reason := _reason(found):
                dropped[reason] += 1
            else:
                kept.append(prompt)
        return kept, dropped

    def samples(self, samples: Sequence[Sample]) -> tuple[list[Sample], Counter[str]]:
        """Samples whose responses are good and clean, and the dropped ones by reason."""
        good, dropped = apply_steps(samples, self._steps)
        if self._filter is None:
            return good, dropped
        kept: list[Sample] = []
        for sample, _, found in self._found(
            [(sample, _replies(sample)) for sample in good], "responses"
        ):
            if reason := _reason(found):
                dropped[reason] += 1
            else:
                kept.append(sample)
        return kept, dropped

    def take_audit(self) -> dict[str, Any]:
        """Findings since the last call, as `Ledger.take` gives them: counts, types and salted hashes."""
        return self._ledger.take() if self._ledger else {}

    def _found(
        self, records: Sequence[tuple[Record, list[str]]], where: str
    ) -> Iterator[tuple[Record, list[str], list[list[Finding]]]]:
        """Each record with its texts and their findings; the texts of all records are looked at together."""
        assert self._filter is not None and self._ledger is not None
        found = iter(self._filter.find_all([text for _, texts in records for text in texts]))
        for record, texts in records:
            theirs = [self._foreign(text, next(found)) for text in texts]
            for text, findings in zip(texts, theirs, strict=True):
                self._ledger.note(where, text, findings)
            yield record, texts, theirs

    def _foreign(self, text: str, findings: list[Finding]) -> list[Finding]:
        """Without the values that this run invented itself."""
        if self._action != "pseudonymise":
            return findings
        return [
            finding for finding in findings if not is_invented(text[finding.start : finding.end])
        ]

    def _changed(
        self, prompt: Prompt, texts: Sequence[str], found: Sequence[Sequence[Finding]]
    ) -> Prompt:
        if not any(found):
            return prompt
        names = Pseudonyms(self._seed, (prompt.source, prompt.sample_id))
        change = redacted if self._action == "redact" else names.apply
        changed = [change(text, findings) for text, findings in zip(texts, found, strict=True)]
        system, turns = (changed[0], changed[1:]) if prompt.system is not None else (None, changed)
        return prompt.model_copy(update={"system": system, "turns": tuple(turns)})


def _texts(prompt: Prompt) -> list[str]:
    """What the target would read: the record's own system prompt, then its turns."""
    return [*([prompt.system] if prompt.system is not None else []), *prompt.turns]


def _replies(sample: Sample) -> list[str]:
    return [message.content for message in sample.messages if message.role == "assistant"]


def _reason(found: Sequence[Sequence[Finding]]) -> str | None:
    """A record counts once, under the first of its types in alphabetical order."""
    types = sorted({finding.entity for findings in found for finding in findings})
    return f"pii:{types[0]}" if types else None
