"""Heads go to the other dialects and come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from pipeline.eagle3.checkpoint import HeadCard, load_head, save_head
from pipeline.eagle3.formats.fields import rope_fields, rope_parameters
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.errors import HeadError
from pipeline.exchange.export import Format, export_head
from pipeline.exchange.imports import import_head
from pipeline.records import TargetContract
from tests.eagle3.conftest import (
    CARD,
    CONFIG,
    METRICS,
    PROVENANCE,
    VD,
    WEIGHTS,
    edit,
    logits_of,
    make_head,
    rewrite,
    sequence,
)


@pytest.mark.parametrize("format", ["sglang", "speculators"])
@pytest.mark.parametrize(
    "switches",
    [{}, {"fc_norm": True}, {"norm_output": True}],
    ids=["eagle-3", "fc_norm", "norm_output"],
)
def test_a_head_comes_back_as_it_went(
    format: Format,
    switches: dict[str, bool],
    shape: HeadShape,
    contract: TargetContract,
    embedding: Tensor,
    bring: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    head = make_head(shape.model_copy(update=switches))
    save_head(tmp_path / "own", head, HeadCard(contract, PROVENANCE, METRICS))
    export_head(str(tmp_path / "own"), format=format, out=str(tmp_path / "theirs"))
    back, card = bring(tmp_path / "theirs")
    assert back.shape == head.shape and card.contract == contract and card.metrics == METRICS
    assert card.provenance == {
        **PROVENANCE,
        "imported from": str(tmp_path / "theirs"),
        "format": format,
    }
    assert all(
        torch.equal(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items()
    )
    tokens, aux = sequence(shape)
    for went, came in zip(
        *(logits_of(each, embedding, tokens, aux, steps=3) for each in (head, back)), strict=True
    ):
        assert torch.equal(went, came)


def test_the_switches_change_the_logits(shape: HeadShape, embedding: Tensor) -> None:
    """Else the round trips above could lose them unseen."""
    tokens, aux = sequence(shape)
    kinds: tuple[dict[str, bool], ...] = ({}, {"fc_norm": True}, {"norm_output": True})
    plain, normed, fed = (
        logits_of(make_head(shape.model_copy(update=kind)), embedding, tokens, aux, steps=2)
        for kind in kinds
    )
    assert (
        not torch.allclose(plain[0], normed[0])
        and torch.equal(plain[0], fed[0])
        and not torch.allclose(plain[1], fed[1])
    )


def test_names_shapes_and_types_are_those_of_speculators(
    exported: Callable[[Format], Path], embedding: Tensor, head: Eagle3Head
) -> None:
    ours, theirs = head.state_dict(), load_file(exported("speculators") / WEIGHTS)
    assert set(theirs) == {name.replace("midlayer.", "layers.0.") for name in ours} | {
        "embed_tokens.weight"
    }
    assert torch.equal(theirs["embed_tokens.weight"], embedding.bfloat16())
    assert theirs["d2t"].dtype == torch.int64 and theirs["d2t"].tolist() == [
        5 + 2 * row for row in range(VD)
    ], "offsets"
    assert (
        theirs["t2d"].dtype == torch.bool
        and theirs["t2d"].nonzero().flatten().tolist() == head.target_ids().tolist()
    )
    assert {tensor.dtype for name, tensor in theirs.items() if name not in ("d2t", "t2d")} == {
        torch.bfloat16
    }


def test_the_config_says_what_speculators_and_vllm_read(
    exported: Callable[[Format], Path], contract: TargetContract, tiny_target: Path
) -> None:
    config = json.loads((exported("speculators") / CONFIG).read_text())
    layer, about = config["transformer_layer_config"], config["speculators_config"]
    assert config["speculators_model_type"] == about["algorithm"] == "eagle3" and config[
        "architectures"
    ] == ["Eagle3Speculator"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [
        layer_id + 1 for layer_id in contract.capture_layers
    ]
    assert config["norm_before_residual"] is False, "vLLM takes its absence for true"
    assert "norm_output" not in config and "fc_norm" not in config
    assert (config["draft_vocab_size"], layer["vocab_size"], layer["num_hidden_layers"]) == (
        VD,
        contract.vocab_size,
        1,
    )
    assert (
        layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 700.0
        and layer["model_type"] == "llama"
    )
    assert about["verifier"] == {
        "name_or_path": str(tiny_target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert about["proposal_methods"][0]["speculative_tokens"] == 4, (
        "as many as the head was unrolled for"
    )


def test_sglangs_config_names_the_layers_for_sglang_and_for_vllm(
    own: Path, contract: TargetContract
) -> None:
    config = json.loads((own / CONFIG).read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(
        contract.capture_layers
    )
    assert config["eagle_config"]["aux_layer_convention"] == contract.capture_convention
    assert config["eagle_aux_hidden_state_layer_ids"] == [
        layer + 1 for layer in contract.capture_layers
    ]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 700.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    ],
)
def test_every_spelling_of_rope_means_the_same(rope: dict[str, Any]) -> None:
    fields = rope_fields(rope)
    old = {name: value for name, value in fields.items() if name != "rope_parameters"}
    for spelling in (fields, old, {"rope_parameters": rope}):
        assert rope_parameters(spelling, "here") == rope
        assert LlamaConfig(**spelling).rope_parameters == rope, (
            "and transformers reads it the same way"
        )
    with pytest.raises(HeadError, match=r"rope_theta 1\.0 contradicts"):
        rope_parameters({**fields, "rope_theta": 1.0}, "here")


def test_a_foreign_head_says_where_it_came_from(
    own: Path, bring: Callable[[Path], tuple[Eagle3Head, HeadCard]]
) -> None:
    (own / CARD).unlink()
    _, card = bring(own)
    assert card.provenance == {"imported from": str(own), "format": "sglang"} and card.metrics == {}


def test_a_foreign_heads_own_layers_enter_the_contract(
    exported: Callable[[Format], Path],
    bring: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    contract: TargetContract,
    tmp_path: Path,
) -> None:
    directory = exported("speculators")
    (directory / CARD).unlink()
    edit(directory, eagle_aux_hidden_state_layer_ids=[1, 3, 8])
    assert bring(directory)[1].contract == contract.model_copy(update={"capture_layers": (0, 2, 7)})


def test_a_head_that_names_no_layers_has_the_loaders_default(
    own: Path, bring: Callable[[Path], tuple[Eagle3Head, HeadCard]]
) -> None:
    edit(own, eagle_config=..., eagle_aux_hidden_state_layer_ids=...)
    layers = bring(own)[1].contract.capture_layers
    assert [layer + 1 for layer in layers] == [2, 8 // 2, 8 - 3], (
        "2, L//2, L-3, as the layers that the states enter"
    )


def test_rows_are_put_in_order(
    own: Path, head: Eagle3Head, bring: Callable[[Path], tuple[Eagle3Head, HeadCard]]
) -> None:
    def shuffle(tensors: dict[str, Tensor]) -> None:
        order = torch.randperm(VD, generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
        tensors["d2t"] = head.target_ids()[order] - torch.arange(VD)

    rewrite(own, shuffle)
    back, _ = bring(own)
    assert all(
        torch.equal(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items()
    )


def test_a_head_over_the_whole_vocabulary_needs_no_map(
    shape: HeadShape,
    contract: TargetContract,
    bring: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    head = Eagle3Head(shape.model_copy(update={"draft_vocab_size": shape.vocab_size}))
    head.set_vocabulary(torch.arange(shape.vocab_size))
    save_head(tmp_path / "own", head, HeadCard(contract))
    export_head(str(tmp_path / "own"), format="speculators", out=str(tmp_path / "theirs"))
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "theirs" / WEIGHTS))
    back, _ = bring(tmp_path / "theirs")
    assert back.target_ids().tolist() == list(range(shape.vocab_size)) and bool(back.t2d.all())


def test_older_names_and_the_verifiers_weights_are_understood(
    shape: HeadShape,
    contract: TargetContract,
    bring: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    head = make_head(shape.model_copy(update={"fc_norm": True}))
    save_head(tmp_path / "own", head, HeadCard(contract))

    def age(tensors: dict[str, Tensor]) -> None:
        for index, name in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            tensors[f"model.{name}.weight"] = tensors.pop(f"fc_norm.{index}.weight")
        tensors["verifier_norm.weight"] = torch.ones(shape.hidden_size)

    rewrite(tmp_path / "own", age)
    edit(tmp_path / "own", fc_norm=..., use_aux_norm=True)
    back, _ = bring(tmp_path / "own")
    assert all(
        torch.equal(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items()
    )


def test_remote_heads(own: Path, head: Eagle3Head, tiny_target: Path) -> None:
    """Any fsspec URI: fsspec's in-memory filesystem stands for the rest."""
    export_head(str(own), format="speculators", out="memory://travel/theirs")
    import_head("memory://travel/theirs", target=str(tiny_target), out="memory://travel/back")
    export_head("memory://travel/back", format="sglang", out=str(own.parent / "again"))
    again, card = load_head(own.parent / "again")
    assert all(
        torch.equal(again.state_dict()[name], tensor) for name, tensor in head.state_dict().items()
    )
    assert card.provenance["imported from"] == "memory://travel/theirs"
