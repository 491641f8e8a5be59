"""Every mistake of a user: one line with file, field and fix, exit code 2, nothing committed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main

Write = Callable[..., Path]
Fails = Callable[..., str]


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run a command that must fail cleanly; returns its one error line."""

    def run(stage: str, config: Path, *overrides: str, uri: str = "run") -> str:
        capsys.readouterr()
        assert main([stage, "-c", str(config), *overrides]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and "(fix: " in lines[0], lines
        assert not (tmp_path / uri / stage / "manifest.json").exists()
        return lines[0]

    return run


def test_unknown_key(write_config: Write, fails: Fails) -> None:
    line = fails("synth", write_config(), "synth.max_promts=3")
    assert "synth.max_promts: unknown key 'max_promts' (fix: did you mean 'max_prompts'?)" in line


def test_missing_files(write_config: Write, fails: Fails, tmp_path: Path) -> None:
    assert "no-such.yaml: no such file" in fails("synth", tmp_path / "no-such.yaml")
    missing = str(tmp_path / "no-such.jsonl")
    target = f"target.source={tmp_path / 'nowhere/model'}"
    assert "target.source" in fails("synth", write_config(), target)
    for key in ("sources", "exclude"):  # told before a target is read, or downloaded
        config = write_config(synth={key: [{"source": missing}]})
        assert missing in fails("synth", config, target)
    head = f"eval.head={tmp_path / 'nowhere/head'}"
    assert missing in fails("eval", write_config(), target, head, f"eval.prompts={missing}")


def test_a_broken_line_in_a_prompts_file(
    write_config: Write, fails: Fails, folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"turns": ["fine"], "license": "MIT"}\n{"turns": ["cut off\n')
    synth = {"sources": [{"source": str(broken)}]}
    assert f"{broken}:2" in fails("synth", write_config(synth=synth))
    overrides = [f"run.uri={tmp_path / 'e'}", f"eval.head={folder / 'run/train/head'}"]
    overrides.append(f"eval.prompts={broken}")
    assert f"{broken}:2" in fails("eval", folder / "run.yaml", *overrides, uri="e")


def test_a_target_without_a_chat_template(
    write_config: Write, fails: Fails, tiny_target: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base-model"
    shutil.copytree(tiny_target, base)
    (base / "chat_template.jinja").unlink()
    line = fails("synth", write_config(), f"target.source={base}")
    where = f"target.source={base}, tokenizer_config.json"
    assert f"{where}: the target's tokenizer has no chat template" in line


@pytest.mark.parametrize("layers", ["[1, 3, 8]", "[4, 3, 1]", "[-1, 2, 3]"])
def test_capture_layers_that_do_not_exist(write_config: Write, fails: Fails, layers: str) -> None:
    line = fails("synth", write_config(), f"target.capture_layers={layers}")
    assert f"target.capture_layers: {layers} do not name ascending layers" in line


def test_a_head_or_data_of_another_target(fails: Fails, folder: Path, tmp_path: Path) -> None:
    config = folder / "run.yaml"
    other = ["target.capture_layers=[1,2,5]", f"run.uri={tmp_path / 'other'}"]
    head = folder / "run/train/head"
    line = fails("eval", config, *other, f"eval.head={head}", uri="other")
    where = f"head {head}: contract.capture_layers"
    problem = "made for a target with capture_layers [1,3,4], this one has [1,2,5]"
    assert f"{where}: {problem}" in line
    shutil.copytree(folder / "run/synth", tmp_path / "other/synth")
    shutil.rmtree(tmp_path / "other/eval", ignore_errors=True)
    line = fails("features", config, *other, uri="other")
    assert "contract.capture_layers: made for a target with" in line


def test_no_head(write_config: Write, fails: Fails, tmp_path: Path) -> None:
    assert "stage train is not finished" in fails("eval", write_config())
    assert "has no config.json" in fails("eval", write_config(), f"eval.head={tmp_path}")


def test_settings_of_training_that_contradict_each_other(
    write_config: Write, fails: Fails, folder: Path, tmp_path: Path
) -> None:
    line = fails("train", write_config(), "train.evaluate_tree=auto")
    assert "train.evaluate_tree: auto is only supported by eval.tree" in line
    config, head = folder / "run.yaml", folder / "run/train/head"
    shutil.copytree(folder / "run/features", tmp_path / "other/features")
    other = f"run.uri={tmp_path / 'other'}"
    smaller = [f"train.start_from={head}", "train.head_config.draft_vocab_size=100"]
    line = fails("train", config, other, *smaller, uri="other")
    problem = "100 is configured, but the head that training starts from has 200"
    assert f"train.head_config.draft_vocab_size: {problem} ({head})" in line
    held_out = ["train.evaluate_every=2", "train.evaluate_prompts=99", "--force"]
    line = fails("train", config, other, *held_out, uri="other")
    assert "train.evaluate_prompts: 99 samples cannot be held out" in line


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damaged_shards(write_config: Write, fails: Fails, tmp_path: Path, damage: str) -> None:
    config = write_config()
    assert main(["synth", "-c", str(config)]) == 0
    assert main(["features", "-c", str(config)]) == 0
    for stage, parent in (("train", "features"), ("features", "synth")):
        shutil.rmtree(tmp_path / "run" / stage, ignore_errors=True)
        files = sorted((tmp_path / "run" / parent / "shards").iterdir())
        shard = [path for path in files if path.suffix != ".json"][1]
        data = shard.read_bytes()
        middle = len(data) // 2
        if damage == "missing":
            shard.unlink()
        elif damage == "truncated":
            shard.write_bytes(data[:middle])
        else:
            shard.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        assert shard.name in fails(stage, config)
        shard.write_bytes(data)


def test_a_read_only_run_directory(
    write_config: Write, fails: Fails, mount: Callable[[str], Path]
) -> None:
    assert "read-only" in fails("synth", write_config(), f"run.uri={mount('ro')}/run").lower()


def test_a_full_run_directory(
    write_config: Write, fails: Fails, mount: Callable[[str], Path]
) -> None:
    disk = mount("size=16k")
    assert "no space left" in fails("synth", write_config(), f"run.uri={disk}/run").lower()
    assert not list(disk.rglob("manifest.json"))


def test_a_parent_that_changed(write_config: Write, fails: Fails, tmp_path: Path) -> None:
    config = write_config()
    assert main(["synth", "-c", str(config)]) == 0
    assert main(["features", "-c", str(config)]) == 0
    assert main(["synth", "-c", str(config), "synth.max_prompts=8", "--force"]) == 0
    manifest = tmp_path / "run/features/manifest.json"
    before = json.loads(manifest.read_text())
    assert main(["features", "-c", str(config)]) == 2
    assert json.loads(manifest.read_text()) == before, "the old stage is left as it was"
