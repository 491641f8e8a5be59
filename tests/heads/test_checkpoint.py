"""A head's directory: SGLang's names and shapes, a round trip, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ContractMismatch, StoreError
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import choose_vocabulary, random_init, size_vocabulary
from pipeline.heads.registry import load_head, save_head
from pipeline.records import TargetContract

H, V, VD, INTER = 16, 50, 20, 24
SHAPE = HeadShape(
    hidden_size=H,
    intermediate_size=INTER,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=V,
    draft_vocab_size=VD,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    max_position_embeddings=64,
)
CONTRACT = TargetContract(
    source="x",
    revision="local",
    fingerprint="f",
    dtype="float32",
    hidden_size=H,
    num_layers=8,
    vocab_size=V,
    rope={"rope_type": "default", "rope_theta": 5000.0},
    capture_layers=(1, 3, 4),
    tokenizer_hash="t",
    chat_template_hash="c",
    parameters=100_000,
)


@pytest.fixture
def head() -> Eagle3Head:
    head = Eagle3Head(SHAPE)
    random_init(head, seed=1)
    head.set_vocabulary(torch.arange(0, 2 * VD, 2) + 3)
    return head


@pytest.fixture
def directory(head: Eagle3Head, tmp_path: Path) -> Path:
    card = HeadCard(CONTRACT, {"licenses": {"MIT": 3}}, {"coverage": 0.9})
    save_head(tmp_path / "head", head, card)
    return tmp_path / "head"


def test_names_shapes_and_types_are_those_of_sglang(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    expected = {
        "fc.weight": (H, 3 * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (16, 2 * H),
        "midlayer.self_attn.k_proj.weight": (8, 2 * H),
        "midlayer.self_attn.v_proj.weight": (8, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, 16),
        "midlayer.mlp.gate_proj.weight": (INTER, H),
        "midlayer.mlp.up_proj.weight": (INTER, H),
        "midlayer.mlp.down_proj.weight": (H, INTER),
        "norm.weight": (H,),
        "lm_head.weight": (VD, H),
        "d2t": (VD,),
        "t2d": (V,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert d2t.tolist() == [3 + index for index in range(VD)], "an offset, not an id"
    assert t2d.nonzero().flatten().tolist() == list(range(3, 3 + 2 * VD, 2))


def test_the_config_says_what_loaders_read(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == VD and config["num_hidden_layers"] == 1
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["torch_dtype"] == "bfloat16"
    assert "norm_output" not in config


def test_round_trip(head: Eagle3Head, directory: Path) -> None:
    loaded, card = load_head(directory, expected=CONTRACT)
    assert card == HeadCard(CONTRACT, {"licenses": {"MIT": 3}}, {"coverage": 0.9})
    assert loaded.target_ids().tolist() == head.target_ids().tolist()
    for name, tensor in head.state_dict().items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        torch.testing.assert_close(loaded.state_dict()[name], expected)
    save_head(directory.with_name("again"), loaded, card)
    assert load_head(directory.with_name("again"))[1] == card
    with pytest.raises(StoreError, match="cannot write the head"):  # nothing is written over
        save_head(directory, loaded, card)
    assert not list(directory.parent.glob(".*"))
    with pytest.raises(ContractMismatch, match="capture_layers"):
        load_head(directory, expected=CONTRACT.model_copy(update={"capture_layers": (2, 3, 4)}))


def test_the_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = torch.tensor([0, 5, 3, 3, 0, 9])
    chosen = choose_vocabulary(counts, 3)
    assert chosen.target_ids.tolist() == [1, 2, 5] and chosen.coverage == pytest.approx(17 / 20)
    filled = choose_vocabulary(counts, 5).target_ids.tolist()
    assert filled == [0, 1, 2, 3, 5], "unseen tokens fill up, lowest first"


def test_vocabularies_are_sized_by_hand() -> None:
    """A larger one covers more, and is read at every step of a chain."""
    settings = {"target": 100, "layer": 10, "hidden": 2}
    one, two, three, four = size_vocabulary(torch.tensor([1, 8, 5, 6]), (1, 2, 3, 4), **settings)
    # Without one of its own, the second is as frequent as the third; the fourth has only one.
    coverage = [each.coverage for each in (one, two, three, four)]
    assert coverage == pytest.approx([8 / 20, 11 / 20, 19 / 20, 19 / 20])
    alpha = 0.75 * 19 / 20
    chains = [
        sum(alpha**position for position in range(steps + 1)) / (1 + 0.16 * steps)
        for steps in range(1, 9)
    ]
    assert three.speedup == pytest.approx(max(chains)) and chains[0] < max(chains) > chains[-1]
    assert two.speedup < three.speedup > four.speedup


def test_coverage_is_that_of_tokens_that_are_not_counted() -> None:
    """Of tokens by Zipf's law the chosen ones hold more than they will of the next."""
    generator = torch.Generator().manual_seed(0)
    law = 1 / torch.arange(1, 30_001, dtype=torch.float64)
    law = (law / law.sum())[torch.randperm(30_000, generator=generator)]
    counts = torch.bincount(torch.multinomial(law, 20_000, True, generator=generator))
    counts = torch.nn.functional.pad(counts, (0, 30_000 - len(counts)))
    for sized in size_vocabulary(counts, [1000, 4000, 8000], target=1, layer=1, hidden=1):
        chosen = choose_vocabulary(counts, sized.size)
        held = float(law[chosen.target_ids].sum())
        assert abs(sized.coverage - held) < 0.03
        assert chosen.coverage - held > 2 * abs(sized.coverage - held)
