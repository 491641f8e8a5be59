"""A target over two and four processes (`divided.py`), against transformers and one process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.decoder.engine import Engine
from pipeline.decoder.ops.parallel import LayerDivision, LayerSizes, TensorGroup, vocabulary_rows
from pipeline.errors import UnsupportedModel
from tests.decoder.conftest import FAMILIES
from tests.decoder.divided import (
    FAMILY,
    FUSED,
    PROMPT,
    REPLY,
    of_drafters,
    replies,
    short_reply,
    small_model,
)

SIZES = (2, 4)
#: Biases, norms of heads, rows stored as one, partly turned heads, windows and other norms.
CHECKED = {
    "biased": "llama-biased",
    "untied": "llama-untied-llama3",
    "qwen3": "qwen3",
    "phi3": "phi3-partial",
    "gemma3": "gemma3",
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """transformers' models, by the name of their directory."""
    made = {}
    for name, family in CHECKED.items():
        fields = {
            **{"intermediate_size": 80, "num_hidden_layers": 8, "max_position_embeddings": 256},
            **{"tie_word_embeddings": True, "initializer_range": 0.3},
            **FAMILIES[family],
            **FAMILY,
        }
        torch.manual_seed(0)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        hf = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in hf.parameters():
                if parameter.dim() == 1:  # zeros and ones would hide a missing term
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        made[name] = hf
    return made


@pytest.fixture(scope="module", params=SIZES)
def done(
    request: pytest.FixtureRequest,
    targets: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """Of every rank: name → what came out."""
    folder, size = tmp_path_factory.mktemp("group"), int(request.param)
    for name, hf in targets.items():
        hf.save_pretrained(folder / name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-m", "tests.decoder.divided", str(size), str(folder)]
    subprocess.run(words, env=environment, check=True, timeout=500)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@torch.inference_mode()
def theirs(hf: Any) -> Tensor:
    """Log-probabilities of the reply [T, V]."""
    logits = hf(torch.tensor([[*PROMPT, *REPLY[:-1]]])).logits[0]
    return torch.as_tensor(logits[len(PROMPT) - 1 :].float().log_softmax(-1))


@pytest.mark.parametrize("name", CHECKED)
def test_families_say_what_transformers_says(
    done: list[dict[str, Any]], targets: dict[str, Any], name: str
) -> None:
    hf = targets[name].eval()
    expected = theirs(hf)
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = hf.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    generated = tuple(whole[0, len(PROMPT) :].tolist())
    assert expected.std() > 0.5
    for rank in done:
        assert (rank[f"scores {name}"] - expected).abs().max() < 2e-4
        assert rank[f"plain {name}"] == rank[f"tree {name}"] == generated


def test_every_drafter_changes_no_token(done: list[dict[str, Any]]) -> None:
    alone = dict(of_drafters(small_model()))
    for temperature in "01":
        plain = alone[f"plain {temperature}"]
        assert len(set(plain.values())) > 2
        said = {name: reply for name, reply in alone.items() if name.endswith(temperature)}
        assert len(said) > 8 and all(each == plain for each in said.values())
    for rank in done:
        both = alone.keys() & rank.keys()
        assert len(both) == len(alone) // (1 if len(done) == 2 else 2) + len(done) // 4
        assert {name: rank[name] for name in both} == {name: alone[name] for name in both}


def test_every_backend_divides(done: list[dict[str, Any]]) -> None:
    if len(done) == 4:
        pytest.skip("seen in two processes")
    alone = replies(Engine(small_model(), slots=2))
    for rank in done:
        for backend in ("TorchOps", "EagerOps"):
            assert rank[f"plain by {backend}"] == rank[f"tree by {backend}"] == alone
        assert rank["tree by TritonOps"] == short_reply(Engine(small_model(**FUSED)))


def test_faults_show(done: list[dict[str, Any]], targets: dict[str, Any]) -> None:
    if len(done) == 4:
        pytest.skip("planted in two processes")
    expected = theirs(targets["biased"].eval())
    for rank in done:
        faults = {name: each for name, each in rank.items() if name.startswith("fault")}
        assert len(faults) == 6
        for name, scores in faults.items():
            assert not (scores - expected).abs().max() < 0.01, name
    alone = replies(Engine(small_model(), slots=2))
    assert all(rank["disagreeing"] == rank["choosing otherwise"] == alone for rank in done)
    assert [rank["pages"] for rank in done] == [19, 19]
    for rank in done:
        if small_model().ops.name == "cpu":  # others do not promise it
            assert torch.equal(*rank["other tokens beside"])
    first, second = done
    assert torch.equal(first["agreed tree"], second["agreed tree"])
    assert not torch.equal(first["not agreed tree"], second["not agreed tree"])


def test_slices_make_the_whole() -> None:
    """Of every rank together, each number once; of a key/value head that is asked twice, twice."""
    sizes = LayerSizes(queries=8, groups=2, head_dim=3, inner=12)
    shapes = {
        "self_attn.q_proj.weight": (24, 5),
        "self_attn.k_proj.weight": (6, 5),
        "self_attn.v_proj.bias": (6,),
        "self_attn.o_proj.weight": (5, 24),
        "self_attn.o_proj.bias": (5,),
        "self_attn.qkv_proj.weight": (36, 5),
        "mlp.gate_up_proj.weight": (24, 5),
        "mlp.down_proj.weight": (5, 12),
        "self_attn.q_norm.weight": (3,),
    }
    layer, first = dict[str, Tensor](), 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        layer[name], first = torch.arange(first, first + count).view(shape), first + count
    for size in SIZES:
        ranks = [LayerDivision(sizes, TensorGroup(rank, size)).slice(layer) for rank in range(size)]
        for name, held in layer.items():
            parts = [rank[name].flatten() for rank in ranks if name in rank]
            numbers, times = torch.unique(torch.cat(parts), return_counts=True)
            assert torch.equal(numbers, torch.unique(held))
            again = size if name.endswith("q_norm.weight") else 1
            if name.startswith(("self_attn.k_", "self_attn.v_")):
                again = size // 2
            keys = slice(8 * 3 * 5, None) if "qkv" in name else slice(0)
            expected = torch.full_like(times, again)
            expected[keys] = size // 2
            assert torch.equal(times, expected), name
    group = TensorGroup(3, 4)
    assert vocabulary_rows(torch.arange(10.0)[:, None], group).tolist() == [[9], [0], [0]]


@pytest.mark.parametrize("size, fits", [(3, "1, 2, 4, 8"), (16, "1, 2, 4, 8")])
def test_unequal_slices_are_refused(size: int, fits: str) -> None:
    division = LayerDivision(LayerSizes(8, 2, 64, 80), TensorGroup(0, size))
    with pytest.raises(UnsupportedModel, match=f"among {size} processes") as caught:
        division.check(where="target")
    assert fits in str(caught.value.fix)
