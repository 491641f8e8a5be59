"""Acceptance in the loop: what is decoded, which head is exported.

And that a kill changes nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import RunConfig, TrainSection
from pipeline.decoder.request import Acceptance, Statistics, pool_acceptance
from pipeline.errors import ConfigError, UnsupportedModel
from pipeline.heads.registry import load_head
from pipeline.learning.corpus import HeldOut, hold_out, survey
from pipeline.records import Manifest
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.target.open import open_target
from pipeline.train.checkpoints import Marker
from pipeline.train.loop import Evaluator, total_steps
from pipeline.train.metrics import Clock
from pipeline.train.prepare import StoredCorpus
from pipeline.train.progress import Progress
from pipeline.train.stage import run
from tests.shard_files import resealed
from tests.train.runs import Configure, Store, head_of, kill_after, lines_of, stop_at, without_speed

EVALUATION = {
    "evaluate_every": 4,
    "evaluate_prompts": 3,
    "evaluate_tokens": 12,
    "evaluate_tree": {"top_k": 1, "steps": 3, "nodes": 4},
}


def drawn(
    config: RunConfig, parent: Manifest, count: int = 3
) -> tuple[StoredCorpus, tuple[HeldOut, ...]]:
    corpus = StoredCorpus(stage_location(config.run.uri, "features"), parent.shards)
    return corpus, hold_out(corpus, count, seed=config.run.seed, max_prompt=200)


def checkpoints_of(config: RunConfig) -> Path:
    return Path(config.run.uri) / "train" / "checkpoints"


def checkpoint_of(config: RunConfig) -> Progress:
    """What the newest marker holds."""
    marker = max(checkpoints_of(config).glob("step-*.json"))
    return Marker.model_validate_json(marker.read_bytes()).progress


def test_held_out_samples_are_not_trained_on(tiny_config: Configure, store_states: Store) -> None:
    config = tiny_config(seed=5)
    corpus, chosen = drawn(config, store_states(config))
    assert len({(item.shard, item.sample) for item in chosen}) == 6
    assert chosen == drawn(config, read_manifest(config.run.uri, "features"))[1]
    assert chosen != drawn(tiny_config(seed=6), read_manifest(config.run.uri, "features"))[1]
    for item in chosen:
        sample = corpus.reader(item.shard).sample(item.sample)
        prompt = len(item.prompt_ids)
        assert sample.sample_id == item.sample_id
        assert tuple(sample.token_ids[:prompt].tolist()) == item.prompt_ids
        assert not sample.supervised_mask[:prompt].any() and sample.supervised_mask[prompt] == 1
    everything, rest = (
        survey(corpus, vocab_size=96, budget=64, held_out=held_out) for held_out in ((), chosen)
    )
    trained, stored = (
        {(piece.shard, piece.sample) for piece in one.pieces} for one in (rest, everything)
    )
    assert trained == stored - {(item.shard, item.sample) for item in chosen}
    assert rest.rejected["held_out"] == 6 and rest.samples == everything.samples - 6
    left_out = sum(int(corpus.reader(item.shard).tokens(item.sample)[1].sum()) for item in chosen)
    assert int(rest.counts["test"].sum()) == everything.supervised - left_out


def test_what_else_than_training_took_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no part of the speed."""
    now = 100.0
    monkeypatch.setattr("pipeline.train.metrics.time.perf_counter", lambda: now)
    clock = Clock(tokens=50)

    def after(seconds: float) -> None:
        nonlocal now
        now += seconds

    for by, seconds in [("evaluations", 6.0), ("checkpoints", 0.3), ("evaluations", 4.0)]:
        after(20.0)
        with clock.paused(by):
            after(seconds)
    assert clock.lap(waited=15.0, tokens=350) == (5.0, 0.25)
    after(29.7)
    assert clock.shares() == "100 s, evaluations 10%"


def test_too_few_samples_to_hold_out(tiny_config: Configure, store_states: Store) -> None:
    config = tiny_config(**EVALUATION | {"evaluate_prompts": 12})
    store_states(config)
    with pytest.raises(ConfigError, match="12 samples cannot be held out") as caught:
        run(config)
    assert caught.value.where == "train.evaluate_prompts"


def test_tau_and_alpha_by_hand() -> None:
    # Rounds that emitted (1, 3, 2) and (4) tokens: drafts accepted to depth 0, 2, 1 and 3.
    one, two, idle = Statistics(), Statistics(), Statistics()
    for emitted in (1, 3, 2):
        one.count_round(emitted, emitted)
    two.count_round(4, 2)  # ended by a stop token
    assert pool_acceptance([one, two, idle]) == Acceptance(8 / 4, (3 / 4, 2 / 3, 1 / 2))
    assert pool_acceptance([idle]) == Acceptance(0.0, ())
    assert Acceptance(1.5, (0.5, 0.25)).named() == {"tau": 1.5, "alpha_1": 0.5, "alpha_2": 0.25}


def test_the_best_head_is_exported(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        **EVALUATION,
        epochs=60,
        max_steps=30,
        learning_rate=3e-2,
        head={"draft_vocab_size": 96, "init_layer": "target_last"},
        log_every=10,
        checkpoint_every=7,
    )
    parent = store_states(config)
    manifest = run(config)
    lines = lines_of(config)
    assert [line["step"] for line in lines] == [4, 8, 10, 12, 16, 20, 24, 28, 30]
    taus = {int(line["step"]): line["tau"] for line in lines if "tau" in line}
    assert list(taus) == [4, 8, 12, 16, 20, 24, 28, 30]
    assert len(set(taus.values())) > 2, "the example needs a τ that moves"
    details = manifest.details
    best = details["exported_step"]
    newest = checkpoint_of(config)
    assert newest.highest is not None and newest.reported is not None
    assert newest.highest.tau == max(taus.values())
    assert manifest.rejected["held_out"] == details["held_out"] == 6 and details["evaluations"] == 8

    head, card = load_head(head_of(config), expected=parent.contract)
    line = next(line for line in lines if line["step"] == best)
    metrics = card.metrics
    assert (metrics["exported_step"], metrics["loss"], metrics["steps"]) == (best, line["loss"], 30)
    _, held_out = drawn(config, parent)
    target, cpu = open_target(config.target), torch.device("cpu")
    evaluator = Evaluator(target, head.shape, config.train, held_out, cpu)
    selected = evaluator.select(head.state_dict())
    assert selected.named().items() <= line.items() and "tau_se" in line
    assert not newest.highest.surely_beats(selected)
    later = [step for step in taus if step > best]
    assert all(taus[step] < taus[best] for step in later), "else a later one was as good"

    reported = evaluator.report(head.state_dict())
    assert reported == newest.reported
    other_half = Evaluator(target, head.shape, config.train, held_out[3:] + held_out[:3], cpu)
    assert other_half.select(head.state_dict()) == reported != selected
    figures = {name: details[name] for name in ("tau", "tau_se", "tau_prompts", "alpha")}
    assert figures == {
        "tau": reported.tau,
        "tau_se": reported.tau_error,
        "tau_prompts": 3,
        "alpha": list(reported.alpha),
    }
    assert metrics.items() >= figures.items()
    assert metrics["tau"] not in taus.values(), "none that chose a head"
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("train.evaluate_prompts") == 1
    figure = f"τ {reported.tau:.3f} ± {reported.tau_error:.3f} (standard error)"
    assert f"{figure} on 3 samples that did not choose it" in shown
    assert re.search(r"took \d+ s, .*evaluations [1-9]\d*%", shown), shown
    kept = checkpoints_of(config).glob(f"best-{best:06d}-*")
    trained = load_file(next(kept))["fc.weight"]  # in training's type; heads are stored in bf16
    assert torch.equal(trained.bfloat16().float(), head.fc.weight)


def test_rounds_account_for_the_targets_own_reply(
    tiny_config: Configure, store_states: Store
) -> None:
    """Evaluating changes no weight, and the rounds emitted what the target generates by itself."""
    config = tiny_config()
    parent = store_states(config)
    run(config)
    head, _ = load_head(head_of(config))
    _, held_out = drawn(config, parent)
    target = open_target(config.target)
    model = target.load().model
    section = config.train.model_copy(update={"evaluate_tokens": 12})
    evaluator = Evaluator(target, head.shape, section, held_out, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    decoded = evaluator.select(head.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    for item, tokens, rounds in zip(held_out[:3], decoded.tokens, decoded.rounds, strict=True):
        ids = torch.tensor([item.prompt_ids])
        reply = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(target.template().stop_ids),
            pad_token_id=1,
        )[0, ids.shape[1] :]
        beyond = tokens - (len(reply) - 1)  # every token after the first came from some round
        assert 0 <= beyond <= 3 and rounds <= len(reply) - 1 <= tokens


def test_a_tie_goes_to_the_later(tiny_config: Configure, store_states: Store) -> None:
    still = {"learning_rate": 1e-12, "epochs": 60, "max_steps": 12}
    config = tiny_config(**EVALUATION, **still)
    store_states(config)
    details = run(config).details
    assert (details["exported_step"], details["steps"], details["evaluations"]) == (12, 12, 3)
    assert lines_of(config)[-1]["step"] == 12


def test_no_evaluation_exports_the_last_step(tiny_config: Configure, store_states: Store) -> None:
    config = tiny_config(max_steps=3)
    store_states(config)
    manifest = run(config)
    assert manifest.details["exported_step"] == 3 and "tau" not in manifest.details
    assert "held_out" not in manifest.rejected
    begin = Path(config.run.uri) / "train" / "begin.json"
    begun = json.loads(begin.read_text())
    begun["shaping"]["train"] |= {"evaluate_prompts": 16}  # another default, of an earlier version
    begin.write_bytes(resealed(begun))
    other = config.model_copy(
        update={"train": config.train.model_copy(update={"evaluate_tokens": 9})}
    )
    assert run(config) == run(other) == manifest, "who evaluates nothing has no such settings"
    assert not list(checkpoints_of(config).glob("best-*"))


def test_kill_keeps_the_best_so_far(tiny_config: Configure, store_states: Store) -> None:
    settings = {
        **EVALUATION,
        "epochs": 60,
        "max_steps": 60,
        "checkpoint_every": 7,
        "learning_rate": 3e-2,
    }
    whole, killed = tiny_config("whole", **settings), tiny_config("killed", **settings)
    for config in (whole, killed):
        store_states(config)
    manifest = run(whole)
    kill_after(killed, 18)
    assert not (Path(killed.run.uri) / "train" / "manifest.json").exists()
    again = run(killed)
    assert without_speed(lines_of(killed)) == without_speed(lines_of(whole))
    checksums = [{shard.name: shard.sha256 for shard in one.shards} for one in (again, manifest)]
    assert checksums[0] == checksums[1]
    assert again.details == manifest.details


@pytest.mark.parametrize("before", ["report", "export"])
def test_killed_at_its_end_a_run_reports_the_same(
    tiny_config: Configure,
    store_states: Store,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
) -> None:
    """Before the reporting half is decoded, and after: then it is not decoded again."""
    config = tiny_config(**EVALUATION, max_steps=8, epochs=60, learning_rate=3e-2)
    store_states(config)
    manifest = run(config)
    stop_at(config, 8)
    if before == "report":
        marker = checkpoints_of(config) / "step-000008.json"
        written = json.loads(marker.read_text())
        assert written["progress"].pop("reported")
        marker.write_text(json.dumps(written))
    else:
        monkeypatch.delattr(Evaluator, "report")
    again = run(config)
    assert again.details == manifest.details and again.content_hash == manifest.content_hash
    reported = checkpoint_of(config).reported
    assert reported is not None and reported.tau == manifest.details["tau"]


@pytest.mark.parametrize("checkpoint_every", [4, 5], ids=["step without a line", "step with one"])
def test_the_last_step_is_evaluated_when_a_larger_group_has_none_to_take(
    tiny_config: Configure,
    store_states: Store,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint_every: int,
) -> None:
    """Another one went on where fewer batches were left than one of its steps takes."""
    settings = {**EVALUATION, "evaluate_every": 99, "batch_tokens": 32, "log_every": 5}
    config = tiny_config(**settings, checkpoint_every=checkpoint_every, keep_checkpoints=99)
    store_states(config)
    steps = run(config).details["steps"]
    last = (steps - 1) // checkpoint_every * checkpoint_every
    stop_at(config, last)

    def of_many(section: TrainSection, batches: int, world: int, *, before: Progress) -> int:
        return total_steps(section, batches, 99 * world, before=before)

    monkeypatch.setattr("pipeline.train.loop.total_steps", of_many)
    details = run(config).details
    assert (details["steps"], details["exported_step"], details["evaluations"]) == (last, last, 1)
    assert details["tau"] > 0
    lines = lines_of(config)
    assert lines[-1]["step"] == last and lines[-1]["tau"] > 0 and lines[-1]["loss"] > 0
    _, card = load_head(head_of(config))
    assert card.metrics["loss"] == lines[-1]["loss"]
    assert run(config).details == details


def test_an_evaluation_needs_one_tree(tiny_config: Configure) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tiny_config(evaluate_every=2, evaluate_tree="auto"))
    assert caught.value.where == "config: train.evaluate_tree"


def test_a_target_that_the_decoder_does_not_run(
    tiny_config: Configure, store_states: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.decoder.model.SUPPORTED", ("qwen3",))
    config = tiny_config(**EVALUATION)
    store_states(config)
    with pytest.raises(UnsupportedModel, match="model_type 'llama'"):
        run(config)
    assert not lines_of(config), "found before the first step"
