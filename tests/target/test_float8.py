"""`eagle3 float8`: a target rounded to float8, as transformers and the decoder read it."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.cli import main
from pipeline.config import TargetSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.layer import Float8Rows
from pipeline.decoder.request import Request
from pipeline.target.open import open_target


@pytest.fixture(scope="module")
def rounded(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("float8") / "rounded"
    assert main(["float8", str(tiny_target), "--out", str(out)]) == 0
    return out


def test_every_matrix_of_a_layer_is_rounded_and_nothing_else(
    tiny_target: Path, rounded: Path
) -> None:
    stored, new = (load_file(each / "model.safetensors") for each in (tiny_target, rounded))
    assert stored.keys() == new.keys()
    matrices = 0
    for name, tensor in new.items():
        assert tensor.dtype == stored[name].dtype
        if not (tensor.dim() == 2 and ".layers." in name):
            assert torch.equal(tensor, stored[name]), name
            continue
        matrices += 1
        before, after = stored[name].double(), tensor.double()
        scale = 2.0 ** torch.ceil(torch.log2(before.abs().amax(1, keepdim=True) / 448))
        # torch's own cast, of every row in units of its scale.
        units = (before / scale).float().to(torch.float8_e4m3fn).double()
        assert torch.equal(after, units * scale), name
        assert not torch.equal(before, after)
    assert matrices == 7 * open_target(TargetSection(source=str(rounded))).contract.num_layers


def test_it_is_a_target_like_any_other_and_not_the_same(tiny_target: Path, rounded: Path) -> None:
    ours, theirs = (open_target(TargetSection(source=str(each))) for each in (rounded, tiny_target))
    assert ours.contract.fingerprint != theirs.contract.fingerprint
    assert ours.contract.tokenizer_hash == theirs.contract.tokenizer_hash
    assert ours.contract.chat_template_hash == theirs.contract.chat_template_hash


def test_templates_beside_the_default_one_are_copied(target_copy: Path, tmp_path: Path) -> None:
    named = Path("additional_chat_templates/tool_use.jinja")
    (target_copy / named).parent.mkdir()
    (target_copy / named).write_text("{{ tools }}")
    assert main(["float8", str(target_copy), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / named).read_text() == "{{ tools }}"


def test_the_decoder_says_what_transformers_generates(rounded: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(rounded, dtype=torch.float32)
    model = DecoderModel.load(
        rounded, (), device=torch.device("cpu"), dtype=torch.float32, max_length=100
    )
    for length in (1, 9, 40):
        ids = torch.arange(3, 3 + length)[None]
        settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        mask = torch.ones_like(ids)
        whole = hf.generate(ids, attention_mask=mask, pad_token_id=0, **settings)
        [done] = Engine(model).generate([Request("a", tuple(ids[0].tolist()), 24, ())])
        assert done.token_ids == tuple(whole[0, length:].tolist())


def test_rounding_again_changes_nothing(rounded: Path, tmp_path: Path) -> None:
    assert main(["float8", str(rounded), "--out", str(tmp_path / "again")]) == 0
    for file in rounded.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_what_float8_holds_is_found_and_nothing_else() -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 30, dtype=torch.bfloat16)
    assert Float8Rows.exactly(weight) is None
    rounded = Float8Rows.of(weight).widened()
    held = Float8Rows.exactly(rounded)
    assert held is not None and torch.equal(held.widened(), rounded)
    for dtype in (torch.float32, torch.float16):
        assert Float8Rows.exactly(rounded.to(dtype)) is not None
    rounded[13, 4] *= 1 + 2.0**-5  # behind the rows that are looked at first
    assert Float8Rows.exactly(rounded) is None


def test_what_cannot_be_written_is_one_line(
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A directory before anything is rounded."""

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert main(["float8", str(tiny_target), "--out", "/proc/none/new"]) == 2
    assert "error: --out /proc/none/new: cannot be written" in capsys.readouterr().err
    assert main(["float8", str(tiny_target), "--out", str(tmp_path / "new")]) == 2
    assert "model.safetensors: cannot be written: I/O error: No space" in capsys.readouterr().err
    monkeypatch.setattr("pipeline.exchange.float8._write", lambda *_: (0, 0))

    def no_room(*_: Any) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("pipeline.exchange.float8.shutil.copyfile", no_room)
    assert main(["float8", str(tiny_target), "--out", str(tmp_path / "new")]) == 2
    assert f"error: --out {tmp_path / 'new'}: cannot be written: File" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_refused(
    tiny_target: Path, rounded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["float8", str(tiny_target), "--out", str(rounded)]) == 2
    assert "is not empty" in capsys.readouterr().err
    spoiled = shutil.copytree(tiny_target, tmp_path / "spoiled")
    tensors = load_file(spoiled / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][1, 2] = float("nan")
    save_file(tensors, spoiled / "model.safetensors", {"format": "pt"})
    assert main(["float8", str(spoiled), "--out", str(tmp_path / "new")]) == 2
    printed = capsys.readouterr().err
    assert name in printed and "NaN" in printed
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps(config | {"model_type": "cohere"}))
    assert main(["float8", str(spoiled), "--out", str(tmp_path / "new")]) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["spoiled"], "nothing is left"
