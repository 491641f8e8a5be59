"""Personal data and secrets in text.

    presidio with a real spaCy pipeline   what checksums, formats and a language model can tell
    recognisers, addresses                where presidio is weak (docs/pii.md has the measurements)
    secrets                               credentials
    dlp                                   another inspector, where the run names one

A text in an unusual spelling is searched twice: as it is, and as its reader understands it (view).
All of them report findings with a score; thresholds are applied here, values that are nobody's are
left out (reserved), and findings that overlap become one. Only entity types, offsets, counts and
salted hashes leave this module's callers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Protocol

from pipeline.config import DlpSection, PiiSection
from pipeline.errors import ConfigError, MissingPackage
from pipeline.synth.privacy.addresses import find_addresses
from pipeline.synth.privacy.analyzer import Analyzer
from pipeline.synth.privacy.finding import Finder, Finding, above_threshold, without_overlap
from pipeline.synth.privacy.ids import ID_FINDERS
from pipeline.synth.privacy.recognisers import NUMBER_FINDERS, find_names, mislabelled_names
from pipeline.synth.privacy.reserved import marked, somebodys
from pipeline.synth.privacy.secrets import SECRET_ENTITIES, find_secrets
from pipeline.synth.privacy.view import view_of

#: This project's own finders by entity.
_FINDERS: dict[str, tuple[Finder, ...]] = {
    **NUMBER_FINDERS,
    **ID_FINDERS,
    "ADDRESS": (find_addresses,),
    "PERSON": (find_names,),
}


class Inspector(Protocol):
    """A further detector over many texts; its findings are taken as they are, at any score."""

    def inspect(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text."""


class PiiFilter:
    """Detects the configured entities, and secrets.

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
        model = section.spacy_model
        _require(model, model.replace("_", "-"), "synth.pii.spacy_model")
        if section.secrets:
            _require("detect_secrets", "detect-secrets", "synth.pii.secrets")
        wanted = {*section.entities, *(spec.entity for spec in section.recognizers)}
        self._analyzer = Analyzer(section, wanted)
        by_presidio = self._analyzer.supported_entities
        _check_entities(section, by_presidio | set(_FINDERS), by_presidio)
        own = sorted(wanted & set(_FINDERS))
        self._finders: list[Finder] = [finder for entity in own for finder in _FINDERS[entity]]
        if section.secrets:
            self._finders.append(find_secrets)
        self._finds_names = "PERSON" in wanted
        self._threshold, self._thresholds = section.score_threshold, section.thresholds
        self._inspector = inspector or _open_inspector(dlp or DlpSection())
        self.entities = sorted({*wanted, *(SECRET_ENTITIES if section.secrets else ())})
        self.uses_ner = self._analyzer.uses_ner

    def find_all(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text that are somebody's, in text order, none overlapping."""
        return [without_overlap(somebodys(of_text)) for of_text in self.find_overlapping(texts)]

    def find_overlapping(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text, unmerged: the same characters may be of several types."""
        inspected = self._inspector.inspect(texts) if self._inspector else [[] for _ in texts]
        views = {number: view for number, text in enumerate(texts) if (view := view_of(text))}
        searched = self._search([*texts, *(view.text for view in views.values())])
        findings = searched[: len(texts)]
        for text, of_text, further in zip(texts, findings, inspected, strict=True):
            of_text += marked(text, further)
        for (number, view), in_view in zip(views.items(), searched[len(texts) :], strict=True):
            findings[number] += map(view.in_source, in_view)
        return findings

    def check(self, text: str) -> list[str]:
        """Entity types found in `text`, sorted."""
        return sorted({finding.entity for finding in self.find_all([text])[0]})

    def _search(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings of each text by presidio and our own finders, those that reach a threshold."""
        return [
            marked(text, above_threshold(findings, self._threshold, self._thresholds))
            for text, findings in zip(texts, self._find_all_scores(texts), strict=True)
        ]

    def _find_all_scores(self, texts: Sequence[str]) -> Iterator[list[Finding]]:
        for text, (by_presidio, document) in zip(texts, self._analyzer.analyse(texts), strict=True):
            own = [finding for finder in self._finders for finding in finder(text)]
            names = mislabelled_names(document) if self._finds_names else ()
            yield [*by_presidio, *own, *names]


def _check_entities(section: PiiSection, known: set[str], by_presidio: set[str]) -> None:
    """A misspelt type would silently never be found, nor words that no recogniser looks for."""
    with_secrets = known | set(SECRET_ENTITIES)
    for field, entities, allowed in (
        ("entities", section.entities, known),
        ("thresholds", section.thresholds, with_secrets),
        ("context_words", section.context_words, by_presidio),
    ):
        for entity in entities:
            if entity not in allowed:
                raise ConfigError(
                    f"no recogniser finds {entity!r}",
                    where=f"synth.pii.{field}",
                    fix=f"choose among {', '.join(sorted(allowed))}",
                )


def _open_inspector(section: DlpSection) -> Inspector | None:
    if section.backend == "none":
        return None
    from pipeline.synth.privacy.dlp import GoogleInspector

    return GoogleInspector(section)


def _require(module: str, package: str, where: str) -> None:
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        without = "set synth.pii.enabled=false for data known to be free of personal data"
        fix = f"pip install {package}, or {without}"
        raise MissingPackage(f"the pip package {package} is not installed", where=where, fix=fix)
