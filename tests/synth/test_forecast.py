"""The datasheet's forecast: as counted by hand from the samples, from few of many shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.records import Message, Sample, SamplingParams, Shard, Span
from pipeline.store.location import Location
from pipeline.store.samples import encode_samples, read_samples
from pipeline.store.shards import SHARDS
from pipeline.synth import audit as module
from pipeline.synth.audit import forecast
from pipeline.synth.stage import run
from pipeline.target.open import read_contract, resolve

Configure = Callable[..., RunConfig]


def sample(number: int, reply: list[int]) -> Sample:
    return Sample(
        sample_id=str(number),
        source="s",
        license="MIT",
        category="c",
        messages=(Message(role="user", content="?"),),
        token_ids=(7, *reply),
        supervised=(Span(start=1, end=1 + len(reply)),),
        finish_reason="stop",
        sampling=SamplingParams(temperature=0, top_p=1, top_k=0, max_new_tokens=9),
        seed=0,
        generator="g",
    )


def stored(location: Location, number: int, samples: list[Sample]) -> Shard:
    data, name = encode_samples(samples), f"{number:05d}-x.parquet"
    location.child(SHARDS).write(name, data)
    tokens = sum(len(each.token_ids) for each in samples)
    return Shard(
        name=name,
        rows=len(samples),
        tokens=tokens,
        bytes=len(data),
        sha256=sha256(data).hexdigest(),
    )


def test_one_half_of_the_replies_chooses_and_the_other_is_covered(
    make_config: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen from 1 1 1 2 2 3, most frequent first; the other half has 1 2 2 9."""
    monkeypatch.setattr(module, "_SIZES", (1, 2, 3, 4, 5, 4096))
    location, target = Location(str(tmp_path / "synth")), make_config().target
    contract = read_contract(target, resolve(target)).model_copy(update={"vocab_size": 100})
    replies = [[1, 1, 1, 2], [1, 2], [2, 3], [2, 9]]
    shard = stored(location, 0, [sample(number, ids) for number, ids in enumerate(replies)])
    said = forecast(contract, location, [shard], supervised=10)
    assert said["coverage"] == {"1": 0.25, "2": 0.75, "3": 0.75}, "three hold all that choose"
    monkeypatch.setattr(module, "_SIZES", (1, 2, 100))
    small = forecast(contract, location, [shard], supervised=10)
    assert set(small["coverage"]) == {"1", "2"}, "the target's vocabulary has 100 tokens"
    assert said["distinct_tokens"] == 4 and said["tokens"] == 14
    hidden, layers = contract.hidden_size, len(contract.capture_layers)
    assert said["states_bytes"]["bf16"] == 2 * hidden * (14 * layers + 10)
    alone = stored(location, 1, [sample(0, [1, 2])])
    assert forecast(contract, location, [alone], supervised=2)["coverage"] == {}


def test_replies_that_run_in_loops_are_counted(make_config: Configure, tmp_path: Path) -> None:
    """Ten tokens three times: of the second ten the last two end nine known ones, then all ten."""
    location, target = Location(str(tmp_path / "synth")), make_config().target
    contract, ten = read_contract(target, resolve(target)), list(range(20, 30))

    def share(*samples: Sample) -> float:
        shard = stored(location, len(list(location.child(SHARDS).names())), list(samples))
        said: float = forecast(contract, location, [shard], supervised=30)["repeated_share"]
        return said

    looping, other = sample(0, ten * 3), sample(1, [*ten, *range(40, 60)])
    assert share(looping) == 12 / 30
    assert share(looping, other) == 12 / 60, "what another sample has said does not count"
    late = looping.model_copy(update={"supervised": (Span(start=26, end=31),)})
    assert share(late) == 1, "of generated tokens, whoever said the first ones"
    early = looping.model_copy(update={"supervised": (Span(start=1, end=19),)})
    assert share(early) == 0, "what is read in the prompt's tokens is not counted"


def test_few_of_many_shards_are_read(
    make_config: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, target = Location(str(tmp_path / "synth")), make_config().target
    shards = [stored(location, number, [sample(number, [number])]) for number in range(40)]
    read: list[str] = []

    def reading(location: Location, shard: Shard) -> list[Sample]:
        read.append(shard.name)
        return read_samples(location, shard)

    monkeypatch.setattr(module, "read_samples", reading)
    said = forecast(read_contract(target, resolve(target)), location, shards, supervised=40)
    assert read == [shard.name for shard in shards[::3]] and said["shards_read"] == 14
    assert said["tokens"] == 80, "of all shards"


def test_audit_and_datasheet_have_the_forecast_and_the_mix(
    make_config: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rows of one token, which the tiny target repeats: it has no loops of nine."""
    monkeypatch.setattr(module, "_ROW", 1)
    mix = [{"name": "bare"}, {"name": "kind", "system_prompt": "Be kind.", "share": 2}]
    config = make_config(mix=mix)
    manifest = run(config)
    location = Location(f"{config.run.uri}/synth")
    folder = Path(config.run.uri) / "synth"
    audit = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    samples = [each for shard in manifest.shards for each in read_samples(location, shard)]
    assert audit["variants"] == dict(sorted(Counter(each.variant for each in samples).items()))
    assert set(audit["variants"]) == {"bare", "kind"}
    system = sum(each.messages[0].role == "system" for each in samples)
    assert system == audit["variants"]["kind"] == audit["template"]["samples_with_system_prompt"]
    sheet = (folder / "datasheet.md").read_text(encoding="utf-8")
    assert f"| kind | {system} |" in sheet
    counts = audit["forecast"]
    assert counts["supervised_tokens"] == audit["tokens"]["supervised"]
    assert f"{counts['tokens']:,} tokens, {counts['supervised_tokens']:,} of them" in sheet
    assert 0.15 < counts["repeated_share"] < 1
    assert f"{counts['repeated_share']:.1%} of the generated tokens end nine in a row" in sheet
    warned = f"{counts['repeated_share']:.0%} of the generated tokens repeat"
    assert warned in " ".join(capsys.readouterr().out.split())
