"""Chained heads on disk: their own directory, and MTP layers as servers read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from pipeline.config import TargetSection
from pipeline.errors import HeadError
from pipeline.exchange.export import Format, export_head
from pipeline.exchange.imports import import_head
from pipeline.exchange.inspect import inspect_head
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import HeadShape
from pipeline.heads.init import fold_norm, random_init, shape_for
from pipeline.heads.mtp.init import copy_layers
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape
from pipeline.heads.mtp.ttt import unroll_chain
from pipeline.heads.registry import load_head, save_head
from pipeline.learning.batches import TrainBatch
from pipeline.records import TargetContract
from pipeline.target.open import Target, open_target
from pipeline.target.rotary import RotaryTable
from tests.heads.conftest import (
    CARD,
    CONFIG,
    METRICS,
    PROVENANCE,
    WEIGHTS,
    make_head,
    rewrite,
)

HEADS, VD, LAYERS = 3, 96, (1, 3, 7)


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    """Its states end with the last layer."""
    return open_target(TargetSection(source=str(tiny_target), capture_layers=LAYERS))


def chain_for(target: Target, **changes: Any) -> ChainedHead:
    """Weights that bfloat16 holds exactly, norms off one, every third target token from 5 on; the
    target's own lm_head and last norm."""
    from transformers import AutoConfig

    shape = shape_for(
        ChainedShape,
        AutoConfig.from_pretrained(target.directory),
        heads=HEADS,
        chain_input="final",
        draft_vocab_size=VD,
        intermediate_size=40,
        num_attention_heads=None,
        num_key_value_heads=None,
    )
    rope = {"rope_type": "default", "rope_theta": 700.0}
    head = ChainedHead(shape.model_copy(update={"rope_parameters": rope, **changes}))
    random_init(head, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            parameter.copy_((parameter * (4 if parameter.dim() > 1 else 1)).bfloat16())
        head.set_vocabulary(torch.arange(VD) * 3 + 5)
        head.lm_head.weight.copy_(target.weights.lm_head()[head.target_ids()].bfloat16())
        if head.shape.chain_input == "final":
            head.target_norm.copy_(target.weights.final_norm().bfloat16())
    return head


@pytest.fixture
def chain(target: Target) -> ChainedHead:
    return chain_for(target)


def test_layers_start_as_the_targets_last_one(target: Target, chain: ChainedHead) -> None:
    """Norms of queries and keys go into their projections; what the layer writes begins small."""
    source = dict(target.weights.layer(7))
    assert copy_layers(chain, source)[:2] == [
        "input_layernorm",
        "post_attention_layernorm",
    ]
    generator = torch.Generator().manual_seed(1)
    read = source["input_layernorm.weight"].float()
    x = torch.randn(16, 32, generator=generator) * read
    theirs = (x @ source["self_attn.k_proj.weight"].float().T).view(16, 2, 8)
    for layer in chain.layers:
        _, key, _ = layer.self_attn.project_qkv(x, None)
        torch.testing.assert_close(key.detach(), theirs)
        written = 0.1 * source["self_attn.o_proj.weight"].float()
        torch.testing.assert_close(layer.self_attn.o_proj.weight.detach(), written)
    norm = torch.rand(8, generator=generator) + 0.5
    copy_layers(chain, {**source, "self_attn.k_norm.weight": norm})
    _, key, _ = chain.layers[1].self_attn.project_qkv(x, None)
    folded = fold_norm(source["self_attn.k_proj.weight"], norm, read, 8)
    torch.testing.assert_close(key.detach(), (x @ folded.T).view(16, 2, 8))
    assert not torch.allclose(key.detach(), theirs)


def saved(head: ChainedHead, contract: TargetContract, directory: Path) -> Path:
    save_head(directory, head, HeadCard(contract, PROVENANCE, METRICS))
    return directory


def same(back: Any, head: ChainedHead) -> bool:
    stored, own = back.state_dict(), head.state_dict()
    return stored.keys() == own.keys() and all(torch.equal(stored[k], own[k]) for k in own)


@pytest.mark.parametrize("changes", [{}, {"chain_input": "aux"}, {"attention_bias": True}], ids=str)
def test_a_directory_of_ours_comes_back_and_is_inspected(
    target: Target, tmp_path: Path, changes: dict[str, Any]
) -> None:
    head = chain_for(target, **changes)
    own = saved(head, target.contract, tmp_path / "own")
    back, card = load_head(own, expected=target.contract)
    assert isinstance(back, ChainedHead) and back.shape == head.shape and same(back, head)
    assert card.metrics == METRICS
    body = json.loads((own / CONFIG).read_text())
    assert body["architectures"] == ["ChainedDraftModel"] and body["heads"] == HEADS
    assert body["target_layer_ids"] == list(LAYERS)
    seen = inspect_head(str(own))
    assert seen.parameters == head.count_parameters() and seen.shape["heads"] == HEADS


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_mtp_layers_come_back_as_they_went(
    target: Target, tiny_target: Path, tmp_path: Path, bias: bool, heads: int
) -> None:
    head = chain_for(target, attention_bias=bias, heads=heads)
    own = saved(head, target.contract, tmp_path / "own")
    export_head(str(own), format="mtp", out=str(tmp_path / "mtp"))
    import_head(str(tmp_path / "mtp"), target=str(tiny_target), out=str(tmp_path / "back"))
    back, card = load_head(tmp_path / "back")
    assert isinstance(back, ChainedHead) and back.shape == head.shape and same(back, head)
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (own / WEIGHTS).read_bytes()
    assert card.contract == target.contract and card.metrics == METRICS
    assert card.provenance["format"] == "mtp"


def test_embedding_and_lm_head_of_a_tied_target_are_both_written(
    tiny_target: Path, tmp_path: Path
) -> None:
    """In bfloat16 they are one tensor, which safetensors does not write under two names."""
    directory = Path(shutil.copytree(tiny_target, tmp_path / "tied"))
    (file,) = directory.glob("*.safetensors")
    tensors = {name: each.bfloat16() for name, each in load_file(file).items()}
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / CONFIG).read_text())
    tied = {"tie_word_embeddings": True, "dtype": "bfloat16"}
    (directory / CONFIG).write_text(json.dumps(config | tied))
    target = open_target(TargetSection(source=str(directory), capture_layers=LAYERS))
    own = saved(chain_for(target), target.contract, tmp_path / "own")
    export_head(str(own), format="mtp", out=str(tmp_path / "mtp"))
    written = load_file(tmp_path / "mtp" / WEIGHTS)
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


def test_the_layout_is_mimos(
    target: Target, chain: ChainedHead, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = saved(chain, target.contract, tmp_path / "own")
    export_head(str(own), format="mtp", out=str(tmp_path / "mtp"))
    assert "drafts with the first head alone" in " ".join(capsys.readouterr().out.split())
    body = json.loads((tmp_path / "mtp" / CONFIG).read_text())
    assert body["architectures"] == ["MiMoForCausalLM"] and body["num_nextn_predict_layers"] == 3
    assert body["num_hidden_layers"] == 8 and body["rope_theta"] == 700.0
    layer = {
        *(f"{name}.weight" for name in ("token_layernorm", "hidden_layernorm", "input_proj")),
        *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
        "final_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"self_attn.{name}_proj.bias" for name in "qkv"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    expected = {f"model.mtp_layers.{number}.{name}" for number in range(3) for name in layer}
    tensors = load_file(tmp_path / "mtp" / WEIGHTS)
    others = {"model.embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == expected | others
    vocabulary = target.contract.vocab_size
    assert tensors["lm_head.weight"].shape == (vocabulary, 32)
    assert float(tensors["model.mtp_layers.1.self_attn.q_proj.bias"].abs().max()) == 0.0


def served(directory: Path, final: Tensor, tokens: Tensor, norm_of: str) -> list[Tensor]:
    """What MiMo's MTP class makes of exported tensors: logits [T, V] of each layer in turn.

    Transformers' own Qwen2 layer stands in the middle. Layer k reads token t+k+1 at position t,
    and what `norm_of` gave before; the embedding at position 0 is zero.
    """
    body, tensors = json.loads((directory / CONFIG).read_text()), load_file(directory / WEIGHTS)
    tensors = {name: each.float() for name, each in tensors.items()}
    known = Qwen2Config().to_dict()
    config = Qwen2Config(**{name: body[name] for name in body if name in known})
    config._attn_implementation = "eager"
    length, eps = len(tokens), config.rms_norm_eps
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    hidden, logits = final, []
    for number in range(body["num_nextn_predict_layers"]):
        prefix = f"model.mtp_layers.{number}."
        own = {
            name.removeprefix(prefix): each
            for name, each in tensors.items()
            if name.startswith(prefix)
        }

        def norm(x: Tensor, name: str, own: dict[str, Tensor] = own) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], own.pop(f"{name}.weight"), eps)

        embedded = tensors["model.embed_tokens.weight"][tokens.roll(-number - 1)].clone()
        embedded[0] = 0
        both = norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")
        stream = torch.cat(both, -1) @ own.pop("input_proj.weight").T
        last = own.pop("final_layernorm.weight")
        block = Qwen2DecoderLayer(config, 0)
        block.load_state_dict(own)
        turns = Qwen2RotaryEmbedding(config)(stream[None], positions)
        given: Any = block(
            stream[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=turns,
        )
        stream = (given[0] if isinstance(given, tuple) else given).view(length, -1)
        normed = F.rms_norm(stream, stream.shape[-1:], last, eps)
        hidden = normed if norm_of == "output" else stream
        logits.append(normed @ tensors["lm_head.weight"].T)
    return logits


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_servers_compute_what_was_trained(target: Target, tmp_path: Path, bias: bool) -> None:
    head = chain_for(target, attention_bias=bias)
    own = saved(head, target.contract, tmp_path / "own")
    export_head(str(own), format="mtp", out=str(tmp_path / "mtp"))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, target.contract.vocab_size, (20,), generator=generator)
    aux, none = torch.randn(20, 96, generator=generator), torch.zeros(0, dtype=torch.int64)
    batch = TrainBatch(("x",), (20,), tokens, aux, none, none, aux[:0])
    rope, device = head.shape.rope_config(), torch.device("cpu")
    rotary = RotaryTable(rope, 64, device=device, dtype=torch.float32)
    every, embedding = torch.arange(20), target.weights.embedding().float()
    unrolled = unroll_chain(head, embedding, batch, rotary, rows=every, steps=HEADS)
    logits = served(tmp_path / "mtp", head.project(aux), tokens, "output")
    others = served(tmp_path / "mtp", head.project(aux), tokens, "stream")
    for number, (output, theirs, wrong) in enumerate(
        zip(unrolled.outputs, logits, others, strict=True)
    ):
        ours, valid = head.logits(output), 20 - HEADS
        expected = theirs[:, head.target_ids()]
        torch.testing.assert_close(ours[:valid], expected[:valid], atol=1e-4, rtol=1e-4)
        missed = float((wrong[:, head.target_ids()][:valid] - ours[:valid]).abs().max())
        assert (missed > 1e-3) == (number > 0), "what is passed on un-normed is noticed"


@pytest.mark.parametrize(
    ("changes", "format", "message"),
    [
        ({"chain_input": "aux"}, "mtp", "head 0 reads aux states"),
        ({}, "sglang", "SGLang's EAGLE-3 class has one head"),
        ({}, "speculators", "speculators' MTP layers norm queries and keys"),
    ],
    ids=str,
)
def test_what_a_format_cannot_express_is_refused(
    target: Target, tmp_path: Path, changes: dict[str, Any], format: Format, message: str
) -> None:
    own = saved(chain_for(target, **changes), target.contract, tmp_path / "own")
    with pytest.raises(HeadError, match=message):
        export_head(str(own), format=format, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_trained_lm_head_and_one_head_are_refused(
    target: Target, chain: ChainedHead, shape: HeadShape, tmp_path: Path
) -> None:
    with torch.no_grad():
        chain.lm_head.weight[3, 3] += 1
    own = saved(chain, target.contract, tmp_path / "own")
    with pytest.raises(HeadError, match="lm_head was trained") as refused:
        export_head(str(own), format="mtp", out=str(tmp_path / "out"))
    assert "train.train_lm_head=false" in str(refused.value.fix)
    save_head(tmp_path / "one", make_head(shape), HeadCard(target.contract, {}, {}))
    with pytest.raises(HeadError, match="this head inside it"):
        export_head(str(tmp_path / "one"), format="mtp", out=str(tmp_path / "out"))


def test_the_model_card_names_the_chain(target: Target, chain: ChainedHead, tmp_path: Path) -> None:
    own = saved(chain, target.contract, tmp_path / "own")
    export_head(str(own), format="mtp", out=str(tmp_path / "mtp"))
    card = (tmp_path / "mtp" / "README.md").read_text()
    assert f"This is a chain of {HEADS} draft heads" in card and "an EAGLE-3 draft head" not in card


@pytest.fixture
def exported(target: Target, chain: ChainedHead, tmp_path: Path) -> Path:
    """MTP layers as another trainer leaves them: no card, the whole vocabulary, a model around."""
    own = saved(chain, target.contract, tmp_path / "own")
    export_head(str(own), format="mtp", out=str(tmp_path / "mtp"))
    (tmp_path / "mtp" / CARD).unlink()
    tensors = load_file(tmp_path / "mtp" / WEIGHTS)
    tensors = {name: each for name, each in tensors.items() if name not in ("d2t", "t2d")}
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "mtp" / WEIGHTS)
    body = json.loads((tmp_path / "mtp" / CONFIG).read_text())
    for name in ("draft_vocab_size", "target_layer_ids", "head_dim"):
        del body[name]
    (tmp_path / "mtp" / CONFIG).write_text(json.dumps(body))
    return tmp_path / "mtp"


def test_foreign_mtp_layers_are_imported(
    target: Target, chain: ChainedHead, exported: Path, tiny_target: Path, tmp_path: Path
) -> None:
    import_head(str(exported), target=str(tiny_target), out=str(tmp_path / "back"))
    back, card = load_head(tmp_path / "back", expected=target.contract)
    assert isinstance(back, ChainedHead)
    assert back.shape == chain.shape.model_copy(
        update={"draft_vocab_size": target.contract.vocab_size}
    )
    assert torch.equal(back.target_ids(), torch.arange(target.contract.vocab_size))
    for mine, theirs in zip(chain.layers, back.layers, strict=True):
        for name, tensor in mine.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name])
    assert card.contract.capture_layers == LAYERS and card.metrics == {}


def test_foreign_tensors_that_do_not_fit_are_refused(
    exported: Path, tiny_target: Path, tmp_path: Path
) -> None:
    def refused(message: str) -> None:
        with pytest.raises(HeadError, match=message):
            import_head(str(exported), target=str(tiny_target), out=str(tmp_path / "back"))

    whole = load_file(exported / WEIGHTS)
    rewrite(exported, lambda stored: stored.update({"lm_head.weight": whole["lm_head.weight"] + 1}))
    refused("lm_head.weight is not the target's")
    rewrite(exported, lambda stored: stored.update({"lm_head.weight": whole["lm_head.weight"]}))
    embedding = whole["model.embed_tokens.weight"]
    rewrite(
        exported, lambda stored: stored.update({"model.embed_tokens.weight": embedding.flip(0)})
    )
    refused("embed_tokens.weight is not the target's")
    rewrite(exported, lambda stored: stored.update({"model.embed_tokens.weight": embedding}))
    rewrite(exported, lambda stored: stored.pop("model.mtp_layers.1.input_proj.weight"))
    refused("has no tensor mtp_layers.1.input_proj.weight")
    save_file({"x": torch.zeros(1)}, exported / WEIGHTS)
    refused("has no tensor model.mtp_layers")
