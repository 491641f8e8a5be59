"""Ids, sources, categories, licences and the system prompt pass the filter as the texts do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig, SynthSection
from pipeline.errors import ConfigError
from pipeline.records import Prompt
from pipeline.store.manifest import stage_location
from pipeline.store.samples import read_samples
from pipeline.synth.privacy.finding import Finding
from pipeline.synth.screening import Screen
from pipeline.synth.stage import run

Configure = Callable[..., RunConfig]
MAIL, PHONE, KEY = "anna@firm.com", "+49 30 12345678", "ghp_16C7e42F292c6912E7710c838347Ae178B4a"


@pytest.fixture(autouse=True)
def salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_PII_SALT", "a salt")


@pytest.fixture(scope="module")
def default_screen() -> Screen:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_PII_SALT", "a salt")
        return Screen(SynthSection.model_validate({"sources": [{"source": "x"}]}))


def prompt(sample_id: str = "1", **fields: Any) -> Prompt:
    values = {"source": "ours", "license": "MIT", "category": "math", "turns": ("Why?",), **fields}
    return Prompt(sample_id=sample_id, **values)


def test_nothing_of_a_label_reaches_any_file(make_config: Configure, prompts_file: Path) -> None:
    planted = [
        {"id": MAIL, "category": f"call {PHONE}", "source": f"uploads of {MAIL}", "license": "MIT"},
        {"id": KEY, "license": "MIT", "source": "ours"},
        {"id": "l", "license": f"ask {MAIL}"},
    ]
    with prompts_file.open("a") as file:
        for index, record in enumerate(planted):
            file.write(json.dumps({**record, "turns": [f"Question {index}?"]}) + "\n")
    config = make_config(pii={}, max_new_tokens=4, max_turns=1)
    manifest = run(config)
    assert manifest.rows == 26, "no prompt is lost for its labels"
    location = stage_location(config.run.uri, "synth")
    samples = [each for shard in manifest.shards for each in read_samples(location, shard)]
    labels = {label for each in samples for label in (each.sample_id, each.source, each.category)}
    assert {label.partition("-")[0] for label in labels if "-" in label} == {
        *("id", "source", "category")
    }
    [reason] = manifest.rejected
    assert reason.startswith("license:license-") and len(reason) == 28
    audit = json.loads(location.read("audit.json"))
    found = {
        entity: counts["findings"]
        for entity, counts in audit["personal_data"]["findings"]["metadata"].items()
    }
    assert found == {"EMAIL_ADDRESS": 2, "PHONE_NUMBER": 1, "API_KEY": 1}
    assert "| API_KEY | 0 | 0 | 1 | 0 | 0 |" in location.read("datasheet.md").decode()
    folder = Path(config.run.uri)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in (MAIL, PHONE, KEY)), path
    assert not any(secret in str(samples) for secret in (MAIL, PHONE, KEY))


def test_a_label_becomes_the_same_wherever_it_stands(default_screen: Screen) -> None:
    clean = default_screen.metadata.clean
    one, other = clean([prompt(MAIL), prompt(MAIL, source=MAIL, category=MAIL)])
    assert one.sample_id == other.sample_id and one.sample_id.startswith("id-")
    assert other.source.removeprefix("source") == other.category.removeprefix("category")
    assert clean([prompt(MAIL)]) == [one] and clean([one]) == [one]
    assert clean([prompt(f"{MAIL}:{index}") for index in (1, 22)])[0].sample_id != one.sample_id


@pytest.mark.parametrize(
    "label",
    [
        *("17", "train:123456", "HumanEval/12", "a/b:7", "x" * 5000, "gsm8k-3", "chat_0"),
        *(
            "0c" * 20,
            "p3-wiki-hop-c825b78f1bb8",
            "chatcmpl-12a5551234",
            "12a60000-5551-2345-6789-123456789012",
            "[/MIT]",
            "Q\n1",
        ),
    ],
)
def test_what_ids_look_like_stays(default_screen: Screen, label: str) -> None:
    same = prompt(label, category=label)
    assert default_screen.metadata.clean([same]) == [same]


@pytest.mark.parametrize(
    "label",
    [
        f"{MAIL}-c825b78f1bb8",
        PHONE,
        "617-240-9981",
        "call:6172409981",
        "93.184.216.34",
        f"{MAIL}:1234567",
        "4929526018159081",
    ],
)
def test_numbers_that_are_more_than_a_count_do_not(default_screen: Screen, label: str) -> None:
    [cleaned] = default_screen.metadata.clean([prompt(label)])
    assert cleaned.sample_id.startswith("id-")


def test_patterns_of_the_run_see_every_id() -> None:
    recognizers = [{"entity": "BADGE", "regex": r"badge-99\d", "score": 0.9}]
    section = {"sources": [{"source": "x"}], "pii": {"recognizers": recognizers}}
    clean = Screen(SynthSection.model_validate(section)).metadata.clean
    names = [each.sample_id for each in clean([prompt("badge-981"), prompt("badge-991")])]
    assert names[0] == "badge-981" and names[1].startswith("id-")


def test_without_the_filter_labels_are_left_alone() -> None:
    section = {"sources": [{"source": "x"}], "pii": {"enabled": False}, "system_prompt": MAIL}
    metadata = Screen(SynthSection.model_validate(section)).metadata
    assert metadata.clean([prompt(MAIL)]) == [prompt(MAIL)]
    assert metadata.clean_reasons({f"license:{MAIL}": 2, "short": 1}) == {
        f"license:{MAIL}": 2,
        "short": 1,
    }


def test_reasons_are_added_up(default_screen: Screen) -> None:
    reasons = {"license:none": 1, f"license:{'x' * 300}a": 2, f"license:{'x' * 300}b": 3, "long": 4}
    cleaned = default_screen.metadata.clean_reasons(reasons)
    assert cleaned == {"license:none": 1, f"license:{'x' * 200}": 5, "long": 4}


def test_a_system_prompt_with_a_secret_is_refused(make_config: Configure) -> None:
    config = make_config(pii={}, system_prompt=f"You work for {MAIL}. The key is {KEY}.")
    with pytest.raises(ConfigError) as raised:
        run(config)
    assert raised.value.where == "synth.system_prompt" and raised.value.exit_code == 2
    assert "(API_KEY, EMAIL_ADDRESS)" in raised.value.problem
    assert MAIL not in str(raised.value) and KEY not in str(raised.value)
    assert not Path(config.run.uri).exists(), "nothing was begun"


def test_of_numbered_ids_and_of_digests_one_is_inspected(
    default_screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The screening of a text takes milliseconds."""
    numbered = [prompt(f"train:{index}", source="train") for index in range(100_000, 102_000)]
    hashes = [prompt(f"{index:032x}" + "ab") for index in range(2000)]
    metadata, inspected = default_screen.metadata, 0
    assert metadata._filter
    find_all = metadata._filter.find_all

    def counting(texts: Sequence[str]) -> list[list[Finding]]:
        nonlocal inspected
        inspected += len(texts)
        return find_all(texts)

    monkeypatch.setattr(metadata._filter, "find_all", counting)
    assert metadata.clean([*numbered, *hashes]) == [*numbered, *hashes]
    assert inspected < 10


def test_the_system_prompts_of_a_mix_are_inspected_too(make_config: Configure) -> None:
    config = make_config(pii={}, mix=[{"name": "a", "system_prompt": f"Ask {MAIL}."}])
    with pytest.raises(ConfigError, match=r"synth\.mix\.a\.system_prompt: holds personal data"):
        run(config)
