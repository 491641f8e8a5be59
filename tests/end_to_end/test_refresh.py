"""`eagle3 refresh`: an earlier head goes on as one for the target after its fine-tune."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.api import read_samples
from pipeline.cli import main
from pipeline.heads.registry import load_head
from pipeline.reports import EvalReport
from pipeline.serve_eval.compare import compare_reports
from pipeline.store.manifest import read_manifest
from tests.end_to_end.conftest import config_file
from tests.forked import kill_at

Fails = Callable[..., str]
#: Every file of a directory: its bytes' hash, and when they were written.
Files = dict[str, tuple[str, int]]


def files_of(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tune(target: Path, directory: Path) -> None:
    """What a fine-tune leaves: the same files, other weights."""
    shutil.copytree(target, directory)
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.yaml, the trained run `old`, and the target `tuned`."""
    folder = tmp_path_factory.mktemp("refresh")
    prompts = {"source": str(folder / "prompts.jsonl"), "limit": 10}
    config_file(
        tiny_target,
        folder,
        train={"epochs": 2},
        eval={"sources": [prompts], "hf_prompts": 0, "shapes": [], "tree": "auto"},
    )
    for stage in ("synth", "features", "train"):
        assert main([stage, "-c", str(folder / "run.yaml"), f"run.uri={folder / 'old'}"]) == 0
    tune(tiny_target, folder / "tuned")
    return folder


def words(folder: Path, uri: str = "new", *more: str) -> list[str]:
    """The command after its name."""
    places = {"run.uri": uri, "target.source": "tuned", "refresh.run": "old"}
    overrides = [f"{key}={folder / name}" for key, name in places.items()]
    return ["-c", str(folder / "run.yaml"), *overrides, "synth.share=0.6", *more]


@pytest.fixture(scope="module")
def refreshed(folder: Path) -> tuple[Path, Files]:
    """The new run, and what the old one was before it."""
    before = files_of(folder / "old")
    assert main(["refresh", *words(folder)]) == 0
    return folder / "new", before


def test_the_old_head_goes_on_and_nothing_of_its_run_is_written(
    folder: Path, refreshed: tuple[Path, Files]
) -> None:
    new, before = refreshed
    assert files_of(folder / "old") == before
    (old_head, _), (head, card), (scratch, scratch_card) = (
        load_head(run / "train/head") for run in (folder / "old", new, new / "scratch")
    )
    assert torch.equal(head.d2t, old_head.d2t) and torch.equal(head.t2d, old_head.t2d)
    assert head.shape == old_head.shape == scratch.shape
    assert not torch.equal(scratch.d2t, old_head.d2t), "other replies, other frequent tokens"
    weights = (folder / "old/train/head/model.safetensors").read_bytes()
    assert card.provenance["start_from"]["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    old = read_manifest(str(folder / "old"), "train")
    assert card.provenance["start_from"]["manifest"] == old.content_hash
    assert "start_from" not in scratch_card.provenance
    assert card.contract == scratch_card.contract != old.contract

    samples, earlier = list(read_samples(str(new))), list(read_samples(str(folder / "old")))
    synth = read_manifest(str(new), "synth")
    assert {each.sample_id for each in samples} < {each.sample_id for each in earlier}
    assert synth.rejected == {"share": 24 - len(samples)} and 8 < len(samples) < 22
    same = {each.sample_id: each.token_ids for each in earlier}
    assert any(each.token_ids != same[each.sample_id] for each in samples), "answered anew"


def test_the_report_has_the_verdict_and_its_grounds(
    folder: Path, refreshed: tuple[Path, Files], tmp_path: Path
) -> None:
    new, _ = refreshed
    report = EvalReport.model_validate_json((new / "eval/report.json").read_bytes())
    figures = report.refresh
    assert figures is not None
    heads = figures.heads
    assert list(heads) == ["old", "refreshed", "scratch"]
    assert (heads["refreshed"].steps, heads["refreshed"].tokens) == (
        heads["scratch"].steps,
        heads["scratch"].tokens,
    ), "equal cost"
    assert 0 < heads["refreshed"].tokens < heads["old"].tokens
    for name, run in (("old", folder / "old"), ("refreshed", new), ("scratch", new / "scratch")):
        assert heads[name].manifest == read_manifest(str(run), "train").content_hash
        data = (run / "train/head/model.safetensors").read_bytes()
        assert heads[name].weights_sha256 == hashlib.sha256(data).hexdigest()
    assert figures.old_target == read_manifest(str(folder / "old"), "train").contract.fingerprint

    beside = {each.rival: each for each in report.comparisons}
    tau = {name: each.acceptance_length.value for name, each in heads.items()}
    assert beside["old"].difference.value == pytest.approx(tau["refreshed"] - tau["old"])
    assert beside["scratch"].difference.value == pytest.approx(tau["refreshed"] - tau["scratch"])
    between = figures.scratch_to_old
    assert between.difference.value == pytest.approx(tau["scratch"] - tau["old"])
    assert between.prompts == beside["old"].prompts == 10
    for page in ("report.html", "report.md"):
        text = (new / "eval" / page).read_text()
        assert figures.verdict in text and "scratch less old" in text

    # The same head by itself, through a stage and a comparison of its own.
    shape = report.settings.tree or (report.unused_tree and report.unused_tree.tree)
    assert shape is not None
    alone = [
        f"run.uri={tmp_path / 'alone'}",
        f"target.source={folder / 'tuned'}",
        f"eval.head={new / 'scratch/train/head'}",
        f"eval.tree={shape.model_dump_json()}",
    ]
    assert main(["eval", "-c", str(folder / "run.yaml"), *alone]) == 0
    scratch = EvalReport.model_validate_json((tmp_path / "alone/eval/report.json").read_bytes())
    assert scratch.acceptance_length == pytest.approx(tau["scratch"])
    if report.settings.tree is not None:
        assert compare_reports(report, scratch, where="alone").difference == (
            beside["scratch"].difference
        )


def test_once_more_nothing_changes_and_every_byte_is_vouched_for(
    folder: Path, refreshed: tuple[Path, Files], capsys: pytest.CaptureFixture[str]
) -> None:
    new, _ = refreshed
    before = files_of(new)
    assert main(["refresh", *words(folder)]) == 0
    assert capsys.readouterr().out.count("complete") == 5
    assert files_of(new) == before
    for run in (new, new / "scratch"):
        assert main(["verify", str(run)]) == 0
    capsys.readouterr()
    shards = next((new / "features/shards").glob("*.safetensors")), new / "features/manifest.json"
    held = [path.rename(path.with_name(f"{path.name}.away")) for path in shards[1:]]
    assert main(["verify", str(new / "scratch")]) == 2
    assert "was made from features" in capsys.readouterr().err
    held[0].rename(shards[1])


def test_a_rival_that_was_trained_anew_is_another_one(
    folder: Path,
    refreshed: tuple[Path, Files],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(refreshed[0], copy)
    shutil.rmtree(copy / "eval")
    short = [f"run.uri={copy}", "eval.max_prompts=8", "eval.max_new_tokens=4"]
    assert main(["eval", *words(folder, "copy", *short)]) == 0
    scratch = [
        f"run.uri={copy / 'scratch'}",
        f"target.source={folder / 'tuned'}",
        f"train.states={copy}",
        "train.learning_rate=0.01",
        "train.max_steps=1",
    ]
    assert main(["train", "-c", str(folder / "run.yaml"), *scratch, "--force"]) == 0
    capsys.readouterr()
    assert main(["eval", *words(folder, "copy", *short)]) == 2
    assert "another config: eval.compare.scratch" in capsys.readouterr().err


def test_a_plan_shows_both_trainings_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["refresh", *words(folder, "planned"), "--plan"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("eagle3 train --plan") == 2 and "all stages" in shown
    assert not (folder / "planned").exists()


#: What must exist before the kill: something of the stage is on disk, but it is not finished.
MOMENTS = [
    "synth/shards/*.entry.json",
    "features/shards/*.entry.json",
    "train/checkpoints/step-*",
    "scratch/train/checkpoints/step-*",
    "eval/begin.json",
]


def test_killed_in_every_stage_it_ends_with_the_same_heads(
    folder: Path, refreshed: tuple[Path, Files]
) -> None:
    new, before = refreshed
    cut = folder / "cut"
    more = ["train.checkpoint_every=2"]
    for moment in MOMENTS:
        command = ["refresh", *words(folder, "cut", *more)]
        printed = kill_at(cut, moment, command, folder / "printed")
        stage = moment.partition("/train" if "scratch" in moment else "/")[0]
        manifest = cut / stage / ("train/manifest.json" if stage == "scratch" else "manifest.json")
        assert not manifest.exists(), f"killed too late to prove anything: {moment} {printed}"
    assert main(["refresh", *words(folder, "cut", *more)]) == 0
    for run, whole in ((cut, new), (cut / "scratch", new / "scratch")):
        ours, theirs = (read_manifest(str(each), "train") for each in (run, whole))
        assert ours.shards == theirs.shards and ours.content_hash == theirs.content_hash
    figures = [
        EvalReport.model_validate_json((each / "eval/report.json").read_bytes()).refresh
        for each in (cut, new)
    ]
    # τ rests on the tree, which `auto` picks by what takes how long at the moment.
    cost = [
        {name: head.model_dump(exclude={"acceptance_length"}) for name, head in each.heads.items()}
        for each in figures
        if each is not None
    ]
    assert len(cost) == 2 and cost[0] == cost[1]
    assert files_of(folder / "old") == before


@pytest.fixture
def fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Fails:
    """Run a refresh that must fail cleanly, with nothing written; returns its one error line."""
    monkeypatch.setattr("pipeline.cli.run", lambda *_: pytest.fail("a stage has begun"))

    def run(*more: str, code: int = 2, command: str = "refresh") -> str:
        capsys.readouterr()
        assert main([command, *words(folder, "failed", *more)]) == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and "(fix: " in lines[0], lines
        assert not (folder / "failed").exists(), "nothing is paid for"
        return lines[0]

    return run


def test_the_same_weights(folder: Path, tiny_target: Path, fails: Fails, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    line = fails(f"target.source={copy}")
    assert f"target.source={copy}: has the weights that the head of {folder / 'old'}" in line
    assert "nothing to refresh" in line


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"hidden_size": 64}, "hidden_size 32, this one has 64"),
        ({"vocab_size": 328}, "vocab_size"),
        ({"num_hidden_layers": 7}, "num_layers 8, this one has 7"),
    ],
    ids=str,
)
def test_a_target_of_another_shape(
    tiny_target: Path, fails: Fails, tmp_path: Path, changed: dict[str, Any], field: str
) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    config = AutoConfig.from_pretrained(tiny_target)
    for name, value in changed.items():
        setattr(config, name, value)
    config.head_dim = config.hidden_size // config.num_attention_heads
    LlamaForCausalLM(config).save_pretrained(other)
    line = fails(f"target.source={other}")
    assert (
        f"train/manifest.json: contract.{field.split()[0]}: made for a target with {field}" in line
    )


def test_another_tokenizer_or_layers_that_do_not_exist(
    folder: Path, fails: Fails, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder / "tuned", other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "contract.tokenizer_hash: made for" in fails(f"target.source={other}")
    line = fails("target.capture_layers=[1,3,9]")
    assert "target.capture_layers: [1, 3, 9] do not name ascending layers" in line
    assert "contract.capture_layers: made for" in fails("target.capture_layers=[1,3,5]")


def test_an_adapter_is_refused_with_the_command_that_merges_it(
    fails: Fails, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    line = fails(f"target.source={adapter}")
    assert f"target.source={adapter}: adapter_config.json: is an adapter, not a model" in line
    assert f"M.from_pretrained('{adapter}', dtype='auto').merge_and_unload()" in line


def test_an_old_run_that_is_unfinished_or_damaged(
    folder: Path, fails: Fails, tmp_path: Path
) -> None:
    assert "stage train is not finished" in fails(f"refresh.run={tmp_path / 'nowhere'}")
    copy = tmp_path / "old"
    shutil.copytree(folder / "old", copy)
    (copy / "train/manifest.json").rename(tmp_path / "manifest.json")
    line = fails(f"refresh.run={copy}", code=75)
    assert f"{copy}/train/manifest.json: stage train has been begun and is not finished" in line
    (tmp_path / "manifest.json").rename(copy / "train/manifest.json")
    weights = copy / "train/head/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert f"{weights}: has {len(data)} bytes, SHA-256" in fails(f"refresh.run={copy}")


def test_settings_that_are_no_refresh(folder: Path, fails: Fails) -> None:
    assert "run.yaml: refresh: required but not set" in fails("refresh=null")
    line = fails(command="run")
    assert "run.yaml: refresh: is set" in line and "eagle3 refresh" in line
    line = fails(f"run.uri={folder}/./old")
    assert "run.uri and refresh.run are one run" in line
    line = fails("train.head_config.intermediate_size=null")
    assert "train.head_config.intermediate_size: a head from scratch has 48, the one of" in line
    line = fails("eval.max_prompts=7")
    assert "eval.sources: 7 prompts are decoded by both, a verdict needs 8" in line
    assert "a refresh starts from refresh.run" in fails("train.start_from=elsewhere")
    line = fails("eval.compare=[{name: old, drafter: {name: ngram}}]")
    assert "a refresh adds rivals old and scratch" in line


def test_other_prompts_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, told in (([], False), (["synth.max_prompts=20"], True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeline.cli.run", lambda *_: None)
            assert main(["refresh", *words(folder, "failed", *more)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("the prompts are not those of" in said) is told
        assert "60% of the prompts are answered" in said
