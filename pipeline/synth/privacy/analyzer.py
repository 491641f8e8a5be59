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

#: Entities that never occur without a match of `_NUMERIC_CHARACTERS`: when nothing else is wanted,
#: most prompts need no analysis.
_NUMERIC = frozenset(
    {"EMAIL_ADDRESS", "PHONE_NUMBER", "CREDIT_CARD", "IBAN_CODE", "US_SSN", "US_ITIN", "UK_NHS"}
    | {"IP_ADDRESS", "ADDRESS", "CRYPTO", "US_BANK_NUMBER", "US_PASSPORT", "MEDICAL_LICENSE"}
)
_NUMERIC_CHARACTERS = re.compile(r"\d(?:\D{0,3}\d){3}|@|::|[A-Za-z0-9]{25}")
_DECIMAL, _POINT = re.compile(r"\d{1,3}\.\d+"), re.compile(r"\d[.,]$")
_DATE_FIRST = re.compile(r"(?:19|20)\d\d([.\-/])(?:0?[1-9]|1[0-2])\1(?:0?[1-9]|[12]\d|3[01])\b")
_ISBN_SHAPE = re.compile(r"(?=(?:\d-?){10}$)\d{1,5}-\d{1,7}-\d{1,6}-\d")
_LETTER = re.compile(r"[^\W\d_]")
_NO_NAME = re.compile(
    r"[@=^*{}<>_]|\d.*\d|\d[A-Za-z]|[A-Za-z]\d|(?:^(?:rue|via|vicolo|calle|rua|lake|mount|port)\s"
    r"|\s(?:street|road|avenue|drive|ville|views?|lakes|path|circle|marg|chowk|forge|suite|"
    r"prairie|orchard|crossroad|loop|centers?|ferry|inlet|tunnel|hb|ab|gmbh|inc|ltd|llc|plc|ap|ae)$)",
    re.IGNORECASE,
)
#: Characters before and behind an @ in which there is room for an address.
_LOCAL_PART, _DOMAIN = 100, 300
_SEVEN_DIGITS = re.compile(r"\d(?:[ ().\-/]{0,3}\d){6}")


class Analyzer:
    """presidio over many texts.

    `supported_entities` are the types that some recogniser can really report. presidio also lists
    entities that only other spaCy pipelines tag; asked for, they would silently never be found.
    """

    def __init__(self, section: PiiSection, entities: Iterable[str]) -> None:
        # presidio logs about languages and labels, which do not matter here, and values in debug.
        logging.getLogger("presidio-analyzer").setLevel(logging.ERROR)
        self._requested = sorted(entities)
        self._nlp = _load_nlp(section.spacy_model)
        ner_entities = _ner_entities(self._nlp)
        self.uses_ner = bool(ner_entities & set(self._requested))
        if not self.uses_ner:
            self._nlp.get_nlp(_LANGUAGE).select_pipes(enable=[_LEMMAS])
        self._engine = _build_engine(self._nlp, section)
        self.supported_entities = ner_entities | {
            entity
            for recognizer in self._engine.registry.recognizers
            if recognizer.name != "SpacyRecognizer"
            for entity in recognizer.supported_entities
        }
        self._entities = [entity for entity in self._requested if entity in self.supported_entities]
        self._analyses_every_text = self.uses_ner or not set(self._requested) <= _NUMERIC
        self._drop_unused_recognizers()

    def analyse(self, texts: Sequence[str]) -> Iterator[tuple[list[Finding], Any]]:
        """(findings of every score, spaCy document or None) of each text, batched through spaCy.

        A document is valid until the next one.
        """
        candidates = [text for text in texts if self._may_contain_entity(text)]
        # spaCy remembers every word that it has met; the zone forgets those of these texts, so that
        # memory does not grow with the corpus.
        with self._nlp.get_nlp(_LANGUAGE).memory_zone():
            artifacts = self._nlp.process_batch(candidates, _LANGUAGE, batch_size=_BATCH)
            for text in texts:
                if self._may_contain_entity(text):
                    yield self._analyse_one(text, next(artifacts)[1])
                else:
                    yield [], None

    def _analyse_one(self, text: str, artifacts: Any) -> tuple[list[Finding], Any]:
        if not self._entities:
            return [], artifacts.tokens
        results = self._engine.analyze(
            text, _LANGUAGE, entities=self._entities, score_threshold=0.0, nlp_artifacts=artifacts
        )
        findings = [
            Finding(r.start, r.end, r.entity_type, r.score)
            for r in results
            if r.entity_type != "PERSON" or _may_be_name(text[r.start : r.end])
        ]
        return findings, artifacts.tokens

    def _may_contain_entity(self, text: str) -> bool:
        return self._analyses_every_text or _NUMERIC_CHARACTERS.search(text) is not None

    def _drop_unused_recognizers(self) -> None:
        registry, requested = self._engine.registry, set(self._requested)
        registry.recognizers = [
            recognizer
            for recognizer in registry.recognizers
            if requested & set(recognizer.supported_entities)
            and (self.uses_ner or recognizer.name != "SpacyRecognizer")
        ]


def _load_nlp(spacy_model: str) -> Any:
    """presidio's spaCy engine with tokenizer and entity recogniser only.

    Tagging and parsing, half of the time, serve no recogniser.
    """
    import spacy
    from presidio_analyzer.nlp_engine import SpacyNlpEngine
    from spacy.lang.lex_attrs import is_punct
    from spacy.language import Language

    if not Language.has_factory(_LEMMAS):
        Language.component(_LEMMAS, func=_lower_case)

    class NerSpacyEngine(SpacyNlpEngine):
        def load(self) -> None:
            unused = ["tagger", "parser", "attribute_ruler", "lemmatizer", "senter"]
            nlp = spacy.load(spacy_model, exclude=unused)
            nlp.add_pipe(_LEMMAS)
            self.nlp = {_LANGUAGE: nlp}  # type: ignore[assignment]
            self._stop_words = nlp.Defaults.stop_words

        # presidio asks both about every token; spaCy would make a vocabulary entry for each answer.
        def is_stopword(self, word: str, language: str) -> bool:
            return word in self._stop_words

        def is_punct(self, word: str, language: str) -> bool:
            return _LETTER.search(word) is None and is_punct(word)

    engine = NerSpacyEngine(models=[{"lang_code": _LANGUAGE, "model_name": spacy_model}])
    engine.load()
    return engine


def _lower_case(document: Any) -> Any:
    """Lemmas for presidio's context words, which it matches as parts of lemmas: phone in phones."""
    return document.from_array(["LEMMA"], document.to_array(["LOWER"])[:, None])


def _ner_entities(nlp: Any) -> set[str]:
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
    for name in ("EmailRecognizer", "PhoneRecognizer", "CreditCardRecognizer"):
        registry.remove_recognizer(name)
    own = _email_recognizer(), _phone_recognizer(), *_own_recognizers(section)
    for recognizer in (*own, *_country_recognizers(registry)):
        registry.add_recognizer(recognizer)
    for recognizer in registry.recognizers:
        for entity in recognizer.supported_entities:
            if words := section.context_words.get(entity):
                recognizer.context = [*(recognizer.context or ()), *words]
    return AnalyzerEngine(registry=registry, nlp_engine=nlp, supported_languages=[_LANGUAGE])


def _email_recognizer() -> Any:
    """presidio's e-mail recogniser, checking domains against the suffix list that tldextract ships.

    The original asks tldextract's shared instance, which downloads that list on first use, and
    takes quadratic time over signs that a local part may hold: it is given what is around each @.
    """
    from presidio_analyzer.predefined_recognizers import EmailRecognizer
    from tldextract import TLDExtract

    suffixes = TLDExtract(suffix_list_urls=(), cache_dir=None)

    class OfflineEmailRecognizer(EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            return bool(suffixes(pattern_text.rpartition("@")[2]).fqdn)

        def analyze(self, text: str, *arguments: Any, **options: Any) -> list[Any]:
            results = []
            for sign in re.finditer("@", text):
                first = max(0, sign.start() - _LOCAL_PART)
                piece = text[first : sign.end() + _DOMAIN]
                for result in super().analyze(piece, *arguments, **options):
                    if result.start <= sign.start() - first < result.end:
                        result.start, result.end = result.start + first, result.end + first
                        results.append(result)
            return results

    return OfflineEmailRecognizer()


def _phone_recognizer() -> Any:
    """presidio's phone recogniser, run only on texts with enough digits in a row.

    It tries eight countries on every number, decimals too.
    """
    from presidio_analyzer import RecognizerResult
    from presidio_analyzer.predefined_recognizers import PhoneRecognizer

    class PrefilteredPhoneRecognizer(PhoneRecognizer):
        def analyze(
            self, text: str, entities: list[str], nlp_artifacts: Any = None
        ) -> list[RecognizerResult]:
            if not _SEVEN_DIGITS.search(text):
                return []
            numbers = super().analyze(text, entities, nlp_artifacts)
            return [n for n in numbers if not _is_no_phone(text, n.start, n.end)]

    return PrefilteredPhoneRecognizer()


def _may_be_name(name: str) -> bool:
    """Not a key, an address of any kind or a street, which spaCy's small model takes for people."""
    return not _NO_NAME.search(name) and _LETTER.search(name) is not None


def _is_no_phone(text: str, start: int, end: int) -> bool:
    """A decimal such as 0.2408467 or the second half of one, a date with a time, an ISBN."""
    number = text[start:end]
    return bool(
        _DECIMAL.fullmatch(number)
        or (number.isdigit() and _POINT.search(text[:start][-2:]))
        or _DATE_FIRST.match(number)
        or (_ISBN_SHAPE.fullmatch(number) and _is_isbn(re.sub(r"\D", "", number)))
    )


def _is_isbn(digits: str) -> bool:
    """Ten digits with a valid check digit, other than X."""
    return sum((10 - place) * int(digit) for place, digit in enumerate(digits)) % 11 == 0


def _country_recognizers(registry: Any) -> list[Any]:
    """presidio's recognisers of countries that it leaves out, as those are not the language's."""
    from presidio_analyzer import predefined_recognizers

    loaded = {recognizer.name for recognizer in registry.recognizers}
    return [
        kind(supported_language=_LANGUAGE)
        for name, kind in vars(predefined_recognizers).items()
        if ".country_specific." in getattr(kind, "__module__", "") and name not in loaded
    ]


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
