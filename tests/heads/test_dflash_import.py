"""Block drafters of other trainers: there and back, and rows that are the target's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import ContractMismatch, HeadError
from pipeline.exchange.export import export_head
from pipeline.exchange.imports import import_head
from pipeline.exchange.inspect import inspect_head
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.dflash.init import dflash_shape_for
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.init import random_init
from pipeline.heads.registry import load_head, save_head
from pipeline.records import TargetContract
from pipeline.target.weights import TargetWeights
from tests.heads.conftest import CARD, CONFIG, METRICS, PROVENANCE, VD, WEIGHTS, edit, rewrite

_VOCABULARY = ("lm_head.weight", "d2t", "t2d")
Import = Callable[[Path], Path]


def drafter(tiny_target: Path, **changes: Any) -> DflashHead:
    """Random weights, of every third target token from 5 on or of all."""
    from transformers import AutoConfig

    shape = dflash_shape_for(
        AutoConfig.from_pretrained(tiny_target),
        block_size=6,
        mask_token_id=4,
        intermediate_size=40,
        num_attention_heads=None,
        num_key_value_heads=None,
        **{"layers": 2, "draft_vocab_size": VD, **changes},
    )
    head = DflashHead(shape)
    random_init(head, 3)
    whole = shape.draft_vocab_size == shape.vocab_size
    ids = torch.arange(shape.draft_vocab_size)
    head.set_vocabulary(ids if whole else ids * 3 + 5)
    return head


@pytest.fixture
def directory(tiny_target: Path, contract: TargetContract, tmp_path: Path) -> Path:
    """Ours, whose lm_head was trained."""
    card = HeadCard(contract, PROVENANCE, METRICS)
    save_head(tmp_path / "exported", drafter(tiny_target), card)
    return tmp_path / "exported"


@pytest.fixture
def foreign(directory: Path) -> Path:
    """As the authors' own trainer writes it: no card, no draft vocabulary, no lm_head."""
    (directory / CARD).unlink()
    edit(directory, draft_vocab_size=...)
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in _VOCABULARY])
    return directory


@pytest.fixture
def bring(tiny_target: Path, tmp_path: Path) -> Import:
    """Import a directory for the tiny target."""

    def bring(source: Path) -> Path:
        import_head(str(source), target=str(tiny_target), out=str(tmp_path / "back"))
        return tmp_path / "back"

    return bring


def same_tensors(one: Path, other: Path) -> None:
    first, second = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def test_what_is_exported_comes_back_bit_for_bit(
    directory: Path, bring: Import, contract: TargetContract
) -> None:
    back = bring(directory)
    same_tensors(directory, back)
    assert (back / CONFIG).read_text() == (directory / CONFIG).read_text()
    head, card = load_head(back, expected=contract)
    assert isinstance(head, DflashHead) and card.metrics == METRICS
    assert card.provenance["format"] == "dflash"


def frozen(head: DflashHead, tiny_target: Path) -> DflashHead:
    """The head with the target's rows, as train_lm_head=false leaves them."""
    with torch.no_grad():
        head.lm_head.weight.copy_(TargetWeights(tiny_target).lm_head()[head.target_ids()])
    return head


def test_sglang_gets_no_lm_head_that_it_would_not_use(
    directory: Path, contract: TargetContract, tiny_target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "given"
    with pytest.raises(HeadError, match=r"SGLang drafts with the target's.*--format speculators"):
        export_head(str(directory), format="sglang", out=str(out))
    assert not out.exists()
    save_head(tmp_path / "own", frozen(drafter(tiny_target), tiny_target), HeadCard(contract))
    export_head(str(tmp_path / "own"), format="sglang", out=str(out))
    same_tensors(tmp_path / "own", out)


@pytest.mark.parametrize("rows", ["trained", "frozen", "none"])
def test_speculators_dialect_there_and_back(
    rows: str, tiny_target: Path, contract: TargetContract, bring: Import, tmp_path: Path
) -> None:
    """Rows: of a part of the vocabulary, trained or not; or the target's, of all of it."""
    whole = {"target_lm_head": True} if rows == "none" else {}
    head, own, given = drafter(tiny_target, **whole), tmp_path / "own", tmp_path / "given"
    if rows == "frozen":
        head = frozen(head, tiny_target)
    save_head(own, head, HeadCard(contract, PROVENANCE, METRICS))
    export_head(str(own), format="speculators", out=str(given), verifier="/models/target")
    body = json.loads((given / CONFIG).read_text())
    assert body["speculators_model_type"] == "dflash" and body["block_size"] == 6
    assert body["aux_hidden_state_layer_ids"] == [index + 1 for index in contract.capture_layers]
    assert body["sliding_window_non_causal"] is True, "vLLM takes false for causal blocks"
    about = body["speculators_config"]
    assert about["verifier"]["name_or_path"] == "/models/target"
    assert about["proposal_methods"][0]["speculative_tokens"] == 5, "all of a block but its root"
    stored = load_file(given / WEIGHTS).keys()
    assert (stored >= {*_VOCABULARY}) is (rows != "none") and "embed_tokens.weight" not in stored
    edit(given, tie_word_embeddings=rows != "none")  # means nothing of a part of the vocabulary
    back = bring(given)
    same_tensors(own, back)
    assert (back / CONFIG).read_text() == (own / CONFIG).read_text()
    assert load_head(back, expected=contract)[1].provenance["format"] == "speculators"


def test_speculators_has_no_rows_for_a_whole_vocabulary(
    tiny_target: Path, contract: TargetContract, bring: Import, tmp_path: Path
) -> None:
    whole = drafter(tiny_target, draft_vocab_size=contract.vocab_size)
    save_head(tmp_path / "own", whole, HeadCard(contract))
    with pytest.raises(HeadError, match="speculators takes the target's for a whole vocabulary"):
        export_head(str(tmp_path / "own"), format="speculators", out=str(tmp_path / "given"))
    save_head(tmp_path / "frozen", frozen(whole, tiny_target), HeadCard(contract))
    export_head(str(tmp_path / "frozen"), format="speculators", out=str(tmp_path / "given"))
    assert not {*_VOCABULARY} & load_file(tmp_path / "given" / WEIGHTS).keys()
    head = load_head(bring(tmp_path / "given"))[0]
    assert isinstance(head, DflashHead) and head.shape.target_lm_head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor is True"),
        ({"aux_hidden_state_layer_ids": [0, 2, 3]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": ...}, r"lacks dflash_config\.target_layer_ids"),
        ({"new": 1}, "new is 1"),
        ({"block_size": 40}, "block_size is 40"),
    ],
)
def test_fields_of_speculators_dialect_count(
    change: dict[str, Any], message: str, directory: Path, bring: Import, tmp_path: Path
) -> None:
    export_head(str(directory), format="speculators", out=str(tmp_path / "given"))
    edit(tmp_path / "given", **change)
    with pytest.raises(HeadError, match=message):
        bring(tmp_path / "given")


def test_rows_that_are_missing_are_the_target_s(
    directory: Path, bring: Import, tiny_target: Path
) -> None:
    kept = load_file(directory / WEIGHTS)
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    tensors = load_file(bring(directory) / WEIGHTS)
    rows = TargetWeights(tiny_target).lm_head()[torch.arange(VD) * 3 + 5]
    assert torch.equal(tensors.pop("lm_head.weight"), rows.bfloat16())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in tensors.items())


def test_rows_out_of_order_are_put_in_order(directory: Path, bring: Import) -> None:
    kept = load_file(directory / WEIGHTS)

    def swap(tensors: dict[str, Tensor]) -> None:
        ids = torch.arange(VD) + tensors["d2t"]
        order = torch.randperm(VD, generator=torch.Generator().manual_seed(0))
        tensors["d2t"] = ids[order] - torch.arange(VD)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    rewrite(directory, swap)
    tensors = load_file(bring(directory) / WEIGHTS)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in tensors.items())


def test_the_authors_layout_keeps_no_rows(
    foreign: Path, bring: Import, contract: TargetContract, tmp_path: Path
) -> None:
    """And is the same again after export and import, and is inspected."""
    back = bring(foreign)
    head, card = load_head(back, expected=contract)
    assert isinstance(head, DflashHead) and head.shape.target_lm_head
    assert head.shape.draft_vocab_size == contract.vocab_size and bool(head.t2d.all())
    assert set(card.provenance) == {"imported from", "format"}
    tensors, kept = load_file(back / WEIGHTS), load_file(foreign / WEIGHTS)
    assert tensors.keys() - kept.keys() == {"d2t", "t2d"}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in kept.items())
    shown = inspect_head(str(back))
    assert shown.parameters == head.count_parameters() and shown.shape["target_lm_head"] is True
    assert not any(entry.name == "lm_head.weight" for entry in shown.tensors)
    export_head(str(back), format="sglang", out=str(tmp_path / "again"))
    same_tensors(back, tmp_path / "again")
    assert load_head(tmp_path / "again")[0].shape == head.shape


def test_an_embedding_has_to_be_the_target_s(
    foreign: Path, bring: Import, embedding: Tensor
) -> None:
    rewrite(foreign, lambda tensors: tensors.update({"embed_tokens.weight": embedding * 1.5}))
    with pytest.raises(HeadError, match=r"embed_tokens\.weight is not the target's"):
        bring(foreign)
    rewrite(foreign, lambda tensors: tensors.update({"embed_tokens.weight": embedding.clone()}))
    assert "embed_tokens.weight" not in load_file(bring(foreign) / WEIGHTS)


def test_a_card_for_another_target_is_refused(directory: Path, bring: Import) -> None:
    card = json.loads((directory / CARD).read_text())
    card["contract"]["num_layers"] += 1
    (directory / CARD).write_text(json.dumps(card))
    with pytest.raises(ContractMismatch, match="num_layers"):
        bring(directory)
