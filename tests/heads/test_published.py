"""What others publish: imported, trained and drafted from with the logits of its definition, or
refused by the name of a field. heads.json holds the fields as published; sizes are made small here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.decoder.model import DecoderModel
from pipeline.errors import HeadError
from pipeline.exchange.export import Format, export_head
from pipeline.exchange.imports import import_head
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.dflash.blocks import BlockObjective, DflashModel, cut_blocks
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.eagle3.ttt import TttModel
from pipeline.heads.init import lend_rows
from pipeline.heads.registry import algorithm_of, load_head
from pipeline.heads.unrolled import Objective
from pipeline.learning.batches import TrainBatch
from pipeline.target.weights import TargetWeights
from tests.decoder.parity import worst_block_difference, worst_difference
from tests.heads.conftest import CONFIG, WEIGHTS, logits_of
from tests.heads.reference import Config, Layers, dflash_logits, eagle3_logits, random_tensors

HEADS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("heads.json").read_text())
#: name → the field that is refused.
REFUSED = {
    "z-lab/gpt-oss-20b-DFlash": "model_type",
    "SpecForge, Qwen3-8B, P-EAGLE": "architectures",
    "AngelSlim, Hunyuan-4B": "use_qk_norm",
}
VOCABULARY, DRAFT, LAYERS, WINDOW, LENGTH = 316, 96, 8, 64, 80
#: The loaders' default, for heads that name no layers.
DEFAULT = (1, 3, 4)
#: Where aux states come from, in output indices, by their number.
STATES = {3: (1, 3, 5), 4: (1, 3, 5, 6), 5: (0, 2, 3, 5, 6)}


def published(name: str) -> dict[str, Any]:
    """The fields of one head, with those that its source leaves out."""
    head = next(each for each in HEADS if each["name"] == name)
    body, assumed = head["config"], head.get("assumed", {})
    layer = body.get("transformer_layer_config")
    if layer is None:
        return {**assumed, **body}
    return {**body, "transformer_layer_config": {**assumed, **layer}}


def small(body: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The same fields in sizes of the tiny target, and the aux layers that they name."""
    body = json.loads(json.dumps(body))
    layer = body.get("transformer_layer_config", body)
    all_heads = layer["num_key_value_heads"] == layer["num_attention_heads"]
    whole = body.get("draft_vocab_size") in (None, layer["vocab_size"])
    sizes = {
        **{"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4},
        **{"num_key_value_heads": 4 if all_heads else 2, "head_dim": 8, "vocab_size": VOCABULARY},
        **{"attention_head_dim": 8, "org_vocab_size": VOCABULARY},
    }
    layer.update({key: value for key, value in sizes.items() if key in layer})
    if layer.get("layer_types") and "sliding_attention" in layer["layer_types"]:
        layer["sliding_window"] = WINDOW
    if "mrope_section" in (rope := layer.get("rope_scaling") or {}):
        rope["mrope_section"] = [1, 1, 2]  # half a head
    for key in ("draft_vocab_size", "truncated_vocab_size"):
        if key in body:
            body[key] = VOCABULARY if whole else DRAFT
    states = STATES[3]
    for place, key, offset in (
        (body, "eagle_aux_hidden_state_layer_ids", 1),
        (body.get("eagle_config", {}), "eagle_aux_hidden_state_layer_ids", 0),
        (body.get("dflash_config", {}), "target_layer_ids", 0),
    ):
        if place.get(key):
            states = STATES[len(place[key])]
            place[key] = [index + offset for index in states]
    if "dflash_config" in body:
        body["block_size"], body["dflash_config"]["mask_token_id"] = 6, 4
        if "markov_rank" in body["dflash_config"]:
            body["dflash_config"]["markov_rank"] = 8
    return body, states


class Published(NamedTuple):
    """A directory as its trainer writes it, in small, and what its definition gives."""

    directory: Path
    layers: Layers
    states: tuple[int, ...]
    row_ids: Tensor  # [Vd] target tokens of the draft rows


def write(name: str, folder: Path) -> Published:
    body, states = small(published(name))
    config = Config(body)
    tensors = random_tensors(config, len(states))
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(body))
    size = config("draft_vocab_size", VOCABULARY)
    ids = torch.arange(size) * (1 if size == VOCABULARY else 3)
    stored = {key: tensor.bfloat16() for key, tensor in tensors.items()}
    if size < VOCABULARY:
        stored |= {"d2t": ids - torch.arange(size), "t2d": torch.zeros(VOCABULARY).bool()}
        stored["t2d"][ids] = True
    save_file(stored, folder / WEIGHTS)
    return Published(folder, Layers(config, tensors, rotary_of(config)), states, ids)


def rotary_of(config: Config) -> tuple[Tensor, Tensor]:
    """By transformers, of the very fields; [S, d] each."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = dict(config("rope_parameters", config("rope_scaling", {})))
    rope = {"rope_theta": config("rope_theta", 10000.0), **rope}
    if rope.get("type") == "mrope":  # of text
        rope = {"rope_theta": rope["rope_theta"]}
    length, d = config("max_position_embeddings"), config.head_dim
    parameters = {"rope_type": "default", **rope}
    plain = LlamaConfig(
        hidden_size=d,
        num_attention_heads=1,
        head_dim=d,
        rope_parameters=parameters,
        max_position_embeddings=length,
    )
    positions = torch.arange(LENGTH + 16)[None]
    cos, sin = LlamaRotaryEmbedding(config=plain)(torch.zeros(1, 1, d), positions)
    return cos[0], sin[0]


def sequence(states: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
    return tokens, torch.randn(LENGTH, 32 * states, generator=generator)


def imported(made: Published, target: Path, out: Path) -> tuple[DraftingHead, HeadCard]:
    import_head(str(made.directory), target=str(target), out=str(out))
    head, card = load_head(out)
    assert card.contract.capture_layers in (made.states, DEFAULT)
    return head, card


def test_the_table_of_the_docs_is_of_these_heads() -> None:
    page = Path(__file__).parents[2] / "docs/head-format.md"
    rows = re.findall(r"^\| \[(.*?)\]\((.*?)\) \| (.*?) \|$", page.read_text(), re.M)
    told = {name: f"refused: `{field}`" for name, field in REFUSED.items()}
    assert rows == [
        (head["name"], head["source"], told.get(head["name"], "imported")) for head in HEADS
    ]


IMPORTED = [each["name"] for each in HEADS if each["name"] not in REFUSED]


@pytest.mark.parametrize("name", REFUSED)
def test_other_heads_are_refused_by_the_name_of_a_field(
    name: str, tiny_target: Path, tmp_path: Path
) -> None:
    body, _ = small(published(name))
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / CONFIG).write_text(json.dumps(body))
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "head" / WEIGHTS)
    with pytest.raises(HeadError, match=rf"config\.json: .*{REFUSED[name]}"):
        import_head(str(tmp_path / "head"), target=str(tiny_target), out=str(tmp_path / "out"))


@pytest.mark.parametrize("name", IMPORTED)
def test_a_published_head_is_imported_trained_and_drafted_from(
    name: str, tiny_target: Path, tmp_path: Path
) -> None:
    made = write(name, tmp_path / "head")
    weights = TargetWeights(tiny_target)
    embedding, lm_head = weights.embedding().float(), weights.lm_head().float()
    head, card = imported(made, tiny_target, tmp_path / "back")
    tokens, aux = sequence(len(made.states))
    model = DecoderModel.load(
        tiny_target,
        card.contract.capture_layers,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=160,
    )
    with torch.no_grad():
        if isinstance(head, Eagle3Head):
            ours = logits_of(head, embedding, tokens, aux, steps=3)
            theirs = eagle3_logits(made.layers, embedding, tokens, aux, 3)
            for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=f"step {step}")
            assert worst_difference(model, head, extended=4, prefix=70) <= 1e-4
        else:
            assert isinstance(head, DflashHead)
            lend_rows(head, lm_head)
            drafted = block_logits(head, embedding, lm_head, tokens, aux, 70)
            expected = dflash_logits(made.layers, embedding, lm_head, tokens, aux, 70)
            torch.testing.assert_close(drafted, expected, rtol=1e-4, atol=1e-4)
            assert worst_block_difference(model, head, prefix=70) <= 1e-4
    check_training(head, embedding, lm_head, tokens, aux)
    check_round_trip(head, tiny_target, tmp_path)


def batch_of(tokens: Tensor, aux: Tensor, labels: Tensor) -> TrainBatch:
    """One document whose teacher is its own last aux state."""
    return TrainBatch(("x",), (len(tokens),), tokens, aux, labels, labels, aux[labels - 1][:, -32:])


def block_logits(
    head: DflashHead, embedding: Tensor, lm_head: Tensor, tokens: Tensor, aux: Tensor, anchor: int
) -> Tensor:
    """What training computes behind token `anchor` [K, V]."""
    objective = BlockObjective(1, 4.0, 0)
    size, kind = len(tokens) + 8, torch.float32
    model = DflashModel(head, embedding, lm_head, objective, max_length=size, dtype=kind)
    batch = batch_of(tokens, aux, torch.tensor([anchor + 1]))
    count, first = head.shape.predicted, head.shape.first
    states = model.draft(batch, cut_blocks(batch, torch.tensor([0]), count + 1))[0, first:]
    return head.proposing(states, tokens[anchor : anchor + count]) @ head.output_rows().T


def check_training(
    head: DraftingHead, embedding: Tensor, lm_head: Tensor, tokens: Tensor, aux: Tensor
) -> None:
    """A step of training has a gradient for every parameter."""
    labels = torch.arange(50, len(tokens))
    batch, kind, length = batch_of(tokens, aux, labels), torch.float32, len(tokens) + 8
    if isinstance(head, Eagle3Head):
        objective = Objective(3, 0.8)
        model: Any = TttModel(
            head, embedding, lm_head, objective, max_length=length, dtype=kind, checkpointing=True
        )
    else:
        assert isinstance(head, DflashHead)
        blocks = BlockObjective(8, 4.0, 0)
        model = DflashModel(head, embedding, lm_head, blocks, max_length=length, dtype=kind)
    loss = model(batch).loss
    loss.backward()
    assert bool(loss.isfinite())
    for parameter, tensor in head.named_parameters():
        assert tensor.grad is not None and bool(tensor.grad.any()), parameter


def check_round_trip(head: DraftingHead, target: Path, folder: Path) -> None:
    """Exports come back bit for bit; what SGLang would not read is refused by name."""
    formats: tuple[Format, ...] = ("sglang", "speculators")
    for format in formats if isinstance(head, Eagle3Head) else formats[:1]:
        out, again = folder / format, folder / f"{format}-again"
        unread = algorithm_of(head).unread(head, format)
        if unread:
            assert format == "sglang", "speculators has a place for all of them"
            with pytest.raises(HeadError, match=f"no place for {', '.join(unread)}"):
                export_head(str(folder / "back"), format=format, out=str(out))
            continue
        export_head(str(folder / "back"), format=format, out=str(out))
        import_head(str(out), target=str(target), out=str(again))
        assert load_head(again)[0].shape == head.shape
        first, second = (load_file(each / WEIGHTS) for each in (folder / "back", again))
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[each]) for each, tensor in first.items())
