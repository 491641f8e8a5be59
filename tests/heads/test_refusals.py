"""What does not fit is refused, by file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import ContractMismatch, HeadError, StoreError
from pipeline.exchange.export import Format, export_head
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from tests.heads.conftest import CARD, CONFIG, VD, WEIGHTS, edit, rewrite

LAYERS = "eagle_aux_hidden_state_layer_ids"
OTHER_TOKENS = "do not name the same distinct target tokens"


@pytest.mark.parametrize(
    ("format", "change", "message"),
    [
        ("sglang", {"norm_before_residual": True}, r"config\.json: norm_before_residual is True"),
        ("sglang", {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ("sglang", {"attention_bias": True}, "attention_bias is True"),
        ("sglang", {"target_hidden_size": 64}, "target_hidden_size is 64: the head borrows"),
        ("sglang", {"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ("sglang", {"hidden_size": None}, "lacks hidden_size"),
        ("sglang", {"rms_norm_eps": None}, "lacks rms_norm_eps"),
        ("sglang", {"hidden_size": "wide"}, "hidden_size is 'wide'"),
        (
            "sglang",
            {"intermediate_size": 41},
            r"gate_proj\.weight is \[40, 32\] where config\.json asks for \[41, 32\]",
        ),
        ("sglang", {LAYERS: [1, 3, 4]}, "name different layers"),
        ("sglang", {"eagle_config": {LAYERS: [1, 3]}}, "reads three aux states"),
        (
            "sglang",
            {"eagle_config": {"use_aux_hidden_state": False}},
            r"eagle_config\.use_aux_hidden_state is False",
        ),
        ("sglang", {"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True"),
        (
            "sglang",
            {"rope_theta": 10000.0},
            r"rope_theta 10000\.0 contradicts rope_parameters\.rope_theta 700\.0",
        ),
        (
            "sglang",
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": ...},
            "is no EAGLE-3 head's",
        ),
        ("speculators", {"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
        ("speculators", {"norm_before_residual": None}, "vLLM takes that for true"),
        ("speculators", {"norm_before_fc": True}, "norm_before_fc is True"),
        ("speculators", {"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ("speculators", {LAYERS: [0, 4, 5]}, "no ascending layers"),
        ("speculators", {LAYERS: [2, 4, 9]}, "reach output index 8, the target has 8 layers"),
        (
            "speculators",
            {"draft_vocab_size": 90},
            r"d2t is \[96\] where config\.json asks for \[90\]",
        ),
    ],
)
def test_config_fields_that_do_not_fit_are_named(
    format: Format,
    change: dict[str, Any],
    message: str,
    exported: Callable[[Format], Path],
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
) -> None:
    directory = exported(format)
    edit(directory, **change)
    with pytest.raises(HeadError, match=message) as raised:
        import_back(directory)
    assert str(directory) in str(raised.value) and "(fix: " in str(raised.value)


def _drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("layers.0.hidden_norm.weight"), r"has no tensor midlayer\.hidden_norm\.weight"),
        (_drop("d2t"), "has no tensor d2t"),
        (lambda tensors: tensors.update({"fc.bias": torch.zeros(32)}), r"no place for: fc\.bias"),
        (
            lambda tensors: tensors["d2t"].add_(torch.arange(VD)),
            "d2t holds target ids where offsets belong",
        ),
        (lambda tensors: tensors["d2t"][3:4].fill_(10**6), OTHER_TOKENS),
        (lambda tensors: tensors["d2t"][1:2].sub_(3), OTHER_TOKENS),
        (lambda tensors: tensors["t2d"].logical_not_(), OTHER_TOKENS),
        (
            lambda tensors: tensors["embed_tokens.weight"].mul_(1.1),
            r"embed_tokens\.weight is not the target's",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object],
    message: str,
    exported: Callable[[Format], Path],
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
) -> None:
    directory = exported("speculators")
    rewrite(directory, change)
    with pytest.raises(HeadError, match=message):
        import_back(directory)


def test_files_that_cannot_be_read_are_named(
    own: Path, import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]], tmp_path: Path
) -> None:
    (own / WEIGHTS).write_bytes(b"not a file")
    with pytest.raises(HeadError, match=r"model\.safetensors: cannot be read"):
        import_back(own)
    (own / WEIGHTS).rename(own / "pytorch_model.bin")
    message = r"has no model\.safetensors, only weights as pickle \(pytorch_model\.bin\)"
    with pytest.raises(HeadError, match=message):
        import_back(own)
    (own / CONFIG).write_text("[]")
    with pytest.raises(HeadError, match="is no JSON object"):
        import_back(own)
    with pytest.raises(HeadError, match=r"has no config\.json"):
        import_back(tmp_path / "nowhere")


def test_a_head_of_another_target_is_refused(
    own: Path,
    tiny_target: Path,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    card = json.loads((own / CARD).read_text())
    card["contract"]["fingerprint"] = "another"
    (own / CARD).write_text(json.dumps(card))
    with pytest.raises(ContractMismatch, match="fingerprint"):
        import_back(own)
    out = tmp_path / "out"
    with pytest.raises(ContractMismatch, match="fingerprint"):
        export_head(str(own), format="speculators", out=str(out), target=str(tiny_target))
    assert not out.exists() and not (tmp_path / "back").exists()


def test_nothing_is_written_over(own: Path, tmp_path: Path) -> None:
    """`--out .` must not empty somebody's directory."""
    before = sorted(path.name for path in own.iterdir())
    with pytest.raises(StoreError, match="is not empty"):
        export_head(str(own), format="sglang", out=str(own))
    with pytest.raises(StoreError, match="is not empty"):
        export_head(str(own), format="sglang", out=str(tmp_path))
    with pytest.raises(StoreError, match="is a file"):
        export_head(str(own), format="sglang", out=str(own / CONFIG))
    assert sorted(path.name for path in own.iterdir()) == before


def test_a_head_of_the_other_dialect_is_sent_to_import(exported: Callable[[Format], Path]) -> None:
    directory = exported("speculators")
    with pytest.raises(HeadError, match=r"is in the dialect of speculators \(fix: eagle3 import "):
        load_head(directory)
