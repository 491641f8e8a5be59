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
        layers=2,
        block_size=6,
        mask_token_id=4,
        draft_vocab_size=VD,
        intermediate_size=40,
        num_attention_heads=None,
        num_key_value_heads=None,
        **changes,
    )
    head = DflashHead(shape)
    random_init(head, 3)
    whole = shape.draft_vocab_size == shape.vocab_size
    ids = torch.arange(shape.draft_vocab_size)
    head.set_vocabulary(ids if whole else ids * 3 + 5)
    return head


@pytest.fixture
def directory(tiny_target: Path, contract: TargetContract, tmp_path: Path) -> Path:
    """As export writes it."""
    card = HeadCard(contract, PROVENANCE, METRICS)
    save_head(tmp_path / "own", drafter(tiny_target), card)
    export_head(str(tmp_path / "own"), format="sglang", out=str(tmp_path / "exported"))
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
