"""What lies beside a target's weights, and the target of a run when the run is verified."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import TargetSection
from pipeline.errors import ContractMismatch, TargetError
from pipeline.target.open import open_target, recheck_weights


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_target, tmp_path / "target")
    return tmp_path / "target"


def test_an_index_of_other_files_is_noticed(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_target(TargetSection(source=str(target)))
    assert "servers may load" not in capsys.readouterr().out
    name = "model-00001-of-00001.safetensors"
    shutil.copy(target / "model.safetensors", target / name)
    tree = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (target / "model.safetensors.index.json").write_text(json.dumps(tree))
    open_target(TargetSection(source=str(target)))
    assert f"names {name}, which servers may load instead" in capsys.readouterr().out


def test_an_adapter_counts_where_transformers_would_apply_it(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_target(TargetSection(source=str(target))).contract
    (target / "adapter_config.json").write_text("{}")
    find: Callable[..., object] = importlib.util.find_spec
    for peft in (False, True):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *a, peft=peft: (peft or None) if name == "peft" else find(name, *a),
        )
        if peft:
            with pytest.raises(TargetError, match=r"adapter_config\.json: is applied by transform"):
                open_target(TargetSection(source=str(target)))
        else:
            assert open_target(TargetSection(source=str(target))).contract == before


def test_the_target_of_a_contract_is_looked_at_where_it_is(target: Path) -> None:
    contract = open_target(TargetSection(source=str(target))).contract
    assert recheck_weights(contract, where="run") is None
    path = target / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ContractMismatch, match=r"run: contract\.fingerprint: made for a target"):
        recheck_weights(contract, where="run")
    for source in ("org/name", "package:no_such_package"):
        elsewhere = contract.model_copy(update={"source": source})
        assert source in str(recheck_weights(elsewhere, where="run"))
