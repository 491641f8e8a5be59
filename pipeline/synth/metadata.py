"""Personal data and secrets beside the text: ids, sources, categories, licences, system prompt.

They reach samples, manifest, datasheet and head like the texts, and pass the same filter. A label
with a finding is replaced whole, by a salted digest that is the same wherever the label occurs, and
its prompt stays: a label is nothing that the target reads.

    id anna@firm.com   →  id-5b0cf2a91d3e      findings of `metadata` in the audit
    license:+49 30 …   →  license:license-…    among the reasons of what was left out
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from pipeline.config import SynthSection
from pipeline.errors import ConfigError
from pipeline.records import Prompt
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.privacy.ledger import Ledger, read_salt

#: Field → what its digests begin with.
_FIELDS = {"sample_id": "id", "source": "source", "category": "category", "license": "license"}
#: Digests and UUIDs, alone or after a name, say nothing of anybody, and look like numbers of all
#: kinds here and there.
_HASHED = re.compile(
    r"(?:^|.*[^0-9A-Za-z.])"
    r"([0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?=[0-9]*[a-f])[0-9a-f]{8,128})",
    re.DOTALL,
)
_LONGEST_HASH = 128
_DIGITS = re.compile(r"[0-9]")
_NUMBERED = re.compile(r"(.*?[^0-9.])?([1-9][0-9]*)", re.DOTALL)
#: Digits in which no telephone, card or passport has room, and those of a record's number.
_FEW_DIGITS, _RECORD_DIGITS = 6, 9
_REMEMBERED = 100_000  # labels without a finding
_LONGEST_REASON = 200


class Metadata:
    """Labels without findings. Without a filter everything is left as it is.

    Raises ConfigError when a system prompt of the run's holds what no prompt may.
    """

    def __init__(self, section: SynthSection, pii: PiiFilter | None, ledger: Ledger | None) -> None:
        self._filter, self._ledger = pii, ledger
        self._has_own_patterns = bool(section.pii.recognizers)
        self._harmless: set[str] = set()
        if pii is not None:
            self._salt = read_salt(section.pii.salt_variable)
            _refuse(section.system_prompt, "synth.system_prompt", pii)
            for variant in section.mix:
                _refuse(variant.system_prompt, f"synth.mix.{variant.name}.system_prompt", pii)

    def clean(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The same prompts; every finding is noted in the ledger, at each prompt that has it."""
        if self._filter is None or self._ledger is None:
            return list(prompts)
        labels = {(getattr(each, name), each.source) for each in prompts for name in _FIELDS}
        findings = self._find(labels)
        cleaned = []
        for prompt in prompts:
            changed = {}
            for field, kind in _FIELDS.items():
                label = getattr(prompt, field)
                if label in findings:
                    self._ledger.note("metadata", *findings[label])
                    changed[field] = self._digest(kind, label)
            cleaned.append(prompt.model_copy(update=changed) if changed else prompt)
        return cleaned

    def clean_reasons(self, counts: Mapping[str, int]) -> dict[str, int]:
        """What prompts were left out for; a reason may quote a record's licence."""
        quoted = {reason: reason.partition(":")[2][:_LONGEST_REASON] for reason in counts}
        findings = self._find({(label, "") for label in quoted.values()})
        cleaned: Counter[str] = Counter()
        for reason, count in counts.items():
            kind, label = reason.partition(":")[0], quoted[reason]
            label = self._digest(kind, label) if label in findings else label
            cleaned[f"{kind}:{label}" if label else kind] += count
        return dict(sorted(cleaned.items()))

    def _find(self, labels: set[tuple[str, str]]) -> dict[str, tuple[str, list[Finding]]]:
        """Those of the labels that have findings, and in which text; (label, source) is given."""
        if self._filter is None:
            return {}
        typical = {label: self._typical(label, source) for label, source in sorted(labels)}
        unknown = sorted({text for text in typical.values() if text not in self._harmless})
        findings = dict(zip(unknown, self._filter.find_all(unknown), strict=True))
        for text, in_text in findings.items():
            if not in_text and len(self._harmless) < _REMEMBERED:
                self._harmless.add(text)
        return {
            label: (text, findings[text]) for label, text in typical.items() if findings.get(text)
        }

    def _typical(self, label: str, source: str) -> str:
        """A label that stands for this one and many more: of numbered ids one is inspected.

        Where the run has patterns of its own, any number may be what they are looking for.
        """
        if self._has_own_patterns:
            return label
        if hashed := _HASHED.fullmatch(label, max(0, len(label) - _LONGEST_HASH)):
            return label[: hashed.start(1)].rstrip("-_:/#")
        numbered = _NUMBERED.fullmatch(label)
        if numbered is None:
            return label
        before, number = numbered[1] or "", numbered[2]
        is_record = before == f"{source}:" and len(number) <= _RECORD_DIGITS
        if is_record or len(_DIGITS.findall(label)) <= _FEW_DIGITS:
            return before + "123456789"[: min(len(number), _FEW_DIGITS)]
        return label

    def _digest(self, kind: str, label: str) -> str:
        digest = hmac.new(self._salt, b"label\0" + label.encode(), hashlib.sha256)
        return f"{kind}-{digest.hexdigest()[:12]}"


def _refuse(system_prompt: str | None, where: str, pii: PiiFilter) -> None:
    types = pii.check(system_prompt) if system_prompt else []
    if types:
        raise ConfigError(
            f"holds personal data or a secret ({', '.join(types)})",
            where=where,
            fix="take it out: the target reads it in every conversation, and the head's card "
            "names it; what is none can be left out of synth.pii.entities",
        )
