"""Personal data and secrets in text.

    presidio with a real spaCy pipeline   what checksums, formats and a language model can tell
    numbers, addresses, names             where presidio is weak (docs/pii.md has the measurements)
    secrets                               credentials
    dlp                                   another inspector, where the run names one

All of them report findings with a score; thresholds are applied here, and findings that overlap
become one. Only entity types, offsets, counts and salted hashes leave this module's callers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.config import DlpSection, PiiSection
from pipeline.errors import ConfigError, MissingPackage
from pipeline.synth.privacy.addresses import find_addresses
from pipeline.synth.privacy.analyzer import Analyzer
from pipeline.synth.privacy.finding import Finder, Finding, sure_enough, without_overlap
from pipeline.synth.privacy.names import find_names, mislabelled_names
from pipeline.synth.privacy.numbers import number_finders
from pipeline.synth.privacy.secrets import SECRET_ENTITIES, find_secrets


class Inspector(Protocol):
    """A further opinion on many texts; its findings are taken as they are."""

    def inspect(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text."""


class PiiFilter:
    """What looks for the configured entities, and for secrets.

    Raises MissingPackage when presidio, detect-secrets or the spaCy pipeline is not installed,
    ConfigError for an entity type that nothing here finds.
    """

    def __init__(
        self,
        section: PiiSection,
        dlp: DlpSection | None = None,
        *,
        inspector: Inspector | None = None,
    ) -> None:
        _require("presidio_analyzer", "presidio-analyzer", "synth.pii")
        _require(
            section.spacy_model, section.spacy_model.replace("_", "-"), "synth.pii.spacy_model"
        )
        if section.secrets:
            _require("detect_secrets", "detect-secrets", "synth.pii.secrets")
        finders = _finders()
        wanted = {*section.entities, *(spec.entity for spec in section.recognizers)}
        self._analyzer = Analyzer(section, wanted)
        _check_entities(section, self._analyzer.findable | set(finders))
        self._finders = [
            finder for entity in sorted(wanted & set(finders)) for finder in finders[entity]
        ]
        if section.secrets:
            self._finders.append(find_secrets)
        self._finds_names = "PERSON" in wanted
        self._threshold, self._thresholds = section.score_threshold, section.thresholds
        self._inspector = inspector or _inspector(dlp or DlpSection())
        self.entities = sorted({*wanted, *(SECRET_ENTITIES if section.secrets else ())})
        self.uses_ner = self._analyzer.uses_ner

    def find_all(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text, in text order, none overlapping."""
        return [without_overlap(findings) for findings in self.opinions(texts)]

    def opinions(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text as they come: the same characters may be several types."""
        inspected = self._inspector.inspect(texts) if self._inspector else [[] for _ in texts]
        analysed = self._analyzer.analyse(texts)
        return [
            self._judged(text, *pair) + further
            for text, pair, further in zip(texts, analysed, inspected, strict=True)
        ]

    def check(self, text: str) -> list[str]:
        """Entity types found in `text`, sorted."""
        return sorted({finding.entity for finding in self.find_all([text])[0]})

    def _judged(self, text: str, by_presidio: list[Finding], document: Any) -> list[Finding]:
        own = [finding for finder in self._finders for finding in finder(text)]
        if self._finds_names:
            own += mislabelled_names(document)
        return sure_enough([*by_presidio, *own], self._threshold, self._thresholds)


def _finders() -> dict[str, list[Finder]]:
    """This project's own finders by entity."""
    return {**number_finders(), "ADDRESS": [find_addresses], "PERSON": [find_names]}


def _check_entities(section: PiiSection, known: set[str]) -> None:
    """A misspelt type would silently never be found."""
    for field, names in (
        ("entities", section.entities),
        ("thresholds", section.thresholds),
        ("context_words", section.context_words),
    ):
        allowed = known if field == "entities" else known | set(SECRET_ENTITIES)
        for entity in names:
            if entity not in allowed:
                raise ConfigError(
                    f"no recogniser finds {entity!r}",
                    where=f"synth.pii.{field}",
                    fix=f"choose among {', '.join(sorted(allowed))}",
                )


def _inspector(section: DlpSection) -> Inspector | None:
    if section.backend == "none":
        return None
    from pipeline.synth.privacy.dlp import GoogleInspector

    return GoogleInspector(section)


def _require(module: str, package: str, where: str) -> None:
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        fix = f"pip install {package}, or set synth.pii.enabled=false for data known to be free of personal data"
        raise MissingPackage(f"the pip package {package} is not installed", where=where, fix=fix)
