"""A damaged head directory is one line that names file, field and fix, whatever opens it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline import cli
from pipeline.errors import HeadError
from pipeline.exchange.imports import import_head
from pipeline.heads.registry import open_head
from tests.heads.conftest import CARD, CONFIG, WEIGHTS, edit, rewrite
from tests.heads.test_fields import HeadOf, head_of, opened, target

__all__ = ["head_of", "target"]

Damage = Callable[[Path], object]


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(directory: Path) -> None:
        rewrite(directory, lambda tensors: tensors.update({name: change(tensors[name])}))

    return damage


def _poke(value: float) -> Callable[[Tensor], Tensor]:
    def poke(tensor: Tensor) -> Tensor:
        tensor.flatten()[-1] = value
        return tensor

    return poke


def _card(**fields: Any) -> Damage:
    def damage(directory: Path) -> None:
        body = json.loads((directory / CARD).read_text())
        for name, value in fields.items():
            section, _, field = name.partition("__")
            if field:
                body[section][field] = value
            else:
                body[section] = value
        (directory / CARD).write_text(json.dumps(body))

    return damage


def _text(name: str, text: str) -> Damage:
    return lambda directory: (directory / name).write_text(text)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


#: name → (what is done to a directory of ours, what is said)
DAMAGE: dict[str, tuple[Damage, str]] = {
    "nan": (_tensor("fc.weight", _poke(float("nan"))), "fc.weight holds NaN or infinity in 1 of"),
    "infinity": (_tensor("norm.weight", _poke(float("-inf"))), "norm.weight holds NaN or infinity"),
    "fp8": (
        _tensor("fc.weight", lambda tensor: tensor.float().to(torch.float8_e4m3fn)),
        "fc.weight is float8_e4m3fn",
    ),
    "int8": (_tensor("lm_head.weight", lambda tensor: tensor.char()), "lm_head.weight is int8"),
    "float64": (_tensor("fc.weight", lambda tensor: tensor.double()), "fc.weight is float64"),
    "d2t-outside": (_tensor("d2t", _poke(10**9)), "d2t leads outside the vocabulary of"),
    "d2t-below": (_tensor("d2t", lambda d2t: d2t - 500), "d2t leads outside the vocabulary of"),
    "d2t-twice": (_tensor("d2t", lambda d2t: d2t.clone().fill_(5)), "d2t and t2d do not name"),
    "d2t-bfloat16": (_tensor("d2t", lambda d2t: d2t.bfloat16()), "d2t is bfloat16, not whole"),
    "d2t-fraction": (_tensor("d2t", lambda d2t: d2t + 0.5), "d2t is float32, not whole numbers"),
    "t2d-two": (_tensor("t2d", lambda t2d: t2d.long() * 2), "t2d holds other values than 0 and 1"),
    "t2d-short": (_tensor("t2d", lambda t2d: t2d[:-1].clone()), "t2d is ["),
    "missing": (
        lambda directory: rewrite(directory, lambda tensors: tensors.pop("norm.weight")),
        "has no tensor norm.weight",
    ),
    "surplus": (
        lambda directory: rewrite(
            directory, lambda tensors: tensors.update({"fc.bias": torch.zeros(32)})
        ),
        "no place for: fc.bias",
    ),
    "shape": (_tensor("fc.weight", lambda tensor: tensor[:, :-1].clone()), "fc.weight is [32, 95]"),
    "empty": (lambda directory: (directory / WEIGHTS).write_bytes(b""), "cannot be read"),
    "cut": (lambda directory: _cut(directory / WEIGHTS), "model.safetensors: cannot be read"),
    "no-header": (lambda directory: (directory / WEIGHTS).write_bytes(b"\xff" * 64), "cannot be r"),
    "header": (
        lambda directory: (directory / WEIGHTS).write_bytes((5).to_bytes(8, "little") + b"{...}"),
        "cannot be read",
    ),
    "header-list": (
        lambda directory: (directory / WEIGHTS).write_bytes((2).to_bytes(8, "little") + b"[]"),
        "cannot be read",
    ),
    "pickle": (
        lambda directory: (directory / WEIGHTS).rename(directory / "pytorch_model.bin"),
        "has no model.safetensors",
    ),
    "no-config": (lambda directory: (directory / CONFIG).unlink(), "has no config.json"),
    "no-card": (lambda directory: (directory / CARD).unlink(), "has no eagle3.json"),
    "no-object": (_text(CONFIG, "[]"), "config.json: is no JSON object"),
    "no-json": (_text(CONFIG, "{"), "config.json: cannot be read"),
    "no-text": (lambda directory: (directory / CONFIG).write_bytes(b"\xff\xfe"), "cannot be read"),
    "unknown": (lambda directory: edit(directory, alpha=2), "alpha is 2: not a field"),
    "string": (lambda directory: edit(directory, rms_norm_eps="1e-5"), "rms_norm_eps is '1e-5'"),
    "null": (
        lambda directory: edit(directory, max_position_embeddings=None),
        "lacks max_position_embeddings",
    ),
    "card-empty": (_text(CARD, "{}"), "eagle3.json: lacks contract"),
    "card-list": (_text(CARD, "[]"), "eagle3.json: is no JSON object"),
    "card-provenance": (_card(provenance=[]), "provenance is [], not an object"),
    "card-metrics": (_card(metrics=None), "metrics is None, not an object"),
    "card-contract": (_card(contract="x"), "contract is 'x', not an object"),
    "card-field": (_card(contract__hidden_size="wide"), "contract.hidden_size is 'wide'"),
    "card-other": (_card(contract__nothing=1), "contract.nothing is 1"),
    "card-parameters": (_card(contract__parameters=0), "contract.parameters is 0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_opening_names_the_damage(name: str, own: Path) -> None:
    damage, message = DAMAGE[name]
    damage(own)
    with pytest.raises(HeadError) as raised:
        open_head(str(own))
    assert message in str(raised.value) and str(own) in str(raised.value)
    assert raised.value.fix and raised.value.exit_code == 2


#: What every command is tried on: a field, a tensor, the map, the card.
SEEN = ("nan", "fp8", "d2t-outside", "shape", "no-json", "unknown", "null", "card-field")


@pytest.mark.parametrize("name", SEEN)
def test_every_command_says_so_in_one_line(
    name: str,
    own: Path,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage, message = DAMAGE[name]
    damage(own)
    (tmp_path / "p.jsonl").write_text('{"id": "a", "turns": ["Hello?"], "license": "MIT"}\n')
    body = {
        "run": {"uri": str(tmp_path / "run")},
        "target": {"source": str(tiny_target), "device": "cpu"},
        "synth": {"sources": [{"source": str(tmp_path / "p.jsonl")}]},
        "eval": {"head": str(own), "prompts": str(tmp_path / "p.jsonl")},
    }
    config = str(tmp_path / "run.yaml")
    Path(config).write_text(json.dumps(body))
    out = str(tmp_path / "out")
    for argv in (
        ["inspect", str(own)],
        ["export", str(own), "--format", "sglang", "--out", out],
        ["export", str(own), "--format", "speculators", "--out", out],
        ["import", str(own), "--target", str(tiny_target), "--out", out],
        ["eval", "-c", config],
        ["serve", "-c", config, "--port", "0"],
    ):
        capsys.readouterr()
        assert cli.main(argv) == 2, argv
        errors = capsys.readouterr().err
        (line,) = (line for line in errors.splitlines() if line.startswith("error: "))
        assert message in line and "(fix: " in line and "Traceback" not in errors, (argv, errors)
    assert not Path(out).exists()


@pytest.mark.parametrize("kind", ["sglang", "speculators", "chained", "mtp", "dflash", "dspark"])
@pytest.mark.parametrize("name", ["nan", "int8", "d2t-outside", "d2t-below"])
def test_heads_of_every_kind(kind: str, name: str, head_of: HeadOf, tiny_target: Path) -> None:
    damage, message = DAMAGE[name]
    directory = head_of(kind)
    if kind in ("chained", "mtp"):  # it has no fc; lm_head is the target's
        first = "mtp_layers.0.input_proj.weight" if kind == "chained" else ""
        first = first or "model.mtp_layers.0.input_proj.weight"
        damage = {"nan": _tensor(first, _poke(float("nan")))}.get(name, damage)
        message = message.replace("fc.weight", first)
    damage(directory)
    with pytest.raises(HeadError) as raised:
        opened(kind, directory, tiny_target)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", ["sglang", "speculators", "mtp", "dflash", "dspark"])
def test_t2d_of_another_trainer_s_head_follows_from_d2t(
    kind: str, head_of: HeadOf, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ModelOpt leaves it out. What d2t itself gets wrong is still refused."""
    directory = head_of(kind)
    rewrite(directory, lambda tensors: tensors.pop("t2d"))
    if (directory / CARD).is_file():
        with pytest.raises(HeadError, match="has no tensor t2d"):
            open_head(str(directory))
        with pytest.raises(HeadError, match="has no tensor t2d"):
            import_head(str(directory), target=str(tiny_target), out=f"{directory}.imported")
        (directory / CARD).unlink()
    head = opened(kind, directory, tiny_target)
    expected = torch.arange(head.shape.draft_vocab_size) * 3 + 5
    assert torch.equal(head.target_ids(), expected)
    assert torch.equal(head.t2d.nonzero().flatten(), expected)
    assert "t2d is missing: made from d2t" in "".join(capsys.readouterr())
    # The last row: the token of the row before it, one outside.
    for offset, message in ((192, "do not name the same"), (10**9, "leads outside")):
        _tensor("d2t", _poke(offset))(directory)
        with pytest.raises(HeadError, match=message):
            opened(kind, directory, tiny_target)


def test_a_larger_head_than_its_file_is_not_allocated(own: Path) -> None:
    """Shapes are compared before a tensor is made: these would be gigabytes."""
    edit(own, intermediate_size=2**24, max_position_embeddings=2**40)
    with pytest.raises(HeadError, match=r"where config\.json asks for"):
        open_head(str(own))


def test_a_shard_s_name_stays_in_the_directory(own: Path, tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"fc.weight": "../outside.safetensors"}}
    (own / WEIGHTS).unlink()
    (own / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (own / CARD).unlink()
    with pytest.raises(HeadError, match="outside"):
        opened("sglang", own, tmp_path)
