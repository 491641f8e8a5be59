"""A head for the tiny target, with an uneven draft vocabulary and a trained look."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.config import TargetSection
from pipeline.exchange.export import Format, export_head
from pipeline.exchange.imports import import_head
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import random_init, shape_for
from pipeline.heads.registry import load_head, save_head
from pipeline.records import TargetContract
from pipeline.target.open import open_target
from pipeline.target.rotary import RotaryTable, rotate
from pipeline.target.weights import TargetWeights

VD = 96
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "eagle3.json"
PROVENANCE = {
    "licenses": {"MIT": 3},
    "sources": {"a.jsonl": 3},
    "rejected": {"synth": {"pii": 1}},
    "config": {"train": {"ttt_steps": 4}},
}
METRICS = {"coverage": 0.93, "steps": 12, "accuracy_0": 0.5}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def contract(tiny_target: Path) -> TargetContract:
    return open_target(TargetSection(source=str(tiny_target))).contract


@pytest.fixture(scope="session")
def embedding(tiny_target: Path) -> Tensor:
    """The tiny target's embedding [V, H]."""
    return TargetWeights(tiny_target).embedding()


@pytest.fixture
def shape(tiny_target: Path) -> HeadShape:
    """RoPE base and position limit differ from what loaders assume when they find none."""
    from transformers import AutoConfig

    plain = shape_for(
        HeadShape,
        AutoConfig.from_pretrained(tiny_target),
        draft_vocab_size=VD,
        intermediate_size=40,
        num_attention_heads=None,
        num_key_value_heads=None,
    )
    rope = {"rope_type": "default", "rope_theta": 700.0}
    return plain.model_copy(update={"rope_parameters": rope, "rms_norm_eps": 1e-5})


def make_head(shape: HeadShape) -> Eagle3Head:
    """Weights that bfloat16 holds exactly, norms off one, every third target token from 5 on."""
    head = Eagle3Head(shape)
    random_init(head, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            parameter.copy_((parameter * (4 if parameter.dim() > 1 else 1)).bfloat16())
    head.set_vocabulary(torch.arange(shape.draft_vocab_size) * 3 + 5)
    return head


@pytest.fixture
def head(shape: HeadShape) -> Eagle3Head:
    return make_head(shape)


@pytest.fixture
def own(head: Eagle3Head, contract: TargetContract, tmp_path: Path) -> Path:
    """A head directory of ours."""
    save_head(tmp_path / "own", head, HeadCard(contract, PROVENANCE, METRICS))
    return tmp_path / "own"


@torch.no_grad()
def logits_of(
    head: Eagle3Head, embedding: Tensor, token_ids: Tensor, aux_states: Tensor, *, steps: int
) -> list[Tensor]:
    """Logits [T-1-k, Vd] of every step k over one document: token_ids [T], aux_states [T, 3H].

    Position i of step k reads token i + k + 1, stands at rotary position i + k, and sees step 0 up
    to itself and its own later steps: the plain definition, one dense mask a step.
    """
    length = len(token_ids) - 1
    rotary = RotaryTable(
        head.shape.rope_config(), length + steps, device=torch.device("cpu"), dtype=torch.float32
    )
    hidden, logits = head.project(aux_states[:length]), []
    count, window = head.shape.num_hidden_layers, head.shape.sliding_window
    keys: list[list[Tensor]] = [[] for _ in range(count)]  # of each step [T-1, G, d], by layer
    values: list[list[Tensor]] = [[] for _ in range(count)]

    for k in range(steps):
        layers = iter(range(count))

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            k: int = k,
            layers: Iterator[int] = layers,
        ) -> Tensor:
            cos, sin = rotary.at(torch.arange(length) + k)
            layer = next(layers)
            keys[layer].append(rotate(key, cos, sin))
            values[layer].append(value)
            group = query.shape[1] // key.shape[1]
            past = torch.ones(length, length).tril()
            if window:
                past = past.triu(k + 1 - window)
            masks = [past, *(torch.eye(length) for _ in range(k))]
            mask = torch.cat(masks, dim=1).bool()  # [T-1, (k+1)(T-1)]
            all_keys, all_values = (
                torch.cat(parts).repeat_interleave(group, dim=1).transpose(0, 1)
                for parts in (keys[layer], values[layer])
            )
            rotated = rotate(query, cos, sin).transpose(0, 1)
            output = F.scaled_dot_product_attention(rotated, all_keys, all_values, attn_mask=mask)
            return output.transpose(0, 1)

        # [T-1]; the padding is read by positions that are dropped below
        tokens = torch.cat((token_ids[k + 1 :], token_ids.new_zeros(k)))
        hidden = head.step(embedding.float()[tokens], hidden, attend)
        logits.append(head.logits(hidden)[: length - k])
    return logits


def sequence(shape: HeadShape, length: int = 24) -> tuple[Tensor, Tensor]:
    """Random token ids [T] and aux states [T, L · H]."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, shape.vocab_size, (length,), generator=generator)
    return tokens, torch.randn(length, shape.aux_layers * shape.hidden_size, generator=generator)


def edit(directory: Path, **change: Any) -> None:
    """Change fields of config.json in place; `...` takes a field away."""
    body = {**json.loads((directory / CONFIG).read_text()), **change}
    kept = {name: value for name, value in body.items() if value is not ...}
    (directory / CONFIG).write_text(json.dumps(kept))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change model.safetensors in place."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


@pytest.fixture
def exported(own: Path, tmp_path: Path) -> Callable[[Format], Path]:
    def export(format: Format) -> Path:
        export_head(str(own), format=format, out=str(tmp_path / format))
        return tmp_path / format

    return export


@pytest.fixture
def import_back(
    tiny_target: Path, tmp_path: Path
) -> Callable[[Path], tuple[DraftingHead, HeadCard]]:
    """Import a directory for the tiny target."""

    def import_back(directory: Path) -> tuple[DraftingHead, HeadCard]:
        import_head(str(directory), target=str(tiny_target), out=str(tmp_path / "back"))
        return load_head(tmp_path / "back")

    return import_back
