"""Where targets come from, what they are, and how mistakes are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipeline.config import TargetSection
from pipeline.errors import ContractMismatch, TargetError
from pipeline.records import TargetContract, match_contracts
from pipeline.target.open import open_target, resolve


def _contract(directory: Path) -> TargetContract:
    return open_target(TargetSection(source=str(directory), dtype="float32")).contract


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("/no/such/dir", "no such directory"),
        ("./no/such", "no such directory"),
        ("no-such.gguf", "no such GGUF file"),
        ("package:no_such_package", "no such pip package"),
        ("package:rich", "carries 0 GGUF files"),
    ],
)
def test_sources_that_do_not_exist(source: str, problem: str) -> None:
    with pytest.raises(TargetError, match=rf"target\.source={source}: .*{problem}"):
        resolve(TargetSection(source=source))


def test_an_unreachable_hub_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = r"target\.source=nobody/nothing: cannot be fetched from the hub.*local directory"
    with pytest.raises(TargetError, match=message):
        resolve(TargetSection(source="nobody/nothing"))


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_incomplete_directories(missing: str, problem: str, target_copy: Path) -> None:
    (target_copy / missing).unlink()
    with pytest.raises(TargetError, match=problem):
        _contract(target_copy)


def test_a_single_changed_weight_is_another_target(tiny_target: Path, target_copy: Path) -> None:
    before = _contract(tiny_target)
    # A copy elsewhere is the same target.
    match_contracts(before, _contract(target_copy), where="copy")
    tensors = load_file(target_copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, target_copy / "model.safetensors", metadata={"format": "pt"})
    message = r"x: contract\.fingerprint: made for a target with fingerprint"
    with pytest.raises(ContractMismatch, match=message):
        match_contracts(before, _contract(target_copy), where="x")


def test_a_changed_template_for_tools_is_another_target(target_copy: Path) -> None:
    plain = _contract(target_copy)
    folder = target_copy / "additional_chat_templates"
    folder.mkdir()
    contracts = []
    for text in ("{{ tools }}", "{{ tools | tojson }}"):
        (folder / "tool_use.jinja").write_text(text)
        contracts.append(_contract(target_copy))
    assert len({each.chat_template_hash for each in (plain, *contracts)}) == 3
    with pytest.raises(ContractMismatch, match=r"x: contract\.chat_template_hash"):
        match_contracts(contracts[1], contracts[0], where="x")


def test_the_contract_states_the_facts(tiny_target: Path) -> None:
    contract = _contract(tiny_target)
    tensors = load_file(tiny_target / "model.safetensors")
    assert contract.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert (contract.hidden_size, contract.num_layers) == (32, 8)
    assert contract.capture_layers == (1, 3, 4)
    assert contract.capture_convention == "output-of-layer" and contract.final_state_normed
    assert contract.chat_template_hash != "none" and contract.rope["rope_type"] == "default"


def test_the_contract_names_the_stored_type_whatever_computes(
    tiny_target: Path, target_copy: Path
) -> None:
    """Neither two machines of one run differ, nor a head that names the type it was computed in."""
    contracts = [
        open_target(TargetSection(source=str(tiny_target), dtype=dtype)).contract
        for dtype in ("auto", "float32", "bfloat16", "float16")
    ]
    assert contracts == [contracts[0]] * 4 and contracts[0].dtype == "float32"
    tensors = load_file(target_copy / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, target_copy / "model.safetensors", metadata={"format": "pt"})
    assert _contract(target_copy).dtype == "bfloat16"
    older = contracts[0].model_copy(update={"dtype": "bfloat16"})
    match_contracts(contracts[0], older, where="head")
    with pytest.raises(ContractMismatch, match=r"contract\.fingerprint"):
        match_contracts(contracts[0], _contract(target_copy), where="narrow")


def test_a_gguf_file_is_dequantised_to_one_type_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []
    monkeypatch.setattr("pipeline.target.gguf._convert", lambda gguf, _: converted.append(gguf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    directories = {
        resolve(TargetSection(source=str(gguf), dtype=dtype)).directory
        for dtype in ("auto", "float32", "float16", "bfloat16")
    }
    (directory,) = directories
    assert directory.name.startswith("model-bfloat16-") and converted == [gguf]


@pytest.mark.parametrize("sharded", [False, True])
def test_only_what_transformers_loads_is_downloaded(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """No hub can be reached from here; this one filters as huggingface_hub does."""
    import huggingface_hub
    from huggingface_hub.utils._paths import filter_repo_objects

    repository, cache = tmp_path / "repository", tmp_path / "cache"
    shutil.copytree(tiny_target, repository)
    shutil.copy(repository / "model.safetensors", repository / "consolidated.safetensors")
    shutil.copy(repository / "model.safetensors", repository / "model_ema.safetensors")
    whole = "model.safetensors"
    if sharded:
        whole = "model-00001-of-00001.safetensors"
        names = list(load_file(repository / "model.safetensors"))
        (repository / "model.safetensors").rename(repository / whole)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, whole)}
        (repository / "model.safetensors.index.json").write_text(json.dumps(index))

    def download(_: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        names = [path.name for path in repository.iterdir()]
        cache.mkdir(exist_ok=True)
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(repository / name, cache / name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve(TargetSection(source="somebody/something"))
    assert [path.name for path in cache.glob("*.safetensors")] == [whole]
