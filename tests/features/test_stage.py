"""The features stage on a tiny model: right tensors, right order, resumable, clear errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.cli import main
from pipeline.config import RunConfig
from pipeline.errors import (
    ConfigError,
    ContractMismatch,
    CorruptShard,
    DataError,
    MissingStage,
    StageConflict,
    StageIncomplete,
    StoreError,
)
from pipeline.features.capture import Drawing
from pipeline.features.plan import plan
from pipeline.features.stage import run
from pipeline.records import STATES_FORMAT, Sample
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.shards import read_entries, verify_shard
from pipeline.store.states import StatesReader, StatesSample
from pipeline.target import forward
from pipeline.target.files import sampled_fingerprint
from tests.features.conftest import finish_synth
from tests.shard_files import stored_path

Configs = Callable[..., RunConfig]

#: Of the manifest's details, what tests/features/test_referee.py is about.
CHECKED = {"replies", "audit.json_sha256"}


def read_all(uri: object) -> list[StatesSample]:
    location = stage_location(str(uri), "features")
    readers = [
        StatesReader(location, shard) for shard in read_manifest(str(uri), "features").shards
    ]
    return [reader.sample(index) for reader in readers for index in range(len(reader))]


@pytest.mark.parametrize("supervise", ["replies", "all"])
def test_states_are_those_of_hugging_face(
    supervise: str, tmp_path: Path, ready: Configs, samples: list[Sample], tiny_target: Path
) -> None:
    """Output index i is `hidden_states[i + 1]`, whose entry 0 is the embedding.

    Final states stand one before what they teach.
    """
    from transformers import LlamaForCausalLM

    config = ready(tmp_path, supervise=supervise)
    parent, manifest = read_manifest(str(tmp_path), "synth"), run(config)
    model = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    stored = read_all(tmp_path)
    assert [state.sample_id for state in stored] == [sample.sample_id for sample in samples]
    for sample, state in zip(samples, stored, strict=True):
        with torch.inference_mode():
            output = model(torch.tensor([sample.token_ids]), output_hidden_states=True)
        aux = torch.cat([output.hidden_states[layer + 1][0] for layer in (1, 3, 4)], dim=-1)
        torch.testing.assert_close(state.aux_states.float(), aux, rtol=1e-2, atol=1e-4)
        assert state.token_ids.tolist() == list(sample.token_ids)
        supervised = [at for span in sample.supervised for at in range(span.start, span.end)]
        assert state.supervised_mask.nonzero().flatten().tolist() == supervised
        taught = supervised if supervise == "replies" else range(1, len(sample.token_ids))
        assert state.final_positions.tolist() == [at - 1 for at in taught]
        torch.testing.assert_close(
            model.lm_head(state.final_states.float()),
            output.logits[0, state.final_positions.long()],
            rtol=2e-2,
            atol=1e-3,
        )
        # Planted: the neighbouring layer and the unshifted position must not pass.
        wrong = torch.cat([output.hidden_states[layer][0] for layer in (1, 3, 4)], dim=-1)
        assert (state.aux_states.float() - wrong).abs().max() > 0.01
        assert (
            model.lm_head(state.final_states.float())
            - output.logits[0, state.final_positions.long() + 1]
        ).abs().max() > 0.02
    for name in ("contract", "licenses", "sources", "tokens"):
        assert getattr(manifest, name) == getattr(parent, name), name
    assert manifest.parent_hash == parent.content_hash and manifest.rows == len(samples)
    details = {name: manifest.details[name] for name in manifest.details if name not in CHECKED}
    assert details == {
        "encoding": "bf16",
        "format": STATES_FORMAT,
        "samples": 12,
        "supervised_tokens": sum(int(state.supervised_mask.sum()) for state in stored),
    }
    assert len(manifest.shards) >= 3 and max(shard.tokens for shard in manifest.shards) < 150


def test_a_complete_stage_changes_nothing_and_loads_no_torch(
    tmp_path: Path, ready: Configs
) -> None:
    config = ready(tmp_path)
    run(config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    script = """
import sys
from pipeline.config import FeaturesSection, RunConfig
from pipeline.features.stage import run
from pipeline.features.plan import plan
config = RunConfig.model_validate_json(sys.argv[1])
assert plan(config).state == "complete"
run(config)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script, config.model_dump_json()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_object_store_gets_the_same_bytes(tmp_path: Path, bucket: str, ready: Configs) -> None:
    here, there = ready(tmp_path), ready(f"{bucket}/run")
    local, remote = run(here), run(there)
    assert remote.shards == local.shards and remote.content_hash == local.content_hash
    for mine, theirs in zip(read_all(tmp_path), read_all(f"{bucket}/run"), strict=True):
        assert (
            mine.sample_id == theirs.sample_id
            and torch.equal(mine.aux_states, theirs.aux_states)
            and torch.equal(mine.final_states, theirs.final_states)
        )


def test_killed_runs_end_with_the_same_checksums(tmp_path: Path, ready: Configs) -> None:
    whole, killed = (ready(tmp_path / name, shard_tokens=1) for name in ("whole", "killed"))
    script = """
import sys
from pipeline.config import RunConfig
from pipeline.features.stage import run
run(RunConfig.model_validate_json(sys.argv[1]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, killed.model_dump_json()], stdout=subprocess.DEVNULL
    )
    shards = tmp_path / "killed/features/shards"
    while process.poll() is None and len(list(shards.glob("*.entry.json"))) < 2:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -9, "finished before it could be killed"
    committed = {path: path.stat().st_mtime_ns for path in shards.glob("*.entry.json")}
    assert 0 < len(committed) < 12 and not (tmp_path / "killed/features/manifest.json").exists()
    assert "of about" in plan(killed).state

    again = run(killed)
    assert {path: path.stat().st_mtime_ns for path in committed} == committed, (
        "committed shards are skipped"
    )
    assert again.content_hash == run(whole).content_hash
    for shard in again.shards:
        verify_shard(stage_location(str(tmp_path / "killed"), "features"), shard)


def test_parts_in_any_order_and_the_last_one_finishes(tmp_path: Path, ready: Configs) -> None:
    whole, config = ready(tmp_path / "whole"), ready(tmp_path / "parts")

    def part(shard: str) -> RunConfig:
        return config.model_copy(update={"run": config.run.model_copy(update={"shard": shard})})

    expected = run(whole)
    for shard in ("1/3", "2/3"):
        with pytest.raises(StageIncomplete, match=r"\d of \d+ shards are missing"):
            run(part(shard))
    last = run(part("0/3"))
    assert last.shards == expected.shards and last.content_hash == expected.content_hash


def test_two_kinds_of_machines_make_one_stage(
    tmp_path: Path, make_config: Configs, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one of them has committed stays as it is; manifest and entries say who made what."""
    narrow, wide = (
        make_config(tmp_path, shard_tokens=1, target={"dtype": dtype})
        for dtype in ("bfloat16", "float32")
    )
    finish_synth(narrow)
    whole = run(narrow)
    assert [each.dtype for each in whole.arithmetic] == ["bfloat16"]
    location = stage_location(str(tmp_path), "features")
    location.delete("manifest.json")
    for shard in whole.shards[7:]:
        location.child("shards").delete(f"{shard.name}.entry.json")
    capsys.readouterr()
    both = run(wide)
    shown = " ".join(capsys.readouterr().out.split())
    assert "features arithmetic: float32, kernels torch" in shown
    assert "of 7 committed shards 7 by bfloat16, kernels torch" in shown
    assert both.shards[:7] == whole.shards[:7] and both.shards[7:] != whole.shards[7:]
    assert {each.dtype for each in both.arithmetic} == {"bfloat16", "float32"}
    names = [shard.name for shard in both.shards]
    made_by = [entry.arithmetic for entry in read_entries(location.child("shards"), names)]
    assert [each and each.dtype for each in made_by] == ["bfloat16"] * 7 + ["float32"] * 5
    assert {each.kernels for each in both.arithmetic} == {"torch"}
    assert run(narrow) == both == run(make_config(tmp_path, shard_tokens=1, batch_tokens=32))


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_alternatives_are_what_hugging_face_says_after_other_tokens(
    encoding: str, tmp_path: Path, ready: Configs, samples: list[Sample], tiny_target: Path
) -> None:
    """Four at each final state, all different, none the sample's own token."""
    from transformers import LlamaForCausalLM

    once = run(ready(tmp_path, alternatives=4, encoding=encoding))
    again = run(ready(tmp_path / "again", alternatives=4, encoding=encoding))
    assert [shard.sha256 for shard in once.shards] == [shard.sha256 for shard in again.shards]
    model = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    for sample, state in zip(samples, read_all(tmp_path), strict=True):
        assert state.alternative_ids is not None and state.alternative_states is not None
        assert state.alternative_ids.shape == (len(state.final_positions), 4)
        states = state.alternative_states.view(len(state.final_positions), 4, -1).float()
        for place, at in enumerate(state.final_positions.tolist()):
            ids = state.alternative_ids[place].tolist()
            assert len({*ids, sample.token_ids[at]}) == 5
            replaced = torch.tensor([[*sample.token_ids[:at], token] for token in ids])
            with torch.inference_mode():
                final = model.model(replaced).last_hidden_state[:, -1]
            torch.testing.assert_close(states[place], final, rtol=3e-2, atol=3e-2)


def test_alternatives_are_draws_from_the_target(tiny_target: Path, samples: list[Sample]) -> None:
    """The first of each position, over many seeds: a chi-squared test against the softmax without
    the sample's own token, which a distribution of another temperature fails."""
    generator = torch.Generator().manual_seed(0)
    rows, sample = torch.randn(8, 4, generator=generator), samples[0]
    final = torch.randn(len(sample.token_ids), 4, generator=generator)
    sample = sample.model_copy(update={"token_ids": tuple(each % 8 for each in sample.token_ids)})
    counts, seeds = torch.zeros(()), 3000
    for seed in range(seeds):
        positions, ids = Drawing(2, "replies", rows, 1.0, seed).draw(sample, final)
        counts = counts + torch.nn.functional.one_hot(ids[0], 8)  # [S, V]
    for scale, fits in ((1.0, True), (0.5, False)):
        logits = final[positions.long() - 1] @ rows.T * scale
        own = torch.tensor(sample.token_ids)[positions.long(), None]
        expected = seeds * logits.scatter(1, own, -torch.inf).softmax(-1)
        enough = expected > 5
        chi = ((counts - expected).square() / expected)[enough].sum()
        freedom = int(enough.sum()) - len(positions)
        assert (chi < freedom + 5 * (2 * freedom) ** 0.5) == fits


def test_a_wrong_alternative_is_found(tmp_path: Path, ready: Configs, monkeypatch: Any) -> None:
    """Planted: what was before it is a token off."""
    attend = forward._attend_instead

    def rolled(*arguments: Any) -> torch.Tensor:
        query, key, value, scaling, past, *others = arguments
        past = [tuple(part.roll(1, dims=2) for part in pair) for pair in past]
        return attend(query, key, value, scaling, past, *others)

    monkeypatch.setattr(forward, "_attend_instead", rolled)
    with pytest.raises(DataError, match=r"differs by .* from that of the sample which has it"):
        run(ready(tmp_path, alternatives=2))


@pytest.mark.parametrize(
    "settings", [{"parallel": "tensor"}, {"backend": "vllm", "engine": {"endpoints": ["http://x"]}}]
)
def test_alternatives_need_the_target_in_one_process(make_config: Any, settings: Any) -> None:
    with pytest.raises(ConfigError, match="alternatives need the target in one process"):
        make_config("run", alternatives=2, **settings)


@pytest.mark.parametrize(
    ("level", "dtype", "bytes_each"), [("avx2", "float32", 4), ("amx", "bfloat16", 2)]
)
def test_the_plan_follows_the_machine(
    tmp_path: Path,
    make_config: Configs,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    dtype: str,
    bytes_each: int,
) -> None:
    monkeypatch.setattr("pipeline.config.isa.machine_levels", lambda: ("avx2", "amx"))
    monkeypatch.setenv("EAGLE3_ISA", level)
    auto, same = (make_config(tmp_path, target={"dtype": setting}) for setting in ("auto", dtype))
    parent = finish_synth(auto)
    assert plan(auto) == plan(same)
    float16 = plan(make_config(tmp_path, target={"dtype": "float16"}))
    wider = plan(auto).peak_memory_bytes - float16.peak_memory_bytes
    assert wider >= parent.contract.parameters * (bytes_each - 2)
    assert (wider > 0) is (bytes_each > 2)


def test_samples_without_supervision_are_counted_and_alone_stop_the_stage(
    tmp_path: Path, ready: Configs, samples: list[Sample]
) -> None:
    silent = samples[1].model_copy(update={"supervised": ()})
    manifest = run(ready(tmp_path / "some", samples=[samples[0], silent]))
    assert manifest.rejected == {"no_supervised_tokens": 1} and manifest.rows == 1
    with pytest.raises(DataError, match=r"no sample with supervised tokens .*no_supervised_tokens"):
        run(ready(tmp_path / "none", samples=[silent]))
    assert not (tmp_path / "none/features/manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"token_ids": (5, 9999, 7, 8, 9, 10, 11)},
            r"sample p3 of unit: token_ids: needs one or more ids in \[0, \d+\)",
        ),
        (
            {"supervised": ({"start": 2, "end": 4000},)},
            "sample p3 of unit: supervised: has a span outside",
        ),
    ],
)
def test_samples_that_do_not_fit_the_target_are_named(
    tmp_path: Path, ready: Configs, samples: list[Sample], change: dict[str, object], message: str
) -> None:
    samples[3] = Sample.model_validate({**samples[3].model_dump(), **change})
    with pytest.raises(DataError, match=message):
        run(ready(tmp_path, samples=samples))


def test_infinite_states_stop_with_the_sample(
    tmp_path: Path, ready: Configs, samples: list[Sample], tiny_target: Path
) -> None:
    """A target whose embedding of token 95 is infinite; only the second sample uses it."""
    broken = Path(shutil.copytree(tiny_target, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][95] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    pair = [
        samples[0].model_copy(
            update={"token_ids": (token,) * len(samples[0].token_ids), "sample_id": name}
        )
        for token, name in ((1, "fine"), (95, "bad"))
    ]
    config = ready(tmp_path / "run", target={"source": str(broken)}, samples=pair)
    with pytest.raises(
        DataError, match="sample bad of unit: the target's aux states hold NaN or infinity"
    ):
        run(config)
    assert not (tmp_path / "run/features/manifest.json").exists()


def test_another_target_is_refused(tmp_path: Path, ready: Configs, make_config: Configs) -> None:
    ready(tmp_path)
    message = r"contract\.capture_layers: .*\[1,3,4\], this one has \[1,2,4\]"
    with pytest.raises(ContractMismatch, match=message):
        run(make_config(tmp_path, target={"capture_layers": (1, 2, 4)}))


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_change_between_two_shards_are_refused(
    sharded: bool, tmp_path: Path, ready: Configs, tiny_target: Path
) -> None:
    """One whole file of more than 128 MiB, half of it zeroed where earlier versions did not look;
    or a byte of the second shard of two."""
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    changed = target / "model.safetensors"
    tensors = load_file(changed)
    if sharded:
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        index = {name: names["layers" in name] for name in tensors}
        for name in names:
            part = {each: tensors[each] for each in tensors if index[each] == name}
            save_file(part, target / name, {"format": "pt"})
        tree = {"metadata": {}, "weight_map": index}
        changed.with_suffix(".safetensors.index.json").write_text(json.dumps(tree))
        changed.unlink()
        changed = target / names[1]
    else:
        tensors["padding"] = torch.ones(34 << 20)
        save_file(tensors, changed, {"format": "pt"})
    config = ready(tmp_path / "run", target={"source": str(target)})
    parts = [
        config.model_copy(update={"run": config.run.model_copy(update={"shard": f"{n}/2"})})
        for n in range(2)
    ]
    with pytest.raises(StageIncomplete):
        run(parts[0])
    size, before = changed.stat().st_size, sampled_fingerprint([changed])
    with changed.open("r+b") as file:
        if sharded:
            file.seek(size - 1)
            file.write(b"\x55")
        else:
            step = -(-size // 64)
            for offset in range(0, size - 2 * step, step):
                file.seek(offset + (1 << 20))
                file.write(bytes(step - (1 << 20)))
    assert sharded or sampled_fingerprint([changed]) == before
    with pytest.raises(ContractMismatch, match=r"contract\.fingerprint"):
        run(parts[1])
    assert not (tmp_path / "run/features/manifest.json").exists()
    assert main(["verify", str(tmp_path / "run")]) == 2


def test_missing_and_damaged_parents_are_named(
    tmp_path: Path, ready: Configs, make_config: Configs
) -> None:
    with pytest.raises(MissingStage, match="run `eagle3 synth` first"):
        run(make_config(tmp_path))
    config = ready(tmp_path)
    path = stored_path(tmp_path / "synth/shards", "00001.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        CorruptShard, match=r"synth/shards/00001\.\w+\.parquet: has .* bytes, .* were committed"
    ):
        run(config)
    assert not (tmp_path / "features/manifest.json").exists()


def test_another_packing_needs_force(tmp_path: Path, ready: Configs, make_config: Configs) -> None:
    first = run(ready(tmp_path))
    with pytest.raises(StageConflict, match="holds finished work for another config"):
        run(make_config(tmp_path, shard_tokens=150))
    other = plan(make_config(tmp_path, shard_tokens=150))
    assert other.state == "complete for another config or parent"
    again = run(make_config(tmp_path, shard_tokens=150, force=True))
    assert again.tokens == first.tokens and len(again.shards) < len(first.shards)
    assert len(list((tmp_path / "features/shards").glob("*.safetensors"))) == len(again.shards)


def test_the_plan_says_what_it_rests_on(tmp_path: Path, make_config: Configs) -> None:
    config = make_config(tmp_path)
    assert plan(config).state == "waiting for synth" and plan(config).records == 0
    parent = finish_synth(config)
    before = plan(config)
    assert (before.state, before.records, before.tokens) == (
        "not started",
        12,
        parent.tokens,
    ) and len(before.basis) == 3
    shards = run(config).shards
    stored = sum(shard.bytes for shard in shards)
    assert abs(stored - before.storage_bytes) < 800 * max(len(shards), before.shards), (
        "all but differences of the headers"
    )
    assert before.peak_memory_bytes > 0
    files = [path for path in (tmp_path / "features").rglob("*") if path.is_file()]
    assert len(files) == before.objects and len(shards) == before.shards
    assert f"shards: about {before.shards} of" in before.basis[1]
    assert before.basis[2].startswith("memory: ")


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
def test_small_encodings_are_stored_planned_and_read(
    tmp_path: Path, ready: Configs, encoding: str
) -> None:
    exact, small = ready(tmp_path / "exact"), ready(tmp_path / "small", encoding=encoding)
    planned = plan(small)
    manifest = run(small)
    assert manifest.details["encoding"] == encoding
    shards = max(len(manifest.shards), planned.shards)
    assert abs(sum(shard.bytes for shard in manifest.shards) - planned.storage_bytes) < 800 * shards
    assert planned.storage_bytes < sum(shard.bytes for shard in run(exact).shards)
    for mine, theirs in zip(
        read_all(tmp_path / "small"), read_all(tmp_path / "exact"), strict=True
    ):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        assert torch.equal(mine.supervised_mask, theirs.supervised_mask)
        coded, exact_states = mine.aux_states.float(), theirs.aux_states.float()
        assert 0 < (coded - exact_states).norm() / exact_states.norm() < 0.04


def test_a_full_disk_is_told_before_the_target_is_loaded(
    tmp_path: Path, mount: Callable[[str], Path], ready: Configs, samples: list[Sample]
) -> None:
    long = [sample.model_copy(update={"token_ids": sample.token_ids * 40}) for sample in samples]
    config = ready(mount("size=200k") / "run", samples=long)
    for attempt in (plan, run):
        with pytest.raises(
            StoreError,
            match=r"the states need .* GB more, .* GB are free "
            r"\(fix: free some space, set features.encoding=int8, or",
        ):
            attempt(config)
    assert not list((tmp_path / "mount0/run/features").glob("shards/*"))


def test_the_plan_counts_committed_shards(tmp_path: Path, ready: Configs) -> None:
    config = ready(tmp_path)
    manifest = run(config)
    (tmp_path / "features/manifest.json").unlink()
    assert f"{len(manifest.shards)} of about" in plan(config).state


def test_the_configuration_names_the_format_that_is_written(
    make_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of an older format belong to another configuration, and `--force` replaces them."""
    config = make_config(tmp_path)
    before = config.section_hash("features")
    monkeypatch.setattr("pipeline.config.run.STATES_FORMAT", STATES_FORMAT + 1)
    assert config.section_hash("features") != before
