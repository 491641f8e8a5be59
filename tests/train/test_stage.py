"""The stage with DeepSpeed on a tiny target: it learns, stops on bad data, survives kill -9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ContractMismatch, DataError, MissingStage, StageConflict, StoreError
from pipeline.heads.registry import load_head
from pipeline.store.location import Location
from pipeline.store.manifest import read_manifest
from pipeline.store.states import StatesSample
from pipeline.train import loop
from pipeline.train.plan import plan
from pipeline.train.stage import run
from tests.shard_files import reseal
from tests.train.runs import Configure, Store, head_of, kill_after, lines_of, stop_at, without_speed


@pytest.mark.parametrize(
    ("setting", "device", "compiles"),
    [(None, "cuda", True), (None, "cpu", False), (False, "cuda", False), (True, "cpu", True)],
)
def test_the_layer_is_compiled_on_a_gpu_where_nothing_is_set(
    tiny_config: Configure, setting: bool | None, device: str, compiles: bool
) -> None:
    config = tiny_config(dtype="float32", compile=setting)
    placed, _ = loop._for_device(config, None, torch.device(device))
    assert placed.train.compile is compiles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_overfits_and_exports(
    tiny_config: Configure, store_states: Store, states: list[StatesSample], dtype: str
) -> None:
    config = tiny_config(
        dtype=dtype,
        max_steps=150,
        epochs=150,
        batch_tokens=48,
        learning_rate=1e-2,
        head={"draft_vocab_size": 96},
        checkpoint_every=200,
    )
    parent = store_states(config, states[:2])
    manifest = run(config)
    lines = lines_of(config)
    assert [line["step"] for line in lines] == list(range(1, 151))
    first, last = lines[0], lines[-1]
    assert last["loss"] < 0.9 * first["loss"]
    assert min(last["acc_0"], last["acc_1"], last["acc_2"]) > 0.9 > first["acc_1"]
    head, card = load_head(head_of(config), expected=parent.contract)
    assert card.provenance["manifests"]["features"] == parent.content_hash
    assert card.provenance["licenses"] == {"MIT": 2}
    assert "plan" not in card.provenance["config"]
    assert card.metrics["acc_0"] == last["acc_0"] and card.metrics["steps"] == 150
    assert manifest.details["parameters"] == head.count_parameters()
    assert manifest.details["coverage"] == 1.0 and manifest.tokens == last["tokens"]
    files = {"config.json", "eagle3.json", "model.safetensors"}
    assert {shard.name for shard in manifest.shards} == files
    planned = plan(config)
    stored = [path for path in head_of(config).parent.rglob("*") if path.is_file()]
    outside = [path for path in stored if "checkpoints" not in path.parts]
    assert len(outside) == planned.objects - config.train.keep_checkpoints * 4
    assert planned.state == "complete"


def test_complete_run_is_left_alone_and_a_lost_head_comes_back(
    tiny_config: Configure, store_states: Store
) -> None:
    config = tiny_config(max_steps=2)
    store_states(config)
    manifest = run(config)
    weights = head_of(config) / "model.safetensors"
    before = weights.read_bytes()
    stamp = (Path(config.run.uri) / "train" / "manifest.json").stat().st_mtime_ns
    weights.write_bytes(b"\0" * len(before))
    assert run(config) == manifest
    assert weights.read_bytes() == before
    assert (Path(config.run.uri) / "train" / "manifest.json").stat().st_mtime_ns == stamp
    with pytest.raises(StageConflict):
        run(tiny_config(max_steps=3))


def test_needs_states_of_the_same_target(tiny_config: Configure, store_states: Store) -> None:
    config = tiny_config()
    assert plan(config).state == "waiting for features"
    with pytest.raises(MissingStage):
        run(config)
    store_states(config)
    assert plan(config).state == "not started"
    contract = read_manifest(config.run.uri, "features").contract
    other = contract.model_copy(update={"fingerprint": "0" * 64})
    reseal(Path(config.run.uri) / "features", contract=other.model_dump(mode="json"))
    with pytest.raises(ContractMismatch, match="fingerprint"):
        run(config)


def test_nan_stops_with_the_sample(
    tiny_config: Configure, store_states: Store, states: list[StatesSample]
) -> None:
    broken = states[3].aux_states.clone()
    broken[2, 5] = torch.nan
    for start, problem in (("least_squares", "states are not"), ("target_last", "loss is nan")):
        head, budget = {"init_layer": start}, len(states[3].token_ids)
        config = tiny_config(start, batch_tokens=budget, head=head)
        store_states(config, [replace(states[3], aux_states=broken)])
        with pytest.raises(DataError, match=problem) as caught:
            run(config)
        assert "sample-3" in caught.value.where
        assert not (Path(config.run.uri) / "train" / "manifest.json").exists()


def test_accumulation_and_split_are_counted(tiny_config: Configure, store_states: Store) -> None:
    config = tiny_config(batch_tokens=16, accumulate=2, epochs=1, zero_stage=1)
    parent = store_states(config)
    manifest = run(config)
    assert manifest.details["split_samples"] == 12
    assert manifest.details["tokens"] <= parent.tokens
    assert all(0 < line["fill"] <= 1 for line in lines_of(config))


def test_every_line_says_how_fast_and_how_large(
    tiny_config: Configure, store_states: Store
) -> None:
    config = tiny_config(max_steps=4, log_every=2)
    store_states(config)
    run(config)
    lines = lines_of(config)
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert line["tokens_per_second"] > 0 and line["lr"] > 0
        assert 0 <= line["data_wait_share"] < 1 and 0.05 < line["peak_memory_gb"] < 64


def test_dropped_samples_reach_the_manifest(
    tiny_config: Configure, store_states: Store, states: list[StatesSample]
) -> None:
    config = tiny_config(batch_tokens=30, long_samples="drop", epochs=1)
    store_states(config)
    manifest = run(config)
    longer = sum(len(sample.token_ids) > 30 for sample in states)
    assert 0 < longer < len(states) and manifest.rejected == {"longer_than_batch": longer}
    assert manifest.details["coverage_by_source"] == {"test": manifest.details["coverage"]}
    assert manifest.details["split_samples"] == 0


def test_plan_counts_what_evaluations_hold(tiny_config: Configure, store_states: Store) -> None:
    head = {"init_layer": "target_last"}  # the peak is training's
    plain, decoding = tiny_config(head=head), tiny_config(head=head, evaluate_every=2)
    parent = store_states(plain)
    without, with_them = plan(plain), plan(decoding)
    assert with_them.storage_bytes > without.storage_bytes
    assert with_them.peak_memory_bytes - without.peak_memory_bytes == 2 * parent.contract.parameters


def test_plan_counts_what_is_drawn_of_the_states(
    tiny_config: Configure, store_states: Store
) -> None:
    whole, drawn, more = (tiny_config(data_tokens=tokens) for tokens in (None, 100, 10**6))
    parent = store_states(whole)
    few = plan(drawn)
    assert few.tokens == 100 * drawn.train.epochs < plan(whole).tokens
    assert few.records == pytest.approx(parent.rows * few.tokens / parent.tokens, abs=3)
    assert plan(more) == plan(whole)


@pytest.mark.parametrize("settings", [{"loss": "kl"}, {"activation_checkpointing": True}])
def test_switches_reach_the_model(
    tiny_config: Configure, store_states: Store, settings: dict[str, object]
) -> None:
    plain = tiny_config("plain", max_steps=2)
    switched = tiny_config("switched", max_steps=2, **settings)
    for config in (plain, switched):
        store_states(config)
        run(config)
    losses = [lines_of(config)[0]["loss"] for config in (plain, switched)]
    same = losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert same == ("activation_checkpointing" in settings)


def test_wandb_offline_holds_the_run(
    tiny_config: Configure, store_states: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(max_steps=2, wandb="offline")
    store_states(config)
    run(config)
    assert list((Path(config.run.uri) / "train" / "wandb").glob("offline-run-*/*.wandb"))


def test_wandb_is_told_whether_the_run_goes_on(
    tiny_config: Configure, store_states: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless told so it begins the run of a known id anew, and the lines before are gone."""
    wandb, told = pytest.importorskip("wandb"), list[dict[str, Any]]()

    def init(**settings: Any) -> Mock:
        told.append(settings)
        return Mock()

    monkeypatch.setattr(wandb, "init", init)
    config = tiny_config(max_steps=4, checkpoint_every=2, wandb="online")
    store_states(config)
    run(config)
    stop_at(config, 2)
    run(config)
    assert [settings["resume"] for settings in told] == [None, "allow"]
    assert told[0]["id"] == told[1]["id"]


def test_remote_run_uploads_head_and_metrics(
    tiny_config: Configure, store_states: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local, remote = tiny_config(max_steps=5), tiny_config("memory://train-test/run", max_steps=5)
    manifests = []
    for config in (local, remote):
        store_states(config)
        manifests.append(run(config))
    checksums = [[shard.sha256 for shard in manifest.shards] for manifest in manifests]
    assert checksums[0] == checksums[1]
    stage = Location(remote.run.uri).child("train")
    weights = (head_of(local) / "model.safetensors").read_bytes()
    assert stage.child("head").read("model.safetensors") == weights
    assert stage.read("metrics.jsonl").count(b"\n") == 5


def test_checkpoint_that_cannot_be_written(
    tiny_config: Configure, store_states: Store, mount: Callable[[str], Path]
) -> None:
    config = tiny_config(max_steps=4)
    store_states(config)
    stage = Path(config.run.uri) / "train"
    stage.symlink_to(mount("size=100k"))  # a checkpoint has 150
    with pytest.raises(StoreError, match="checkpoint cannot be written"):
        run(config)
    assert not (stage / "manifest.json").exists()


def test_kill_minus_nine_continues_bit_for_bit(tiny_config: Configure, store_states: Store) -> None:
    settings = {"dtype": "bfloat16", "epochs": 40, "max_steps": 160, "checkpoint_every": 7}
    whole, killed = tiny_config("whole", **settings), tiny_config("killed", **settings)
    for config in (whole, killed):
        store_states(config)
    manifest = run(whole)
    kill_after(killed, 17)
    interrupted = lines_of(killed)
    checkpoints = Path(killed.run.uri) / "train" / "checkpoints"
    markers = sorted(checkpoints.glob("*.json"))
    assert markers and len(interrupted) < 160
    # The newest checkpoint was cut short after its marker as well: the one before it has to do.
    if len(markers) > 1:
        next(checkpoints.glob(f"{markers[-1].stem}-*/weights.safetensors")).write_bytes(b"cut")
    again = run(killed)
    assert without_speed(lines_of(killed)) == without_speed(lines_of(whole))
    checksums = [{shard.name: shard.sha256 for shard in done.shards} for done in (manifest, again)]
    assert checksums[0] == checksums[1]
    assert len(list(checkpoints.glob("*.json"))) == killed.train.keep_checkpoints


def test_training_goes_on_in_the_type_of_its_checkpoint(
    tiny_config: Configure, store_states: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that multiplies something else: the optimiser's state is what it is."""
    settings = {"epochs": 8, "checkpoint_every": 3}
    begun, continued = (
        tiny_config(**settings, dtype=dtype, max_steps=9) for dtype in ("bfloat16", "float32")
    )
    store_states(begun)
    whole = run(begun)
    stage = Path(begun.run.uri) / "train"
    for path in (stage / "manifest.json", *(stage / "checkpoints").glob("step-000009*")):
        path.unlink() if path.is_file() else None
    capsys.readouterr()
    again = run(continued)
    shown = " ".join(capsys.readouterr().out.split())
    assert "continuing from checkpoint step-000006" in shown and "bfloat16" in shown
    assert "bfloat16, kernels torch, which the checkpoint was begun in" in shown
    weights = [
        {shard.name: shard.sha256 for shard in done.shards}["model.safetensors"]
        for done in (whole, again)
    ]
    assert weights[0] == weights[1]
    assert [each.dtype for each in again.arithmetic] == ["bfloat16"]


@pytest.mark.parametrize(("level", "dtype"), [("avx2", "float32"), ("amx", "bfloat16")])
def test_auto_trains_in_what_the_machine_multiplies_and_stores_the_head_as_ever(
    tiny_config: Configure,
    store_states: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    dtype: str,
) -> None:
    monkeypatch.setattr("pipeline.config.isa.machine_levels", lambda: ("avx2", "amx"))
    monkeypatch.setenv("EAGLE3_ISA", level)
    config = tiny_config(dtype="auto", max_steps=2)
    parent = store_states(config)
    assert f"tokens in {dtype}" in plan(config).basis[2]
    manifest = run(config)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"train arithmetic: {dtype}, kernels torch" in shown
    assert ("bfloat16 is not multiplied natively here" in shown) is (dtype == "float32")
    (arithmetic,) = manifest.arithmetic
    assert (arithmetic.dtype, arithmetic.kernels, arithmetic.device) == (dtype, "torch", "cpu")
    stored = load_file(head_of(config) / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    _, card = load_head(head_of(config), expected=parent.contract)
    assert card.provenance["arithmetic"] == [f"{dtype}, kernels torch"]
