"""Personal data and secrets in text, found by presidio with a real spaCy pipeline.

Only entity types and counts leave this module; the values that were found never do.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.config import PiiSection
from pipeline.errors import ConfigError, MissingPackage
from pipeline.synth.secrets import SECRET_ENTITIES, secret_recognizers

_BATCH = 32  # texts that spaCy processes together
_LANGUAGE = "en"


class Finding(NamedTuple):
    """One range of a text, without its content."""

    start: int
    end: int
    entity: str


class PiiFilter:
    """presidio's recognisers for the configured entities, and those for secrets.

    Raises MissingPackage when presidio or the spaCy pipeline is not installed, ConfigError for an
    entity type that no recogniser knows.
    """

    def __init__(self, section: PiiSection) -> None:
        _require("presidio_analyzer", "presidio-analyzer", "synth.pii")
        _require(section.spacy_model, section.spacy_model.replace("_", "-"), "synth.pii.spacy_model")
        self._engine = _build_engine(section.spacy_model)
        self._threshold = section.score_threshold
        self.entities = sorted({*section.entities, *SECRET_ENTITIES})
        known = _findable(self._engine)
        for entity in section.entities:
            if entity not in known:
                raise ConfigError(f"no recogniser finds {entity!r}", where="synth.pii.entities", fix=f"choose among {', '.join(sorted(known))}")

    def check(self, text: str) -> list[str]:
        """Entity types found in `text`, sorted."""
        return self.check_all([text])[0]

    def check_all(self, texts: Sequence[str]) -> list[list[str]]:
        """`check` of many texts, batched through spaCy."""
        return [sorted({finding.entity for finding in findings}) for findings in self._find(texts)]

    def redact(self, text: str) -> tuple[str, list[str]]:
        """`text` with `<ENTITY_TYPE>` in place of every finding, and the types found."""
        return self.redact_all([text])[0]

    def redact_all(self, texts: Sequence[str]) -> list[tuple[str, list[str]]]:
        """`redact` of many texts, batched through spaCy."""
        return [_replaced(text, findings) for text, findings in zip(texts, self._find(texts), strict=True)]

    def _find(self, texts: Sequence[str]) -> list[list[Finding]]:
        from presidio_analyzer import BatchAnalyzerEngine

        batch = BatchAnalyzerEngine(self._engine)
        results = batch.analyze_iterator(list(texts), language=_LANGUAGE, batch_size=_BATCH, entities=self.entities, score_threshold=self._threshold)
        return [_without_overlap(found) for found in results]


def _build_engine(spacy_model: str) -> Any:
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
    from presidio_analyzer.nlp_engine import NlpEngineProvider

    # presidio logs about languages and labels that are of no concern here, and in debug mode values.
    logging.getLogger("presidio-analyzer").setLevel(logging.ERROR)
    nlp = NlpEngineProvider(nlp_configuration={"nlp_engine_name": "spacy", "models": [{"lang_code": _LANGUAGE, "model_name": spacy_model}]}).create_engine()
    registry = RecognizerRegistry(supported_languages=[_LANGUAGE])
    registry.load_predefined_recognizers(languages=[_LANGUAGE], nlp_engine=nlp)
    registry.remove_recognizer("EmailRecognizer")
    for recognizer in (_email_recognizer(), *secret_recognizers()):
        registry.add_recognizer(recognizer)
    return AnalyzerEngine(registry=registry, nlp_engine=nlp, supported_languages=[_LANGUAGE])


def _findable(engine: Any) -> set[str]:
    """Entity types that some recogniser can really report.

    presidio also lists those that other spaCy pipelines would tag; with this one they would
    silently never be found.
    """
    ner = engine.nlp_engine
    pipe = ner.get_nlp(_LANGUAGE)
    labels = pipe.get_pipe("ner").labels if pipe.has_pipe("ner") else ()
    tagged = {ner.ner_model_configuration.model_to_presidio_entity_mapping.get(label) for label in labels} - {None}
    patterns = {entity for found in engine.registry.recognizers if found.name != "SpacyRecognizer" for entity in found.supported_entities}
    return patterns | tagged


def _email_recognizer() -> Any:
    """presidio's e-mail recogniser, checking domains against the suffix list that tldextract ships.

    The original asks tldextract's shared instance, which downloads that list on first use.
    """
    from presidio_analyzer.predefined_recognizers import EmailRecognizer
    from tldextract import TLDExtract

    suffixes = TLDExtract(suffix_list_urls=(), cache_dir=None)

    class OfflineEmailRecognizer(EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            return bool(suffixes(pattern_text).fqdn)

    return OfflineEmailRecognizer()


def _without_overlap(results: Sequence[Any]) -> list[Finding]:
    """Findings in text order; of those that overlap, the surest gives the type and all give the extent."""
    merged: list[tuple[Finding, float]] = []
    for result in sorted(results, key=lambda result: (result.start, -result.end, result.entity_type)):
        found = Finding(result.start, result.end, result.entity_type)
        if not merged or found.start >= merged[-1][0].end:
            merged.append((found, result.score))
            continue
        before, score = merged[-1]
        entity = found.entity if result.score > score else before.entity
        merged[-1] = (Finding(before.start, max(before.end, found.end), entity), max(score, result.score))
    return [finding for finding, _ in merged]


def _replaced(text: str, findings: Sequence[Finding]) -> tuple[str, list[str]]:
    for finding in reversed(findings):
        text = f"{text[: finding.start]}<{finding.entity}>{text[finding.end :]}"
    return text, sorted({finding.entity for finding in findings})


def _require(module: str, package: str, where: str) -> None:
    if not module.isidentifier() or importlib.util.find_spec(module) is None:
        fix = f"pip install {package}, or set synth.pii.enabled=false for data known to be free of personal data"
        raise MissingPackage(f"the pip package {package} is not installed", where=where, fix=fix)
