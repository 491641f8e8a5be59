"""Personal data, with the real presidio and spaCy pipeline and this project's own recognisers."""

from __future__ import annotations

import socket

import pytest

from pipeline.config import PiiSection, RecognizerSpec
from pipeline.errors import ConfigError, MissingPackage
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.privacy.finding import Finding, without_overlap
from pipeline.synth.privacy.recognisers import find_addresses, find_names
from pipeline.synth.privacy.reserved import redacted

PLANTED = {
    "anna.schmidt@firm.com": (
        "EMAIL_ADDRESS",
        "Write a reply to anna.schmidt@firm.com about the invoice.",
    ),
    "4929 5260 1815 9081": ("CREDIT_CARD", "Charge 4929 5260 1815 9081 tomorrow."),
    # Its checksum is wrong.
    "4131034282458809": ("CREDIT_CARD", "My credit card 4131034282458809 does not work."),
    "DE89370400440532013000": ("IBAN_CODE", "Send it to DE89370400440532013000 today."),
    "GB00 ABCD 1234 5678 9012 34": (
        "IBAN_CODE",
        "I am a client, account GB00 ABCD 1234 5678 9012 34, hello.",
    ),
    "212-839-0187": ("PHONE_NUMBER", "My phone number is 212-839-0187, please call."),
    "(011) 839-4657 x42": ("PHONE_NUMBER", "Write to the office, (011) 839-4657 x42, first."),
    "481 7531": ("PHONE_NUMBER", "Nobody is answering at 481 7531 today."),
    "089 72 63 41": ("PHONE_NUMBER", "Costquest, 089 72 63 41 office"),
    "219-47-8136": ("US_SSN", "He wrote 219-47-8136 on the form."),
    "84.112.7.19": ("IP_ADDRESS", "Our server 84.112.7.19 does not answer."),
    "14 Alder Street, Springfield, OR 97477": (
        "ADDRESS",
        "I live at 14 Alder Street, Springfield, OR 97477 and run a lot.",
    ),
    "Lindenweg 7, 10115 Berlin": ("ADDRESS", "Bitte an Lindenweg 7, 10115 Berlin schicken."),
}

HARMLESS = [
    "Write a poem about spring at 10:30.",
    "What is 123456789 times 987654321?",
    "Sort [5, 3, 9] and install numpy 2.1.0 with pip.",
    "A farmer has 12 fields with 30 rows of corn each; during 1971 he sold 4 of them.",
    "The package sizes are 10-20-30 and the ISBN is 978-3-16-148410-0.",
    "Move 5 apples to the park, then walk 3 miles along the river.",
    "Who was Albert Einstein, and where is Paris?",
]


@pytest.fixture(scope="module")
def pii() -> PiiFilter:
    return PiiFilter(PiiSection())


@pytest.mark.parametrize("value", PLANTED)
def test_planted_values_are_found_and_replaced(pii: PiiFilter, value: str) -> None:
    entity, text = PLANTED[value]
    findings = pii.find_all([text])[0]
    assert [finding.entity for finding in findings] == [entity]
    changed = redacted(text, findings)
    assert f"<{entity}>" in changed and value not in changed
    assert changed.startswith(text[:5]), "what stands around a finding stays"


def test_harmless_text_passes(pii: PiiFilter) -> None:
    findings = pii.find_all(HARMLESS)
    assert [pair for pair in zip(HARMLESS, findings, strict=True) if pair[1]] == []


def test_the_order_of_texts_is_kept_where_some_are_not_analysed(pii: PiiFilter) -> None:
    texts = ["nothing", "mail anna@firm.com", "", "also nothing", "call me on 212-839-0187"]
    entities = [[finding.entity for finding in findings] for findings in pii.find_all(texts)]
    assert entities == [[], ["EMAIL_ADDRESS"], [], [], ["PHONE_NUMBER"]]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('Please shorten: "Dear Sébastien Blanc, we have received it."', "Sébastien Blanc"),
        ("Contact: Maya Nagarajan, 0122", "Maya Nagarajan"),
        ("Rosemary Doherty,r.doherty@example.com", "Rosemary Doherty"),
        ("Nurse\nLayla Gairbekov\nLine 3", "Layla Gairbekov"),
        ("my name is lily nolan, hello", "lily nolan"),
    ],
)
def test_names_are_found_by_what_announces_them(text: str, name: str) -> None:
    assert name in [text[finding.start : finding.end] for finding in find_names(text)]


@pytest.mark.parametrize(
    "text", ["Dear United States, hello", "Name: the New York Times", "The Great Wall\nof China"]
)
def test_other_capitalised_words_are_no_names(text: str) -> None:
    assert list(find_names(text)) == []


def test_names_are_looked_for_only_when_wanted(pii: PiiFilter) -> None:
    text = "My name is Anna Schmidt and I live in Berlin."
    wide = PiiFilter(PiiSection(entities=("PERSON", "LOCATION")))
    assert pii.check(text) == [] and not pii.uses_ner
    assert wide.check(text) == ["LOCATION", "PERSON"] and wide.uses_ner


def test_a_lone_place_or_thing_is_no_name() -> None:
    names = PiiFilter(PiiSection(entities=("PERSON",)))
    for text in (
        "When is it best to call from Lisbon to somewhere in Tokyo?",
        "Parse this CSV and return a list.",
        "What can someone do with my IBAN?",
        "She is an American who lives in Texas.",
    ):
        assert names.find_all([text]) == [[]], text
    for text in ("Why is Keiko so impulsive?", "A call between Astrid in Lisbon and Lila in Rome?"):
        assert names.check(text) == ["PERSON"], text


def test_parts_of_an_address_become_one_finding() -> None:
    text = "Ship:\n85 Kirkegade 70\n Apt. 252\n Portland\n OR 97201\nThanks"
    (address,) = without_overlap(find_addresses(text))
    assert (address.entity, address.score) == ("ADDRESS", 0.85)
    characters = text[address.start : address.end]
    assert characters.startswith("85 Kirkegade") and characters.endswith("97201")


def test_thresholds_context_words_and_own_recognisers_are_the_runs() -> None:
    badge = RecognizerSpec(entity="BADGE", regex=r"\bB-\d{5}\b", score=0.4, context=("badge",))
    words = {"US_BANK_NUMBER": ("vault",)}
    section = PiiSection(entities=("US_BANK_NUMBER",), recognizers=(badge,), context_words=words)
    pii = PiiFilter(section)
    assert pii.check("see B-12345") == [] and pii.check("my badge is B-12345") == ["BADGE"]
    assert pii.check("number 945456787654 here") == []
    low = PiiSection(entities=(), recognizers=(badge,), thresholds={"BADGE": 0.3})
    assert PiiFilter(low).check("see B-12345") == ["BADGE"]
    certain = PiiSection(entities=("EMAIL_ADDRESS",), score_threshold=1.0, thresholds={})
    assert PiiFilter(certain).check("a@firm.com") == ["EMAIL_ADDRESS"]


def test_context_words_raise_a_score() -> None:
    text = "the vault has 945456787654 in it"
    plain = PiiSection(entities=("US_BANK_NUMBER",), score_threshold=0.35)
    assert PiiFilter(plain).check(text) == []
    with_words = plain.model_copy(update={"context_words": {"US_BANK_NUMBER": ("vault",)}})
    assert PiiFilter(with_words).check(text) == ["US_BANK_NUMBER"]
    for entity in ("CREDIT_CARD", "API_KEY", "NAMES"):
        without_effect = plain.model_copy(update={"context_words": {entity: ("vault",)}})
        with pytest.raises(ConfigError, match=rf"synth\.pii\.context_words: no .*'{entity}'"):
            PiiFilter(without_effect)


def test_the_best_of_overlapping_findings_names_all_of_them() -> None:
    url, email = Finding(0, 10, "URL", 0.5), Finding(5, 14, "EMAIL_ADDRESS", 1.0)
    person = Finding(20, 22, "PERSON", 0.9)
    assert without_overlap([url, email, person]) == [Finding(0, 14, "EMAIL_ADDRESS", 1.0), person]


def test_no_connection_is_opened(monkeypatch: pytest.MonkeyPatch, pii: PiiFilter) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert pii.check("mail anna@firm.co.uk") == ["EMAIL_ADDRESS"]
    assert pii.check("mail anna@firm.nosuchsuffix") == []


def test_missing_models_and_unknown_entities_are_refused() -> None:
    missing = r"synth\.pii\.spacy_model: the pip package en-core-web-none is not installed"
    with pytest.raises(MissingPackage, match=missing):
        PiiFilter(PiiSection(spacy_model="en_core_web_none"))
    with pytest.raises(ConfigError, match=r"synth\.pii\.entities: no recogniser finds 'EMAIL'"):
        PiiFilter(PiiSection(entities=("EMAIL",)))
    with pytest.raises(ConfigError, match=r"synth\.pii\.thresholds: no recogniser finds 'EMAIL'"):
        PiiFilter(PiiSection(thresholds={"EMAIL": 0.3}))


def test_a_broken_expression_is_refused_when_the_config_is_read() -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        RecognizerSpec(entity="BADGE", regex="(")
