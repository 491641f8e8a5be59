"""presidio's analyser, built from what a run asks for and nothing else.

Only recognisers of wanted entities are kept, and of the spaCy pipeline only what they need: the
tokenizer for context words, and the entity recogniser where an entity such as PERSON is wanted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipeline.config import PiiSection
from pipeline.synth.privacy.finding import Finding

_LANGUAGE = "en"
_BATCH = 64  # texts that spaCy processes together
_LEMMAS = "eagle3_lower_case"

#: Entities that never occur without one of the marks below: when nothing else is wanted, most prompts need no reading.
_NUMERIC = frozenset(
    {
        "EMAIL_ADDRESS",
        "PHONE_NUMBER",
        "CREDIT_CARD",
        "IBAN_CODE",
        "US_SSN",
        "IP_ADDRESS",
        "ADDRESS",
        "CRYPTO",
        "US_BANK_NUMBER",
        "US_PASSPORT",
    }
    | {"MEDICAL_LICENSE", "US_ITIN", "UK_NHS"}
)
_MARKS = re.compile(r"\d(?:\D{0,3}\d){3}|@|::|[A-Za-z0-9]{25}")
_SEVEN_DIGITS = re.compile(r"\d(?:[ ().\-/]{0,3}\d){6}")


class Analyzer:
    """presidio over many texts. `findable` are the entity types that some recogniser can really report."""

    def __init__(self, section: PiiSection, wanted: Iterable[str]) -> None:
        # presidio logs about languages and labels that are of no concern here, and in debug mode values.
        logging.getLogger("presidio-analyzer").setLevel(logging.ERROR)
        self._wanted = sorted(wanted)
        self._nlp = _load_nlp(section.spacy_model)
        tagged = _tagged(self._nlp)
        self.uses_ner = bool(tagged & set(self._wanted))
        if not self.uses_ner:
            self._nlp.get_nlp(_LANGUAGE).select_pipes(enable=[_LEMMAS])
        self._engine = _build_engine(self._nlp, section)
        patterns = {
            entity
            for found in self._engine.registry.recognizers
            if found.name != "SpacyRecognizer"
            for entity in found.supported_entities
        }
        # presidio also lists entities that other spaCy pipelines would tag; with this one they would silently never be found.
        self.findable = patterns | tagged
        self._reads_all = self.uses_ner or not set(self._wanted) <= _NUMERIC
        self._asked = [entity for entity in self._wanted if entity in self.findable]
        self._keep_wanted()

    def analyse(self, texts: Sequence[str]) -> Iterator[tuple[list[Finding], Any]]:
        """(findings of every score, spaCy document or None) of each text, batched through spaCy. A document is valid until the next one."""
        worth = [text for text in texts if self._is_worth_a_look(text)]
        # spaCy remembers every word that it has met; the zone forgets those of these texts, so that memory does not grow with the corpus.
        with self._nlp.get_nlp(_LANGUAGE).memory_zone():
            artifacts = self._nlp.process_batch(worth, _LANGUAGE, batch_size=_BATCH)
            for text in texts:
                yield (
                    self._analysed(text, next(artifacts)[1])
                    if self._is_worth_a_look(text)
                    else ([], None)
                )

    def _analysed(self, text: str, read: Any) -> tuple[list[Finding], Any]:
        results = (
            self._engine.analyze(
                text, _LANGUAGE, entities=self._asked, score_threshold=0.0, nlp_artifacts=read
            )
            if self._asked
            else []
        )
        return [
            Finding(result.start, result.end, result.entity_type, result.score)
            for result in results
        ], read.tokens

    def _is_worth_a_look(self, text: str) -> bool:
        return self._reads_all or _MARKS.search(text) is not None

    def _keep_wanted(self) -> None:
        registry = self._engine.registry
        wanted = [
            found
            for found in registry.recognizers
            if set(found.supported_entities) & set(self._wanted)
        ]
        registry.recognizers = [
            found for found in wanted if self.uses_ner or found.name != "SpacyRecognizer"
        ]


def _load_nlp(spacy_model: str) -> Any:
    """presidio's spaCy engine with tokenizer and entity recogniser; tagging and parsing, half of the time, serve no recogniser."""
    import spacy
    from presidio_analyzer.nlp_engine import SpacyNlpEngine
    from spacy.language import Language

    if not Language.has_factory(_LEMMAS):
        Language.component(_LEMMAS, func=_lower_case)

    class LightSpacyEngine(SpacyNlpEngine):
        def load(self) -> None:
            nlp = spacy.load(
                spacy_model, exclude=["tagger", "parser", "attribute_ruler", "lemmatizer", "senter"]
            )
            nlp.add_pipe(_LEMMAS)
            self.nlp = {_LANGUAGE: nlp}  # type: ignore[assignment]

    engine = LightSpacyEngine(models=[{"lang_code": _LANGUAGE, "model_name": spacy_model}])
    engine.load()
    return engine


def _lower_case(document: Any) -> Any:
    """Lemmas for presidio's context words, which it looks for as parts of lemmas: "phones" contains "phone"."""
    for token in document:
        token.lemma_ = token.lower_
    return document


def _tagged(nlp: Any) -> set[str]:
    """presidio's names of what this spaCy pipeline tags."""
    pipe = nlp.get_nlp(_LANGUAGE)
    labels = pipe.get_pipe("ner").labels if pipe.has_pipe("ner") else ()
    configuration = nlp.ner_model_configuration
    return {
        configuration.model_to_presidio_entity_mapping.get(label)
        for label in labels
        if label not in configuration.labels_to_ignore
    } - {None}


def _build_engine(nlp: Any, section: PiiSection) -> Any:
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry

    registry = RecognizerRegistry(supported_languages=[_LANGUAGE])
    registry.load_predefined_recognizers(languages=[_LANGUAGE], nlp_engine=nlp)
    registry.remove_recognizer("EmailRecognizer")
    registry.remove_recognizer("PhoneRecognizer")
    for recognizer in (_email_recognizer(), _phone_recognizer(), *_own_recognizers(section)):
        registry.add_recognizer(recognizer)
    for recognizer in registry.recognizers:
        more = [
            word
            for entity in recognizer.supported_entities
            for word in section.context_words.get(entity, ())
        ]
        if more:
            recognizer.context = [*(recognizer.context or ()), *more]
    return AnalyzerEngine(registry=registry, nlp_engine=nlp, supported_languages=[_LANGUAGE])


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


def _phone_recognizer() -> Any:
    """presidio's phone recogniser, asked only about texts with enough digits in a row: it tries eight countries on every number."""
    from presidio_analyzer import RecognizerResult
    from presidio_analyzer.predefined_recognizers import PhoneRecognizer

    class SparingPhoneRecognizer(PhoneRecognizer):
        def analyze(
            self, text: str, entities: list[str], nlp_artifacts: Any = None
        ) -> list[RecognizerResult]:
            return (
                super().analyze(text, entities, nlp_artifacts) if _SEVEN_DIGITS.search(text) else []
            )

    return SparingPhoneRecognizer()


def _own_recognizers(section: PiiSection) -> list[Any]:
    """The run's own recognisers."""
    from presidio_analyzer import Pattern, PatternRecognizer

    return [
        PatternRecognizer(
            supported_entity=spec.entity,
            name=f"{spec.entity} {number}",
            patterns=[Pattern(f"pattern {number}", spec.regex, spec.score)],
            context=list(spec.context),
        )
        for number, spec in enumerate(section.recognizers, start=1)
    ]
