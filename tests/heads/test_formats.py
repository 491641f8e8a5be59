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

from pipeline.errors import ConfigError, HeadError
from pipeline.exchange.export import Format, export_head
from pipeline.exchange.imports import import_head
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.registry import load_head, save_head
from pipeline.heads.rope import rope_fields, rope_parameters
from pipeline.records import TargetContract
from pipeline.target.weights import TargetWeights
from tests.heads.conftest import (
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


def same_tensors(back: DraftingHead, head: DraftingHead) -> bool:
    stored = back.state_dict()
    return all(torch.equal(stored[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("format", ["sglang", "speculators"])
@pytest.mark.parametrize(
    "switches",
    [{}, {"fc_norm": True}, {"norm_output": True}, {"draft_window": 128}],
    ids=["eagle-3", "fc_norm", "norm_output", "draft_window"],
)
def test_a_head_comes_back_as_it_went(
    format: Format,
    switches: dict[str, int],
    shape: HeadShape,
    contract: TargetContract,
    embedding: Tensor,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    head = make_head(shape.model_copy(update=switches))
    own, exported = tmp_path / "own", tmp_path / "exported"
    save_head(own, head, HeadCard(contract, PROVENANCE, METRICS))
    export_head(str(own), format=format, out=str(exported))
    back, card = import_back(exported)
    assert back.shape == head.shape and card.contract == contract and card.metrics == METRICS
    assert card.provenance == {**PROVENANCE, "imported from": exported.name, "format": format}
    assert same_tensors(back, head)
    tokens, aux = sequence(shape)
    before, after = (logits_of(each, embedding, tokens, aux, steps=3) for each in (head, back))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_the_switches_change_the_logits(shape: HeadShape, embedding: Tensor) -> None:
    """Else the round trips above could lose them unseen."""
    tokens, aux = sequence(shape)
    kinds: tuple[dict[str, bool], ...] = ({}, {"fc_norm": True}, {"norm_output": True})
    plain, fc_norm, norm_output = (
        logits_of(make_head(shape.model_copy(update=kind)), embedding, tokens, aux, steps=2)
        for kind in kinds
    )
    assert not torch.allclose(plain[0], fc_norm[0])
    assert torch.equal(plain[0], norm_output[0])
    assert not torch.allclose(plain[1], norm_output[1])


def test_names_shapes_and_types_are_those_of_speculators(
    exported: Callable[[Format], Path], embedding: Tensor, head: Eagle3Head
) -> None:
    tensors = load_file(exported("speculators") / WEIGHTS)
    renamed = {name.replace("midlayer.", "layers.0.") for name in head.state_dict()}
    assert set(tensors) == renamed | {"embed_tokens.weight"}
    assert torch.equal(tensors["embed_tokens.weight"], embedding.bfloat16())
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    assert d2t.dtype == torch.int64
    assert d2t.tolist() == [5 + 2 * row for row in range(VD)], "offsets"
    assert t2d.dtype == torch.bool
    assert t2d.nonzero().flatten().tolist() == head.target_ids().tolist()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_the_config_says_what_speculators_and_vllm_read(
    exported: Callable[[Format], Path], contract: TargetContract, tiny_target: Path
) -> None:
    config = json.loads((exported("speculators") / CONFIG).read_text())
    layer, about = config["transformer_layer_config"], config["speculators_config"]
    assert config["speculators_model_type"] == about["algorithm"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    entered = [index + 1 for index in contract.capture_layers]
    assert config["eagle_aux_hidden_state_layer_ids"] == entered
    assert config["norm_before_residual"] is False, "vLLM takes its absence for true"
    assert "norm_output" not in config and "fc_norm" not in config
    assert config["draft_vocab_size"] == VD
    assert layer["vocab_size"] == contract.vocab_size and layer["num_hidden_layers"] == 1
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 700.0
    assert layer["model_type"] == "llama"
    verifier = {"name_or_path": tiny_target.name, "architectures": ["LlamaForCausalLM"]}
    assert about["verifier"] == verifier
    (method,) = about["proposal_methods"]
    assert method["speculative_tokens"] == 4, "as many as the head was unrolled for"


@pytest.mark.parametrize("format", ["sglang", "speculators"])
def test_a_draft_window_is_written_in_the_fields_that_servers_read(
    format: Format,
    shape: HeadShape,
    contract: TargetContract,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    head = make_head(shape.model_copy(update={"draft_window": 128}))
    own, out = tmp_path / "own", tmp_path / "given"
    save_head(own, head, HeadCard(contract))
    assert load_head(own)[0].shape == head.shape
    export_head(str(own), format=format, out=str(out))
    body = json.loads((out / CONFIG).read_text())
    layer = body["transformer_layer_config"] if format == "speculators" else body
    assert (layer["layer_types"], layer["sliding_window"]) == (["sliding_attention"], 128)
    window = "--speculative-draft-window-size 128"
    assert (window in (out / "README.md").read_text()) is (format == "sglang")
    layer["sliding_window"] = 64
    (out / CONFIG).write_text(json.dumps(body))
    with pytest.raises(HeadError, match="sliding_window is 64"):
        import_back(out)


def test_the_verifier_is_written_as_it_is(own: Path, tmp_path: Path) -> None:
    out = tmp_path / "given"
    export_head(str(own), format="speculators", out=str(out), verifier="org/model")
    about = json.loads((out / CONFIG).read_text())["speculators_config"]
    assert about["verifier"]["name_or_path"] == "org/model"
    assert "which names org/model as the target" in (out / "README.md").read_text()
    with pytest.raises(ConfigError, match="--verifier: --format sglang has no field for it"):
        export_head(str(own), format="sglang", out=str(tmp_path / "no"), verifier="org/model")
    assert not (tmp_path / "no").exists()


def test_sglangs_config_names_the_layers_for_sglang_and_for_vllm(
    own: Path, contract: TargetContract
) -> None:
    config = json.loads((own / CONFIG).read_text())
    layers, inside = contract.capture_layers, config["eagle_config"]
    assert inside["eagle_aux_hidden_state_layer_ids"] == list(layers)
    assert inside["aux_layer_convention"] == contract.capture_convention
    assert config["eagle_aux_hidden_state_layer_ids"] == [index + 1 for index in layers]


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
        assert LlamaConfig(**spelling).rope_parameters == rope, "transformers reads it the same way"
    with pytest.raises(HeadError, match=r"rope_theta 1\.0 contradicts"):
        rope_parameters({**fields, "rope_theta": 1.0}, "here")


def test_a_foreign_head_says_where_it_came_from(
    own: Path, import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]]
) -> None:
    (own / CARD).unlink()
    _, card = import_back(own)
    assert card.provenance == {"imported from": own.name, "format": "sglang"} and card.metrics == {}


def test_a_foreign_heads_own_layers_enter_the_contract(
    exported: Callable[[Format], Path],
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    contract: TargetContract,
    tmp_path: Path,
) -> None:
    directory = exported("speculators")
    (directory / CARD).unlink()
    edit(directory, eagle_aux_hidden_state_layer_ids=[1, 3, 8])
    assert import_back(directory)[1].contract == contract.model_copy(
        update={"capture_layers": (0, 2, 7)}
    )


def test_a_head_that_names_no_layers_has_the_loaders_default(
    own: Path, import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]]
) -> None:
    edit(own, eagle_config=..., eagle_aux_hidden_state_layer_ids=...)
    layers = import_back(own)[1].contract.capture_layers
    # As the layers that the states enter: 2, L//2, L-3.
    assert [layer + 1 for layer in layers] == [2, 8 // 2, 8 - 3]


def test_rows_are_put_in_order(
    own: Path, head: Eagle3Head, import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]]
) -> None:
    def shuffle(tensors: dict[str, Tensor]) -> None:
        order = torch.randperm(VD, generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
        tensors["d2t"] = head.target_ids()[order] - torch.arange(VD)

    rewrite(own, shuffle)
    back, _ = import_back(own)
    assert same_tensors(back, head)


def test_a_head_over_the_whole_vocabulary_needs_no_map(
    shape: HeadShape,
    contract: TargetContract,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    head = Eagle3Head(shape.model_copy(update={"draft_vocab_size": shape.vocab_size}))
    head.set_vocabulary(torch.arange(shape.vocab_size))
    own, exported = tmp_path / "own", tmp_path / "exported"
    save_head(own, head, HeadCard(contract))
    export_head(str(own), format="speculators", out=str(exported))
    assert not {"d2t", "t2d"} & set(load_file(exported / WEIGHTS))
    back, _ = import_back(exported)
    assert back.target_ids().tolist() == list(range(shape.vocab_size)) and bool(back.t2d.all())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_a_head_over_the_whole_vocabulary_without_lm_head_has_the_targets(
    architecture: str,
    shape: HeadShape,
    contract: TargetContract,
    tiny_target: Path,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tmp_path: Path,
) -> None:
    """As nvidia/gpt-oss-120b-Eagle3 is stored. A part of the vocabulary needs rows of its own."""
    own = tmp_path / "own"
    head = make_head(shape.model_copy(update={"draft_vocab_size": shape.vocab_size // 4}))
    save_head(own, head, HeadCard(contract))
    card = (own / CARD).read_bytes()
    (own / CARD).unlink()
    rewrite(own, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(HeadError, match=r"has no tensor lm_head\.weight"):
        import_back(own)
    rewrite(own, lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")])
    edit(own, architectures=[architecture], draft_vocab_size=None)
    back, _ = import_back(own)
    assert back.shape.draft_vocab_size == shape.vocab_size
    rows = TargetWeights(tiny_target).lm_head()
    assert torch.equal(back.lm_head.weight, rows.bfloat16().float())
    assert torch.equal(back.fc.weight, head.fc.weight)
    (own / CARD).write_bytes(card)  # our own directories have all of it
    with pytest.raises(HeadError, match=r"has no tensor lm_head\.weight"):
        import_back(own)
    (own / CARD).unlink()
    edit(own, draft_vocab_size=..., tie_word_embeddings=True)
    with pytest.raises(HeadError, match="tie_word_embeddings is True"):
        import_back(own)


EMBEDDING = "embed_tokens.weight"


@pytest.mark.parametrize(
    ("architectures", "outcome"),
    [
        (["Eagle3LlamaForCausalLM"], "kept as the head's own"),
        (["LlamaForCausalLMEagle3"], "left out"),
        (["LlamaForCausalLM"], r"depends on architectures \(fix: write \[LlamaForCausalLMEagle3\]"),
        (..., "depends on architectures"),
    ],
)
def test_another_embedding_than_the_targets_is_read_as_its_class_reads_it(
    architectures: Any,
    outcome: str,
    own: Path,
    embedding: Tensor,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM keeps it, and so does speculators' dialect; SGLang puts the target's over it."""
    trained = (embedding * 2).bfloat16()
    edit(own, architectures=architectures)
    rewrite(own, lambda tensors: tensors.update({EMBEDDING: trained}))
    if "depends" in outcome:
        with pytest.raises(HeadError, match=outcome):
            import_back(own)
        return
    back, _ = import_back(own)
    assert outcome in "".join(capsys.readouterr())
    if outcome == "left out":
        assert back.embedding is None
        return
    assert back.shape.own_embedding
    assert torch.equal(back.state_dict()[EMBEDDING], trained.float())
    given, again = tmp_path / "given", tmp_path / "again"
    export_head(str(tmp_path / "back"), format="speculators", out=str(given))
    import_head(str(given), target=str(tiny_target), out=str(again))
    head, _ = load_head(again)
    assert head.shape == back.shape and same_tensors(head, back)


def test_an_embedding_that_is_the_targets_is_not_the_heads_own(
    own: Path,
    embedding: Tensor,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit(own, architectures=["Eagle3LlamaForCausalLM"])
    rewrite(own, lambda tensors: tensors.update({EMBEDDING: embedding.half()}))
    assert import_back(own)[0].embedding is None
    assert EMBEDDING not in "".join(capsys.readouterr())


def test_older_names_and_the_verifiers_weights_are_understood(
    shape: HeadShape,
    contract: TargetContract,
    import_back: Callable[[Path], tuple[Eagle3Head, HeadCard]],
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
    back, _ = import_back(tmp_path / "own")
    assert same_tensors(back, head)


def test_remote_heads(own: Path, head: Eagle3Head, tiny_target: Path) -> None:
    """Any fsspec URI: fsspec's in-memory filesystem stands for the rest."""
    export_head(str(own), format="speculators", out="memory://exchange/exported")
    import_head("memory://exchange/exported", target=str(tiny_target), out="memory://exchange/back")
    export_head("memory://exchange/back", format="sglang", out=str(own.parent / "again"))
    again, card = load_head(own.parent / "again")
    assert same_tensors(again, head)
    assert card.provenance["imported from"] == "exported"
