"""The policy: drop, redact, pseudonymise; what the audit keeps; no planted value survives a run."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import PiiSection, QualitySection, RunConfig, SourceSpec, SynthSection
from pipeline.errors import ConfigError
from pipeline.records import Message, Prompt, Sample, SamplingParams, Span
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.privacy.reserved import Pseudonyms, is_reserved
from pipeline.synth.screening import Ledger, Screen, read_salt
from pipeline.synth.stage import run

GITHUB = "ghp_" + "a1B2c3D4" * 5


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_PII_SALT", "a salt for tests")


def section(action: str = "drop", **pii: object) -> SynthSection:
    return SynthSection(
        sources=(SourceSpec(source="x.jsonl"),),
        pii=PiiSection.model_validate({"action": action, **pii}),
    )


def prompt(*turns: str, id: str = "0", system: str | None = None) -> Prompt:
    return Prompt(sample_id=id, source="s", license="MIT", category="c", turns=turns, system=system)


def sample(*replies: str) -> Sample:
    question = Message(role="user", content="hi")
    answers = [Message(role="assistant", content=reply) for reply in replies]
    messages = [message for answer in answers for message in (question, answer)]
    return Sample(
        sample_id="0",
        source="s",
        license="MIT",
        category="c",
        messages=tuple(messages),
        token_ids=(1, 2, 3),
        supervised=(Span(start=1, end=3),),
        finish_reason="stop",
        sampling=SamplingParams(temperature=0, top_p=1, top_k=0, max_new_tokens=8),
        seed=0,
        generator="g",
    )


GIVEN = [
    prompt("hello"),
    prompt("hi", "mail anna@firm.com"),
    prompt(f"{GITHUB} bob@firm.com"),
    prompt("hi", system="You serve eve@firm.com"),
]


def test_prompts_are_dropped_and_counted() -> None:
    kept, rejected = Screen(section()).prompts(GIVEN)
    assert kept == GIVEN[:1] and rejected == {"pii:API_KEY": 1, "pii:EMAIL_ADDRESS": 2}


def test_prompts_are_redacted_in_turns_and_system_prompt() -> None:
    kept, rejected = Screen(section("redact")).prompts(GIVEN)
    assert [prompt.turns for prompt in kept] == [
        ("hello",),
        ("hi", "mail <EMAIL_ADDRESS>"),
        ("<API_KEY> <EMAIL_ADDRESS>",),
        ("hi",),
    ]
    assert kept[3].system == "You serve <EMAIL_ADDRESS>" and not rejected


@pytest.mark.parametrize("action", ["drop", "redact", "pseudonymise"])
def test_prompts_whose_tools_hold_personal_data_are_dropped(action: str) -> None:
    """Something else in its place might make them no tools."""
    tools = '[{"description":"Mails to anna.schmidt@firm.de","name":"mail"}]'
    given = [prompt("Hi").model_copy(update={"tools": each}) for each in (tools, "[]")]
    kept, dropped = Screen(section(action)).prompts(given)
    assert kept == given[1:] and dropped == {"pii:EMAIL_ADDRESS": 1}


def test_the_same_value_gets_the_same_pseudonym_in_a_conversation() -> None:
    screen = Screen(section("pseudonymise"), seed=3)
    given = [
        prompt("anna@firm.com and bob@firm.com", "then ANNA@firm.com, 212-555-7788"),
        prompt("only bob@firm.com"),
    ]
    (first, second), rejected = screen.prompts(given)
    assert first.turns == (
        "person1@example.com and person2@example.com",
        "then person1@example.com, 202-555-0101",
    )
    assert second.turns == ("only person1@example.com",) and not rejected


def test_a_part_of_a_name_is_the_same_person() -> None:
    text = "Ask Anna Schmidt. Anna knows; Bo Li does not."
    spans = [
        Finding(4, 16, "PERSON", 1.0),
        Finding(18, 22, "PERSON", 1.0),
        Finding(30, 35, "PERSON", 1.0),
    ]
    changed = Pseudonyms(0, ("s", "0")).apply(text, spans)
    first, last = changed.split()[1:3]
    assert (
        changed.startswith(f"Ask {first} {last} {first} knows; ")
        and "Anna" not in changed
        and "Li" not in changed
    )
    assert Pseudonyms(0, ("s", "0")).apply(text, spans) == changed
    assert (
        len(
            {
                Pseudonyms(0, ("s", str(number))).apply("Anna", [Finding(0, 4, "PERSON", 1.0)])
                for number in range(20)
            }
        )
        > 5
    )


def test_replies_with_findings_are_dropped_whatever_the_action() -> None:
    samples = [
        sample("fine"),
        sample("fine", "ask carl@firm.com"),
        sample("write to person1@example.com"),
    ]
    for action in ("drop", "redact", "pseudonymise"):
        clean, rejected = Screen(section(action)).samples(samples)
        assert clean == [samples[0], samples[2]] and rejected == {"pii:EMAIL_ADDRESS": 1}
    assert Screen(section(enabled=False)).samples(samples) == (samples, {})


REAL = {
    "EMAIL_ADDRESS": "anna@firm.org",
    "PHONE_NUMBER": "212-839-4657",
    "CREDIT_CARD": "4929 5260 1815 9081",
    "US_SSN": "219-47-8136",
    "IP_ADDRESS": "84.112.7.19",
    "ADDRESS": "14 Alder Street",
    "PERSON": "Anna Schmidt",
    "URL": "https://firm.org/1",
}


@pytest.mark.parametrize(
    "entity",
    [
        "EMAIL_ADDRESS",
        "PHONE_NUMBER",
        "CREDIT_CARD",
        "US_SSN",
        "IP_ADDRESS",
        "ADDRESS",
        "PERSON",
        "URL",
        "BADGE",
    ],
)
def test_every_invented_value_is_recognised_and_no_real_one(entity: str) -> None:
    changed = Pseudonyms(1, ("s", "0")).apply("x", [Finding(0, 1, entity, 1.0)])
    assert is_reserved(entity, changed)
    assert not is_reserved(entity, REAL.get(entity, "B-12345"))


def test_quality_filters_come_first_and_are_counted() -> None:
    looping = sample("a b c d e f g h " * 5)
    refusing = sample("I'm sorry, but I can't help with that.")
    strict = section().model_copy(
        update={"quality": QualitySection(max_reply_repetition=0.5, refusals="drop")}
    )
    kept, rejected = Screen(strict).samples(
        [sample("fine"), looping, refusing, sample("mail a@firm.com")]
    )
    assert kept == [sample("fine")] and rejected == {
        "reply_repetition": 1,
        "refusal": 1,
        "pii:EMAIL_ADDRESS": 1,
    }


def test_the_audit_has_counts_types_and_salted_hashes() -> None:
    screen = Screen(section("redact"))
    screen.prompts([prompt("a@firm.com A@firm.com"), prompt("b@firm.com")])
    screen.samples([sample("a@firm.com")])
    audit = screen.take_audit()
    values = audit["prompts"]["EMAIL_ADDRESS"]["values"]
    assert audit["prompts"]["EMAIL_ADDRESS"]["findings"] == 3 and sorted(values.values()) == [1, 2]
    assert set(audit["replies"]["EMAIL_ADDRESS"]["values"]) < set(values), (
        "the same value has the same hash"
    )
    assert "firm" not in json.dumps(audit) and screen.take_audit() == {}


def test_another_salt_gives_other_hashes() -> None:
    def hashes(salt: bytes) -> set[str]:
        ledger = Ledger(salt)
        ledger.note("prompts", "a@firm.com", [Finding(0, 10, "EMAIL_ADDRESS", 1.0)])
        return set(ledger.take()["prompts"]["EMAIL_ADDRESS"]["values"])

    assert hashes(b"one") == hashes(b"one") != hashes(b"two")


def test_the_salt_is_kept_outside_the_run_and_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EAGLE3_PII_SALT")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    salt = read_salt()
    assert len(salt) == 32 and read_salt() == salt
    assert stat.S_IMODE(os.stat(tmp_path / "state" / "eagle3" / "pii-salt").st_mode) == 0o600
    assert os.listdir(tmp_path / "state" / "eagle3") == ["pii-salt"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state" / "eagle3" / "pii-salt"))
    with pytest.raises(ConfigError, match="set the environment variable EAGLE3_PII_SALT"):
        read_salt()


SECRETS = ["anna.schmidt@firm.com", "212-555-7788", GITHUB, "hunter2secret"]


@pytest.mark.parametrize("action", ["drop", "redact", "pseudonymise"])
def test_no_artefact_of_a_run_holds_a_planted_value(
    make_config: Callable[..., RunConfig], prompts_file: Path, action: str
) -> None:
    planted = [
        {
            "id": "x",
            "turns": ["Mail anna.schmidt@firm.com", "or call 212-555-7788"],
            "license": "MIT",
        },
        {
            "id": "y",
            "turns": [f"I wrote password = 'hunter2secret' and {GITHUB}"],
            "system": "Never tell anna.schmidt@firm.com",
            "license": "MIT",
        },
    ]
    with prompts_file.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in planted)
    config = make_config(pii={"action": action}, max_new_tokens=4)
    manifest = run(config)
    assert manifest.rows == (24 if action == "drop" else 26)
    files = [path for path in Path(config.run.uri).rglob("*") if path.is_file()]
    assert files and not [
        (path, value) for path in files for value in SECRETS if value.encode() in _content(path)
    ]


def _content(path: Path) -> bytes:
    """A file's bytes; of compressed Parquet the values themselves and the metadata."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    return json.dumps(pq.read_table(path).to_pylist()).encode() + path.read_bytes()
