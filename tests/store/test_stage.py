"""A stage's directory: begin, commit, finish, resume, refuse, discard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ContractMismatch, CorruptShard, MissingStage, StageConflict, StoreError
from pipeline.records import (
    OLDEST_SCHEMA,
    SCHEMA_VERSION,
    Arithmetic,
    Manifest,
    TargetContract,
    digest,
    match_contracts,
)
from pipeline.store.location import Location
from pipeline.store.shards import committed, read_shard, verify_shard
from pipeline.store.stage_run import (
    StageRun,
    find_manifest,
    open_stage,
    read_manifest,
    stage_location,
)

Configs = Callable[..., RunConfig]


def open_synth(config: RunConfig) -> StageRun:
    return open_stage(config, "synth", None)


def finish_synth(config: RunConfig, contract: TargetContract) -> Manifest:
    stage_run = open_synth(config)
    for index in range(3):
        name = f"{index:05d}.bin"
        if name not in stage_run.shards:
            data, rejected = bytes([index]) * 100, {"pii:EMAIL_ADDRESS": index}
            stage_run.commit(name, data, rows=index, tokens=10 * index, rejected=rejected)
    return stage_run.finish(
        contract=contract,
        licenses={"MIT": 3},
        sources={"unit": 3},
        details={"note": 1},
        rejected_extra={"license:GPL-3.0": 4},
    )


def test_a_finished_stage_is_recognised_and_read_back(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    config = make_config(tmp_path)
    written = finish_synth(config, contract)
    assert written == read_manifest(str(tmp_path), "synth") == open_synth(config).manifest
    assert (written.rows, written.tokens) == (3, 30)
    assert written.rejected == {"license:GPL-3.0": 4, "pii:EMAIL_ADDRESS": 3}
    assert written.parent_hash is None and written.config_hash == config.section_hash("synth")
    assert {"python", "torch", "transformers", "eagle3"} <= set(written.software)
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_chain_names_its_parent(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    config = make_config(tmp_path)
    parent = finish_synth(config, contract)
    child = open_stage(config, "features", parent).finish(
        contract=contract, licenses=parent.licenses, sources=parent.sources
    )
    assert (child.parent_uri, child.parent_hash) == (f"{tmp_path}/synth", parent.content_hash)


def test_the_same_work_on_an_object_store_has_the_same_hash(
    tmp_path: Path, bucket: str, make_config: Configs, contract: TargetContract
) -> None:
    uri = f"{bucket}/same"
    here, there = make_config(tmp_path), make_config(uri)
    local, remote = finish_synth(here, contract), finish_synth(there, contract)
    assert remote.shards == local.shards and remote.content_hash == local.content_hash
    assert find_manifest(uri, "synth") == remote == open_synth(there).manifest
    for shard in remote.shards:
        local_bytes = read_shard(stage_location(str(tmp_path), "synth"), shard)
        assert read_shard(stage_location(uri, "synth"), shard) == local_bytes
    with pytest.raises(StageConflict):
        open_synth(make_config(uri, synth={"max_turns": 1}))
    again = open_synth(make_config(uri, synth={"max_turns": 1}, force=True))
    assert again.manifest is None and Location(f"{uri}/synth").names() == ["begin.json"]


def test_a_stage_that_was_not_run_is_missing(tmp_path: Path) -> None:
    assert find_manifest(str(tmp_path), "synth") is None
    message = r"synth/manifest\.json: stage synth is not finished \(fix: run `eagle3 synth` first"
    with pytest.raises(MissingStage, match=message):
        read_manifest(str(tmp_path), "synth")


def test_interrupted_work_continues_with_what_was_committed(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    config = make_config(tmp_path / "killed")
    first = open_synth(config)
    rejected = {"pii:EMAIL_ADDRESS": 0}
    kept = first.commit("00000.bin", bytes(100), rows=0, tokens=0, rejected=rejected)
    folder = first.location.child("shards")
    folder.write("00001.bin", b"data whose entry was never written")
    (tmp_path / "killed/synth/shards/.00002.bin.9-ab.tmp").write_bytes(b"half")

    second = open_synth(config)
    assert second.manifest is None and second.shards == {"00000.bin": kept}
    assert folder.names() == ["00000.bin", "00000.bin.entry.json", "00001.bin"]
    assert not list(tmp_path.rglob("*.tmp"))
    whole = finish_synth(make_config(tmp_path / "whole"), contract)
    assert finish_synth(config, contract).shards == whole.shards


def arithmetic_of(dtype: str, repeatable: str = "always", *, threads: int = 2) -> Arithmetic:
    kernels = {"float32": "avx2", "bfloat16": "amx"}[dtype]
    fields = {"dtype": dtype, "kernels": kernels, "device": "cpu", "processor": kernels}
    return Arithmetic.model_validate({**fields, "threads": threads, "repeatable": repeatable})


def test_a_run_that_goes_on_on_another_kind_of_machine_says_so(
    tmp_path: Path,
    make_config: Configs,
    contract: TargetContract,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, here, there = make_config(tmp_path), arithmetic_of("bfloat16"), arithmetic_of("float32")
    first = open_synth(config)
    first.compute_with(here)
    kept = first.commit("00000.bin", bytes(100), rows=0, tokens=0)
    shown = capsys.readouterr().out
    assert "synth arithmetic: bfloat16, kernels amx" in shown and "committed" not in shown

    second = open_synth(config)
    second.compute_with(there, why=" (why)")
    shown = " ".join(capsys.readouterr().out.split())
    assert "synth arithmetic: float32, kernels avx2 (why)" in shown
    assert "of 1 committed shards 1 by bfloat16, kernels amx (amx, 2 threads): they stay" in shown
    second.commit("00001.bin", bytes(9), rows=1, tokens=1)
    assert second.shards["00000.bin"] == kept
    entries = committed(second.location)
    assert [entry.arithmetic for entry in entries.values()] == [here, there]

    manifest = open_synth(config).finish(contract=contract, licenses={}, sources={})
    assert set(manifest.arithmetic) == {here, there} and len(manifest.arithmetic) == 2
    assert read_manifest(str(tmp_path), "synth") == manifest
    elsewhere = manifest.model_copy(update={"arithmetic": (there,)})
    assert elsewhere.content_hash == manifest.content_hash, "it makes no two runs differ"


def test_resuming_knows_what_its_arithmetic_promises(
    tmp_path: Path, make_config: Configs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other threads are the same arithmetic where results do not depend on them."""
    for repeatable, threads, told in (
        ("always", 1, False),
        ("per thread count", 2, False),
        ("per thread count", 1, True),
        ("no", 2, True),
    ):
        config = make_config(tmp_path / f"{repeatable}{threads}")
        first = open_synth(config)
        first.compute_with(arithmetic_of("float32", repeatable, threads=2))
        first.commit("00000.bin", bytes(9), rows=1, tokens=1)
        capsys.readouterr()
        open_synth(config).compute_with(arithmetic_of("float32", repeatable, threads=threads))
        shown = capsys.readouterr().out
        assert ("committed shards" in shown) is told, (repeatable, threads)
        assert ("may give other results" in shown) is (repeatable == "no")


def test_entries_and_manifests_without_arithmetic_are_read(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    """As eagle3 with schema 2 wrote them, down to the hash that the next stage's manifest holds."""
    config = make_config(tmp_path)
    finish_synth(config, contract)
    path = tmp_path / "synth/manifest.json"
    fields = {**json.loads(path.read_text()), "schema_version": 2}
    del fields["arithmetic"]
    path.write_text(json.dumps(fields))
    old = read_manifest(str(tmp_path), "synth")
    assert old.arithmetic == ()
    volatile = {"software", "wall_seconds", "parent_uri"}
    as_it_was = {name: value for name, value in fields.items() if name not in volatile}
    assert old.content_hash == digest(as_it_was)
    path.unlink()
    for entry in (tmp_path / "synth/shards").glob("*.entry.json"):
        entry.write_text(json.dumps({**json.loads(entry.read_text()), "arithmetic": None}))
    assert len(open_synth(config).shards) == 3


def test_another_config_is_refused_with_both_hashes(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    old, new = make_config(tmp_path), make_config(tmp_path, synth={"max_prompts": 7})
    for state in ("begun", "finished"):
        open_synth(old) if state == "begun" else finish_synth(old, contract)
        problem = f"holds {state} work for another config: "
        with pytest.raises(StageConflict, match=problem) as caught:
            open_synth(new)
        message = str(caught.value)
        assert all(config.section_hash("synth")[:16] in message for config in (old, new))
        assert "--force" in message and "run.uri=" in message
        assert "parent" not in message.split("(fix")[0]
    assert read_manifest(str(tmp_path), "synth").config_hash == old.section_hash("synth")


def test_another_parent_is_refused_with_both_hashes(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    config = make_config(tmp_path)
    parent = finish_synth(config, contract)
    changed = parent.model_copy(update={"rejected": {}})
    open_stage(config, "features", parent)
    with pytest.raises(StageConflict, match="holds begun work for another parent: ") as caught:
        open_stage(config, "features", changed)
    hashes = parent.content_hash[:16], changed.content_hash[:16]
    assert all(value in str(caught.value) for value in hashes)


def test_force_discards_other_work_and_keeps_equal_work(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    finish_synth(make_config(tmp_path), contract)
    assert open_synth(make_config(tmp_path, force=True)).manifest is not None
    (tmp_path / "synth/extra").mkdir()
    (tmp_path / "synth/extra/file").write_text("x")
    stage_run = open_synth(make_config(tmp_path, force=True, synth={"max_prompts": 7}))
    assert stage_run.manifest is None and stage_run.shards == {}
    files = [path.name for path in (tmp_path / "synth").rglob("*") if path.is_file()]
    assert files == ["begin.json"]


@pytest.mark.parametrize("steps", range(4))
def test_an_interrupted_force_never_looks_complete_or_mixes_works(
    tmp_path: Path,
    make_config: Configs,
    contract: TargetContract,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish_synth(make_config(tmp_path), contract)
    calls = iter(range(100))
    for name in ("delete", "delete_tree"):
        original = getattr(Location, name)

        def stopping(
            self: Location, *arguments: str, original: Callable[..., None] = original
        ) -> None:
            if next(calls) == steps:
                raise KeyboardInterrupt
            original(self, *arguments)

        monkeypatch.setattr(Location, name, stopping)
    other = {"synth": {"max_prompts": 7}}
    with pytest.raises(KeyboardInterrupt):
        open_synth(make_config(tmp_path, force=True, **other))
    monkeypatch.undo()

    manifest = find_manifest(str(tmp_path), "synth")
    for shard in manifest.shards if manifest else ():
        verify_shard(stage_location(str(tmp_path), "synth"), shard)
    stage_run = open_synth(make_config(tmp_path, force=True, **other))
    assert stage_run.manifest is None and stage_run.shards == {}


def test_shards_of_unknown_work_are_never_picked_up(tmp_path: Path, make_config: Configs) -> None:
    """As left by a `--force` that was killed between the manifest and the shards."""
    stage_run = open_synth(make_config(tmp_path))
    stage_run.commit("00000.bin", b"of the old config", rows=1, tokens=1)
    stage_run.location.delete("begin.json")
    other = make_config(tmp_path, synth={"max_prompts": 7})
    for _ in range(2):  # the first writes a begin.json, which must not adopt them for the second
        assert open_synth(other).shards == {}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("truncate", "has 60 bytes, 100 were committed"),
        ("flip", "has SHA-256 .*… was committed"),
        ("remove", "the file is missing"),
    ],
)
def test_damaged_shards_are_named(
    tmp_path: Path,
    make_config: Configs,
    contract: TargetContract,
    damage: str,
    problem: str,
    finished: bool,
) -> None:
    config = make_config(tmp_path)
    manifest = finish_synth(config, contract)
    path = tmp_path / "synth/shards/00001.bin"
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:60] if damage == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    location = stage_location(str(tmp_path), "synth")
    named = rf"synth/shards/00001\.bin: {problem} \(fix: .*eagle3 synth --force"
    for check in (verify_shard, read_shard):
        check(location, manifest.shards[0])
        with pytest.raises(CorruptShard, match=named):
            check(location, manifest.shards[1])
    if not finished:
        location.delete("manifest.json")
    if finished and damage == "flip":
        return  # a complete stage is recognised by sizes; the next one checks sums as it reads
    with pytest.raises(CorruptShard, match=named):
        open_synth(config)


def test_force_makes_a_damaged_stage_again(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    before = finish_synth(make_config(tmp_path), contract)
    path = tmp_path / "synth/shards/00002.bin"
    path.write_bytes(b"\0" * 100)
    assert open_synth(make_config(tmp_path)).manifest is not None
    after = finish_synth(make_config(tmp_path, force=True), contract)
    assert after.content_hash == before.content_hash and path.read_bytes() == b"\2" * 100


@pytest.mark.parametrize("text", ["{", "[]", '{"shard": {"name": "a"}, "seconds": 1}'])
def test_a_broken_entry_is_named(tmp_path: Path, make_config: Configs, text: str) -> None:
    stage_run = open_synth(make_config(tmp_path))
    stage_run.commit("00000.bin", b"data", rows=1, tokens=1)
    entry = tmp_path / "synth/shards/00000.bin.entry.json"
    entry.write_text(text)
    message = r"00000\.bin\.entry\.json: not a shard's entry: .*fix: delete it"
    with pytest.raises(CorruptShard, match=message):
        open_synth(make_config(tmp_path))
    entry.unlink()
    assert open_synth(make_config(tmp_path)).shards == {}


def test_an_entry_of_another_file_is_named(tmp_path: Path, make_config: Configs) -> None:
    open_synth(make_config(tmp_path)).commit("00000.bin", b"data", rows=1, tokens=1)
    shards = tmp_path / "synth/shards"
    (shards / "00000.bin.entry.json").rename(shards / "00001.bin.entry.json")
    with pytest.raises(CorruptShard, match=r"00001\.bin\.entry\.json: is the entry of 00000\.bin"):
        open_synth(make_config(tmp_path))


def test_unreadable_manifests_are_named(
    tmp_path: Path, make_config: Configs, contract: TargetContract
) -> None:
    config = make_config(tmp_path)
    finish_synth(config, contract)
    path = tmp_path / "synth/manifest.json"
    fields = json.loads(path.read_text())
    changes: list[dict[str, Any]] = [
        {"schema_version": SCHEMA_VERSION + 1},
        {"schema_version": OLDEST_SCHEMA - 1},
        {"surprise": 1},
        {"stage": "train"},
    ]
    newer, older, surprise, train = (json.dumps({**fields, **change}) for change in changes)
    cases = [
        ("{", CorruptShard, "not JSON"),
        ("[]", CorruptShard, "not a JSON object"),
        (newer, StoreError, f"schema_version: schema_version {SCHEMA_VERSION + 1} is newer"),
        (older, StoreError, f"schema_version: schema_version {OLDEST_SCHEMA - 1} is older"),
        (surprise, CorruptShard, "surprise: not a manifest"),
        (train, CorruptShard, "stage: is the manifest of train"),
    ]
    for text, error, problem in cases:
        path.write_text(text)
        for call in (lambda: read_manifest(str(tmp_path), "synth"), lambda: open_synth(config)):
            with pytest.raises(error, match=rf"manifest\.json: {problem}"):
                call()
    # --force never throws away the work of a newer version.
    path.write_text(newer)
    with pytest.raises(StoreError, match="is newer"):
        open_synth(make_config(tmp_path, force=True))


def test_contracts_differ_by_their_first_field(contract: TargetContract) -> None:
    moved = contract.model_copy(update={"source": "elsewhere", "revision": "abc"})
    match_contracts(contract, moved, where="features")
    other = contract.model_copy(update={"capture_layers": (2, 4, 5), "parameters": 7})
    both = r"capture_layers \[2,4,5\], this one has \[1,3,4\]"
    with pytest.raises(ContractMismatch, match=rf"features: contract\.capture_layers: .*{both}"):
        match_contracts(contract, other, where="features")


def test_a_full_disk_leaves_nothing_that_looks_committed(
    mount: Callable[[str], Path], make_config: Configs
) -> None:
    point = mount("size=256k")
    config = make_config(point / "run")
    stage_run = open_synth(config)
    kept = stage_run.commit("00000.bin", bytes(1000), rows=1, tokens=1)
    fix = "free some space and run the same command again"
    with pytest.raises(StoreError, match=rf"shards/00001\.bin: no space left \(fix: {fix}"):
        stage_run.commit("00001.bin", bytes(1 << 20), rows=1, tokens=1)
    assert open_synth(config).shards == {"00000.bin": kept}
    assert find_manifest(str(point / "run"), "synth") is None


def test_a_read_only_run_directory_is_refused_at_once(
    mount: Callable[[str], Path], make_config: Configs
) -> None:
    with pytest.raises(StoreError, match=r"begin\.json: the file system is read-only"):
        open_synth(make_config(mount("size=64k,ro") / "run"))
