"""`eagle3 inspect`, `export` and `import` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline import cli
from pipeline.console import console
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from pipeline.records import TargetContract
from tests.heads.conftest import METRICS, PROVENANCE, VD


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a failing command leaves, without its `error: `."""
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "(fix: " in line
    return line.removeprefix("error: ")


def test_json_for_machines(
    own: Path, head: Eagle3Head, contract: TargetContract, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(own), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["contract"] == contract.model_dump(mode="json")
    assert printed["provenance"] == PROVENANCE and printed["metrics"] == METRICS
    parameters = head.count_parameters()
    assert printed["parameters"] == parameters
    assert printed["share_of_target"] == pytest.approx(parameters / contract.parameters)
    assert printed["draft_vocabulary"] == {
        "size": VD,
        "of": contract.vocab_size,
        "share": pytest.approx(VD / contract.vocab_size),
        "coverage": 0.93,
    }
    described = {
        tensor["name"]: (tensor["shape"], tensor["dtype"], tensor["bytes"])
        for tensor in printed["tensors"]
    }
    stored = load_file(own / "model.safetensors")
    assert described.keys() == stored.keys()
    spelled = {"torch.bfloat16": "BF16", "torch.int64": "I64", "torch.bool": "BOOL"}
    for name, tensor in stored.items():
        assert described[name] == (list(tensor.shape), spelled[str(tensor.dtype)], tensor.nbytes)


def test_tables_for_people(
    own: Path,
    contract: TargetContract,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_width", 200)  # as wide as it takes to fold no line
    assert cli.main(["inspect", str(own)]) == 0
    text = capsys.readouterr().out
    for part in (
        str(own),
        "% of the target's",
        f"{VD:,} of",
        "93.00% of the supervised tokens",
        contract.fingerprint,
        "a.jsonl: 3",
        "MIT: 3",
        'synth: {"pii": 1}',
        "midlayer.self_attn.q_proj.weight",
        "32 × 64",
        "accuracy_0",
    ):
        assert part in text, part


@pytest.mark.parametrize("where", ["file", "memory"])
def test_uris(where: str, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"file://{own}"
    if where == "memory":
        uri = "memory://inspect/head"
        assert cli.main(["export", str(own), "--format", "sglang", "--out", uri]) == 0
        capsys.readouterr()
    assert cli.main(["inspect", uri, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == METRICS


def test_what_is_no_head_is_said_in_one_line(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(head: Path | str) -> str:
        return error_of(capsys, "inspect", str(head))

    missing = error(tmp_path / "nowhere")
    assert "has no config.json, model.safetensors, eagle3.json" in missing
    assert "has no config.json" in error("memory://inspect/nowhere")
    (own / "eagle3.json").unlink()
    line = error(own)
    assert "has no eagle3.json" in line and "eagle3 import" in line


def test_out_may_be_here(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["export", str(own), "--format", "sglang", "--out", "."]) == 0
    written = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert written == ["README.md", "config.json", "eagle3.json", "model.safetensors"]


def test_there_and_back(
    own: Path,
    head: Eagle3Head,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, there, back = str(tiny_target), str(tmp_path / "there"), str(tmp_path / "back")
    assert cli.main(["export", str(own), "--format", "speculators", "--out", there]) == 0
    assert cli.main(["import", there, "--target", target, "--out", back]) == 0
    assert load_head(Path(back))[0].shape == head.shape
    capsys.readouterr()
    nowhere, new = str(tmp_path / "nowhere"), str(tmp_path / "new")
    for problem, argv in (
        ("is not empty", ("import", there, "--target", target, "--out", back)),
        ("no such directory", ("import", there, "--target", "./nowhere", "--out", new)),
        ("has no config.json", ("import", nowhere, "--target", target, "--out", new)),
        ("has no config.json", ("export", nowhere, "--format", "sglang", "--out", new)),
    ):
        assert problem in error_of(capsys, *argv)
    assert not (tmp_path / "new").exists()
