"""Personal data and secrets, before generation in prompts and after it in responses.

A prompt can be redacted, because the target has not read it yet. A response cannot: its token ids
are those that were generated, and nobody tokenises it again. A finding there drops the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from pipeline.config import PiiSection
from pipeline.records import Prompt, Sample
from pipeline.synth.pii import PiiFilter

Record = TypeVar("Record", Prompt, Sample)


class Screen:
    """The run's policy. Without `enabled` everything passes and nothing is loaded."""

    def __init__(self, section: PiiSection) -> None:
        self._filter = PiiFilter(section) if section.enabled else None
        self._redacts = section.action == "redact"

    def prompts(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], Counter[str]]:
        """Clean or redacted prompts, and the dropped ones by reason."""
        if self._filter is None:
            return list(prompts), Counter()
        texts = [turn for prompt in prompts for turn in prompt.turns]
        if self._redacts:
            clean = iter([text for text, _ in self._filter.redact_all(texts)])
            return [prompt.model_copy(update={"turns": tuple(next(clean) for _ in prompt.turns)}) for prompt in prompts], Counter()
        return _split(prompts, [len(prompt.turns) for prompt in prompts], self._filter.check_all(texts))

    def samples(self, samples: Sequence[Sample]) -> tuple[list[Sample], Counter[str]]:
        """Samples whose responses are clean, and the dropped ones by reason."""
        if self._filter is None:
            return list(samples), Counter()
        replies = [[message.content for message in sample.messages if message.role == "assistant"] for sample in samples]
        found = self._filter.check_all([reply for several in replies for reply in several])
        return _split(samples, [len(several) for several in replies], found)


def _split(records: Sequence[Record], texts: Sequence[int], found: Sequence[list[str]]) -> tuple[list[Record], Counter[str]]:
    """Records without a finding; `texts[i]` of the flat `found` belong to record i.

    A record counts once, under the first of its types in alphabetical order.
    """
    clean: list[Record] = []
    dropped: Counter[str] = Counter()
    remaining = iter(found)
    for record, count in zip(records, texts, strict=True):
        types = sorted({entity for _ in range(count) for entity in next(remaining)})
        if types:
            dropped[f"pii:{types[0]}"] += 1
        else:
            clean.append(record)
    return clean, dropped
