"""GGUF files of heads: llama.cpp's graph, computed from what the file holds, gives our logits.

tests/engines/test_llama.py serves such a file with llama.cpp itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from torch import Tensor

from pipeline.cli import main
from pipeline.errors import HeadError, StoreError
from pipeline.exchange.export import export_head
from pipeline.heads.base import rms_norm
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import HeadShape
from pipeline.heads.registry import save_head
from pipeline.records import TargetContract
from tests.heads.conftest import METRICS, PROVENANCE, logits_of, make_head, sequence

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 700.0},
    "linear": {"rope_theta": 700.0, "factor": 4.0},
    "llama3": {
        "rope_theta": 700.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16},
}


class File:
    """Fields and tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {
            each.name: torch.from_numpy(np.array(_values(each))) for each in reader.tensors
        }

    def __getitem__(self, name: str) -> Any:
        return self.fields[f"eagle3.{name}"]


def _values(tensor: ReaderTensor) -> Any:
    kind = tensor.tensor_type
    is_ids = kind == GGMLQuantizationType.I64
    return tensor.data if is_ids else dequantize(tensor.data, kind)


def graph(file: File, embedding: Tensor, token_ids: Tensor, aux_states: Tensor) -> Tensor:
    """llm_build_eagle3's first step: logits [T-1, V], which are -inf outside the draft
    vocabulary."""
    block = {name: file.tensors[f"blk.0.{name}.weight"] for name in _BLOCK}
    eps, size = file["attention.layer_norm_rms_epsilon"], file["rope.dimension_count"]
    length = len(token_ids) - 1
    hidden = aux_states[:length] @ file.tensors["fc.weight"].T
    norms = (
        rms_norm(embedding[token_ids[1:]], block["attn_norm"], eps),
        rms_norm(hidden, block["attn_norm_2"], eps),
    )
    joined = torch.cat(norms, dim=-1)
    divisors = file.tensors.get("rope_freqs.weight", torch.ones(size // 2))
    frequencies = file["rope.freq_base"] ** (-torch.arange(0, size, 2) / size) / divisors
    angles = torch.arange(length)[:, None, None] * frequencies  # [T-1, 1, d/2]
    factor = file["rope.scaling.attn_factor"]

    def turned(name: str) -> Tensor:
        pairs = (joined @ block[name].T).view(length, -1, size // 2, 2)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        x, y = pairs.unbind(-1)
        return torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1).flatten(2)

    query, key = (turned(name).transpose(0, 1) for name in ("attn_q", "attn_k"))
    value = (joined @ block["attn_v"].T).view(length, -1, size).transpose(0, 1)
    group = len(query) // len(key)
    attended = F.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0), is_causal=True
    )
    hidden = hidden + attended.transpose(0, 1).flatten(1) @ block["attn_output"].T
    normed = rms_norm(hidden, block["ffn_norm"], eps)
    gate = F.silu(normed @ block["ffn_gate"].T)
    hidden = hidden + (gate * (normed @ block["ffn_up"].T)) @ block["ffn_down"].T
    drafted = rms_norm(hidden, file.tensors["output_norm.weight"], eps)
    logits = torch.full((length, file["vocab_size"]), -torch.inf)
    logits[:, file.tensors["d2t"]] = drafted @ file.tensors["output.weight"].T
    return logits


_BLOCK = (
    *("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


def save(shape: HeadShape, contract: TargetContract, folder: Path) -> str:
    save_head(folder, make_head(shape), HeadCard(contract, PROVENANCE, METRICS))
    return str(folder)


@torch.no_grad()
@pytest.mark.parametrize("kind", ROPES)
def test_its_graph_gives_our_logits(
    kind: str, shape: HeadShape, contract: TargetContract, embedding: Tensor, tmp_path: Path
) -> None:
    shape = shape.model_copy(update={"rope_parameters": {"rope_type": kind, **ROPES[kind]}})
    export_head(save(shape, contract, tmp_path / "own"), format="gguf", out=f"{tmp_path}/x.gguf")
    file = File(tmp_path / "x.gguf")
    assert ("rope_freqs.weight" in file.tensors) == (kind != "default")
    assert (file["rope.scaling.attn_factor"] != 1) == (kind == "yarn")
    head, (tokens, aux) = make_head(shape), sequence(shape)
    (ours,) = logits_of(head, embedding, tokens, aux, steps=1)
    theirs = graph(file, embedding.float(), tokens, aux)
    assert torch.equal(theirs.isfinite().any(0).nonzero().flatten(), head.target_ids())
    torch.testing.assert_close(theirs[:, head.target_ids()], ours, rtol=1e-4, atol=1e-4)


def test_its_fields_say_where_the_head_listens(own: Path, contract: TargetContract) -> None:
    out = own.with_name("out")
    assert main(["export", str(own), "--format", "gguf", "--out", str(out)]) == 0
    assert {file.name for file in out.iterdir()} == {
        *("eagle3-BF16.gguf", "eagle3.json", "README.md")
    }
    file = File(out / "eagle3-BF16.gguf")
    assert file.fields["general.architecture"] == "eagle3"
    assert file["target_layers"] == [layer + 1 for layer in contract.capture_layers]
    assert file["target_hidden_size"] == contract.hidden_size
    assert file["norm_before_residual"] is file["norm_before_fc"] is False
    assert file.fields["tokenizer.ggml.model"] == "none"
    assert json.loads((out / "eagle3.json").read_text())["metrics"] == METRICS
    card = (out / "README.md").read_text()
    assert "llama-server -m TARGET.gguf -md HEAD/eagle3-BF16.gguf" in card


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fc_norm": True}, "fc_norm is true"),
        ({"norm_output": True}, "norm_output is true"),
        ({"draft_window": 16}, "draft_window is 16"),
        ({"norm_before_residual": True}, "no place for norm_before_residual"),
        ({"norm_before_fc": True}, "no place for norm_before_fc"),
        ({"attention_bias": True}, "no place for attention_bias"),
        ({"qk_norm": True}, "no place for qk_norm"),
        ({"num_hidden_layers": 2}, "no place for num_hidden_layers"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 700.0, "factor": 2.0}},
            "rope_parameters.rope_type is dynamic",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    change: dict[str, Any],
    named: str,
    shape: HeadShape,
    contract: TargetContract,
    tmp_path: Path,
) -> None:
    head = save(shape.model_copy(update=change), contract, tmp_path / "own")
    with pytest.raises(HeadError, match=named):
        export_head(head, format="gguf", out=str(tmp_path / "x.gguf"))
    assert not (tmp_path / "x.gguf").exists()


def test_a_file_that_exists_is_left_alone(own: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        export_head(str(own), format="gguf", out=str(file))
    assert file.read_text() == "mine"
