"""What docs/targets.md says of every family, on a tiny random model of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from pipeline.cli import main
from pipeline.config import TargetSection
from pipeline.decoder.model import check_supported
from pipeline.errors import TargetError, UnsupportedModel
from pipeline.features.capture import differences
from pipeline.target import forward
from pipeline.target.architecture import FAMILIES, Architecture, decoder_of, read_architecture
from pipeline.target.forward import (
    LoadedTarget,
    capture_alone,
    capture_alternatives,
    capture_states,
    register_packed_attention,
)
from pipeline.target.open import Target, open_target, resolve
from pipeline.target.weights import TargetWeights
from tests.target.families import save_family

DOCS = Path(__file__).resolve().parents[2] / "docs/targets.md"
SUPPORTED = [name for name, family in FAMILIES.items() if not family.refused]
DOCUMENTS = [
    torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 23, 1, 14)
]


@pytest.fixture(scope="module", params=SUPPORTED)
def family(request: pytest.FixtureRequest, tmp_path_factory: Any, tiny_target: Path) -> str:
    return str(save_family(request.param, tmp_path_factory.mktemp("family"), tiny_target))


def opened(directory: str | Path) -> Target:
    return open_target(TargetSection(source=str(directory), device="cpu", dtype="float32"))


def transformers_own(target: LoadedTarget) -> Iterator[tuple[Tensor, Tensor]]:
    """(aux states, logits) of each document by itself, with transformers' attention and masks."""
    model = target.model
    model.set_attn_implementation("eager")
    outputs: dict[int, Tensor] = {}
    for index in target.contract.capture_layers:
        layer = decoder_of(model).layers[index]
        layer.register_forward_hook(lambda _m, _i, out, at=index: outputs.update({at: out}))
    for ids in DOCUMENTS:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        yield torch.cat(list(outputs.values()), -1)[0], logits


def test_packed_states_and_the_teacher_are_those_of_transformers(family: str) -> None:
    target = opened(family)
    loaded = target.load(attention=register_packed_attention())
    captured = capture_states(loaded, DOCUMENTS)
    alone, rows = capture_alone(loaded, DOCUMENTS[1]), target.weights.lm_head()
    assert max(differences(captured[1], alone)) < 64 * torch.finfo(torch.float32).eps
    for (aux, final), (states, logits) in zip(captured, transformers_own(loaded), strict=True):
        torch.testing.assert_close(aux.clone(), states.clone(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(final.clone() @ rows.T, logits.clone(), rtol=1e-3, atol=1e-3)


def test_alternatives_have_the_states_of_documents_that_hold_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows of five, which cut documents apart, and blocks of two; at the first and the last
    position too."""
    monkeypatch.setattr(forward, "_BLOCK", 2)
    loaded = opened(family).load(attention=register_packed_attention())
    drawn = {
        number: (torch.tensor(sorted({0, len(ids) // 2, len(ids) - 1})), len(ids))
        for number, ids in enumerate(DOCUMENTS)
    }

    def draw(number: int, final: Tensor) -> tuple[Tensor, Tensor]:
        positions, tokens = drawn[number]
        assert len(final) == tokens
        generator = torch.Generator().manual_seed(number)
        return positions, torch.randint(3, 96, (2, len(positions)), generator=generator)

    if loaded.model.config.model_type == "llama4_text":
        with pytest.raises(TargetError, match="the place in a row"):
            capture_alternatives(loaded, DOCUMENTS, draw, together=5)
        return
    captured = capture_alternatives(loaded, DOCUMENTS, draw, together=5)
    plain = capture_states(loaded, DOCUMENTS)
    for number, (aux, final, alternatives) in enumerate(captured):
        assert torch.equal(aux, plain[number][0]) and torch.equal(final, plain[number][1])
        assert alternatives.token_ids.shape == (2, len(drawn[number][0]))
        for ids, states in zip(alternatives.token_ids, alternatives.final_states, strict=True):
            for at, token, state in zip(drawn[number][0], ids.tolist(), states, strict=True):
                replaced = [*DOCUMENTS[number][:at], token]
                own = capture_alone(loaded, replaced)[1][-1].clone()
                torch.testing.assert_close(state.clone(), own, rtol=1e-3, atol=1e-3)


def test_soft_capped_attention_is_captured(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 without the cap on its logits, for which it is refused."""
    directory = str(save_family("gemma2", tmp_path, tiny_target))
    test_packed_states_and_the_teacher_are_those_of_transformers(directory)
    test_alternatives_have_the_states_of_documents_that_hold_them(directory, monkeypatch)


def test_scores_are_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_lengths", [40, 9])
    query, key = torch.randn(1, 4, 49, 8), torch.randn(1, 2, 49, 8)
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": 6, "softcap": 3.0}
    options["s_aux"] = torch.randn(4)
    whole, _ = forward.packed_attention(None, query, key, key, None, **options)
    monkeypatch.setattr(forward, "_BLOCK", 7)
    blocks, _ = forward.packed_attention(None, query, key, key, None, **options)
    torch.testing.assert_close(blocks, whole)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.refused])
def test_a_family_is_refused_for_the_reason_that_the_table_gives(name: str) -> None:
    """Where it is to be captured here; some go to an engine."""
    reason = re.escape(FAMILIES[name].refused)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        read_architecture(CONFIG_MAPPING[name](), "target.source=x", packed=True)
    assert caught.value.exit_code == 2 and repr(name) in caught.value.problem
    assert ("features.backend: vllm" in str(caught.value.fix)) == FAMILIES[name].served
    if FAMILIES[name].served:
        assert re.match(reason, read_architecture(CONFIG_MAPPING[name](), "x").not_packed)
    else:
        with pytest.raises(UnsupportedModel, match=reason):
            read_architecture(CONFIG_MAPPING[name](), "x")


def test_a_family_that_no_table_names_is_taken_by_its_structure() -> None:
    assert "arcee" not in FAMILIES
    assert read_architecture(CONFIG_MAPPING["arcee"](), "x") == Architecture()
    multiplied = read_architecture(CONFIG_MAPPING["minicpm3"](), "x")
    assert multiplied.logit_scale == pytest.approx(0.1)  # no field says it, its forward does


@pytest.mark.parametrize(
    ("name", "stage", "problem"),
    [
        ("gemma2", "", "soft-capped"),
        ("gpt_oss", "decoded", "decoder does not run model_type"),
        ("qwen3_next", "packed", "cannot be captured here"),
    ],
)
def test_a_refused_target_is_refused_before_its_weights_are_fetched(
    name: str, stage: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A hub's cache that has the configuration: no weights are asked for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    revision, model = "0" * 40, tmp_path / "models--org--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(revision)
    CONFIG_MAPPING[name]().save_pretrained(model / "snapshots" / revision)
    with pytest.raises(UnsupportedModel, match=rf"org/model: .*{problem}"):
        resolve(TargetSection(source="org/model"), **{stage: True} if stage else {})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gemma2", "'gemma2' cannot be trained for: its logits are soft-capped"),
        ("gpt_oss", "decoder does not run model_type 'gpt_oss' (fix: let servers answer"),
        ("qwen3_next", "'qwen3_next' cannot be captured here: its layers are not all attention"),
    ],
)
def test_synth_answers_nothing_for_a_target_that_cannot_be_trained_for(
    name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], target_copy: Path
) -> None:
    CONFIG_MAPPING[name]().save_pretrained(target_copy)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["Why?"], "license": "MIT"}\n')
    sources = f"synth.sources=[{{source: {tmp_path / 'prompts.jsonl'}}}]"
    (tmp_path / "run.yaml").write_text(f"run: {{uri: {tmp_path / 'run'}}}\n")
    command = ["synth", "-c", str(tmp_path / "run.yaml"), f"target.source={target_copy}", sources]
    assert main(command) == 2
    assert problem in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob("*.parquet"))


def test_quantised_weights_are_refused_where_they_would_be_read_as_numbers(
    target_copy: Path,
) -> None:
    config: Any = CONFIG_MAPPING["llama"]()
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModel, match="quantised weights"):
        check_supported(config, 8, where="x")
    tensors = load_file(target_copy / "model.safetensors")
    query = "self_attn.q_proj.weight"
    for name in ("lm_head.weight", f"model.layers.7.{query}"):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, target_copy / "model.safetensors", {"format": "pt"})
    weights = TargetWeights(target_copy)
    assert query not in weights.layer(7) and query in weights.layer(6)
    with pytest.raises(TargetError, match=r"lm_head\.weight is quantised to float8_e4m3fn"):
        opened(target_copy)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")])
def test_quantised_weights_of_which_config_json_says_nothing_are_refused(
    target_copy: Path, dtype: torch.dtype, kind: str
) -> None:
    tensors = load_file(target_copy / "model.safetensors")
    name = "model.layers.7.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, target_copy / "model.safetensors", {"format": "pt"})
    problem = rf"{name}: is quantised \({kind}\), and config\.json has no quantization_config"
    with pytest.raises(TargetError, match=problem):
        opened(target_copy)
    settings = json.loads((target_copy / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8"}
    (target_copy / "config.json").write_text(json.dumps(settings))
    assert opened(target_copy)


def rows_of_the_table() -> str:
    yes_or_no = ("no", "yes")
    return "\n".join(
        f"| `{name}` | {family.models} | {yes_or_no[not family.refused]} "
        f"| {yes_or_no[family.served or not family.refused]} "
        f"| {yes_or_no[family.decoded]} | {family.refused} |"
        for name, family in FAMILIES.items()
    )


def test_the_page_shows_the_table_of_the_code() -> None:
    head = "| `model_type` | models | captured here | by an engine | bundled decoder | why not |\n"
    assert f"{head}|---|---|---|---|---|---|\n{rows_of_the_table()}\n" in DOCS.read_text("utf-8")
