"""What is served to be judged: right servers of many kinds, and planted faults with their names.

`python -m tests.engines.record` serves each and keeps the replies; `make test` judges the
recordings, `make test-engines` some of the servers themselves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class Plan:
    """A server, what is wrong with it, and the findings that may name that."""

    name: str
    found: tuple[str, ...] = ()  # none: nothing is wrong
    dtype: str = "bfloat16"
    drafts: int = 3
    options: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = (16,)
    drafter: bool = True
    speculative: tuple[tuple[str, Any], ...] = ()  # over vLLM's --speculative-config
    weights: Change | None = None  # of the head
    config: Callable[[dict[str, Any]], None] | None = None  # of the head
    target: Change | None = None
    target_config: Callable[[dict[str, Any]], None] | None = None

    @property
    def is_right(self) -> bool:
        return not self.found

    def plant(self, target: Path, head: Path, folder: Path) -> tuple[Path, Path]:
        """The directories to serve; copies in `folder` where something is planted."""
        if self.weights or self.config:
            head = Path(shutil.copytree(head, folder / "head"))
            _change(head, self.weights, self.config)
        if self.target or self.target_config:
            target = Path(shutil.copytree(target, folder / "target"))
            _change(target, self.target, self.target_config)
        return target, head


def _change(
    folder: Path, weights: Change | None, config: Callable[[dict[str, Any]], None] | None
) -> None:
    if weights:
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        weights(tensors)
        save_file(
            {name: each.contiguous() for name, each in tensors.items()}, file, {"format": "pt"}
        )
    if config:
        read = json.loads((folder / "config.json").read_text())
        config(read)
        (folder / "config.json").write_text(json.dumps(read))


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """One tensor, in fp32 in between."""

    def plant(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name].float()).to(tensors[name].dtype)

    return plant


def _noise(name: str, share: float = 1.0) -> Change:
    def add(tensor: Tensor) -> Tensor:
        torch.manual_seed(1)
        return tensor + share * tensor.std() * torch.randn_like(tensor)

    return changed(name, add)


def _swapped(first: str, second: str) -> Change:
    def plant(tensors: dict[str, Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()

    return plant


def _rounded(bits: int) -> Change:
    """Every matrix, one scale for all of it."""

    def plant(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() == 2:
                step = float(tensor.float().abs().amax()) / (2 ** (bits - 1) - 1)
                tensors[name] = ((tensor.float() / step).round() * step).to(tensor.dtype)

    return plant


def _aux(by: int, *places: int) -> Callable[[dict[str, Any]], None]:
    def plant(config: dict[str, Any]) -> None:
        key = "eagle_aux_hidden_state_layer_ids"
        for section in (config, config["eagle_config"]):
            section[key] = [
                each + by * (not places or place in places)
                for place, each in enumerate(section[key])
            ]

    return plant


def _backwards(config: dict[str, Any]) -> None:
    for section in (config, config["eagle_config"]):
        section["eagle_aux_hidden_state_layer_ids"].reverse()


def _rope(base: float) -> Callable[[dict[str, Any]], None]:
    def plant(config: dict[str, Any]) -> None:
        config["rope_theta"] = config.setdefault("rope_parameters", {})["rope_theta"] = base

    return plant


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


def _another_embedding(tensors: dict[str, Tensor]) -> None:
    """A head that brings one which is not the target's."""
    torch.manual_seed(3)
    width = tensors["midlayer.input_layernorm.weight"].shape[0]
    tensors["embed_tokens.weight"] = torch.randn(49152, width).to(torch.bfloat16) / 10


def fc_permuted(tensor: Tensor) -> Tensor:
    """The middle state is read for the low one, and the other way round."""
    first, second, third = tensor.chunk(3, 1)
    return torch.cat((second, first, third), 1)


_LAYER = "midlayer."
_TARGET = "model.layers.3."
#: The text is the target's alone; a fault of the drafter shows in its rounds.
_DRAFTS = "rounds_differ", "acceptance_differs"
_TEXT = "replies_differ", "logits_differ"
_CHUNKS = "--max-num-batched-tokens", "64", "--max-num-seqs", "8"

RIGHT = (
    *(
        Plan(f"{dtype}, {drafts} drafts", dtype=dtype, drafts=drafts, concurrency=(7, 11, 16))
        for dtype, every in (
            ("bfloat16", (1, 2, 3, 5, 7)),
            ("float32", (1, 2, 3, 5)),
            ("float16", (3,)),
        )
        for drafts in every
    ),
    Plan("bfloat16, one at a time", concurrency=(1,)),
    Plan("bfloat16, prefix cache", options=("--enable-prefix-caching",), concurrency=(2, 16)),
    Plan("float32, prefix cache", dtype="float32", options=("--enable-prefix-caching",)),
    Plan("bfloat16, chunked prefill", options=_CHUNKS, concurrency=(4, 16)),
    Plan("bfloat16, chunked prefill, 5 drafts", drafts=5, options=_CHUNKS, concurrency=(4, 16)),
    Plan("float32, chunked prefill", dtype="float32", options=_CHUNKS, concurrency=(4, 16)),
    Plan("bfloat16, pages of 32", options=("--block-size", "32"), concurrency=(5, 16)),
    # vLLM takes the states in the order of the layers, whatever the order of the list.
    Plan("bfloat16, aux layers listed backwards", config=_backwards, concurrency=(6, 16)),
    Plan("float32, pages of 32", dtype="float32", options=("--block-size", "32")),
    Plan("float16, 5 drafts", dtype="float16", drafts=5, concurrency=(8, 16)),
    Plan("bfloat16, 4 drafts", drafts=4, concurrency=(4, 16)),
    Plan("bfloat16, two rows at most", options=("--max-num-seqs", "2"), concurrency=(7,)),
    Plan("float32, two rows at most", dtype="float32", options=("--max-num-seqs", "2")),
)

FAULTS = (
    Plan("all aux layers one later", _DRAFTS, config=_aux(1)),
    Plan("all aux layers one earlier", _DRAFTS, config=_aux(-1)),
    Plan("the low aux layer one later", _DRAFTS, config=_aux(1, 0)),
    Plan("the middle aux layer one later", _DRAFTS, config=_aux(1, 1)),
    Plan("the high aux layer one earlier", _DRAFTS, config=_aux(-1, 2)),
    Plan("fc's inputs permuted", _DRAFTS, weights=changed("fc.weight", fc_permuted)),
    Plan("rotary base 1,000", _DRAFTS, config=_rope(1e3)),
    Plan("rotary base 10,000", _DRAFTS, config=_rope(1e4)),
    Plan("rotary base 500,000", _DRAFTS, config=_rope(5e5)),
    Plan("d2t shifted", _DRAFTS, weights=changed("d2t", lambda each: each.roll(1))),
    Plan(
        "no hidden norm", _DRAFTS, weights=changed(f"{_LAYER}hidden_norm.weight", torch.ones_like)
    ),
    Plan(
        "hidden norm twice", _DRAFTS, weights=changed(f"{_LAYER}hidden_norm.weight", torch.square)
    ),
    Plan("no last norm", _DRAFTS, weights=changed("norm.weight", torch.ones_like)),
    Plan(
        "input norm a tenth",
        _DRAFTS,
        weights=changed(f"{_LAYER}input_layernorm.weight", lambda x: x / 10),
    ),
    Plan("another model's embedding", _DRAFTS, weights=_another_embedding),
    Plan("noise in the queries", _DRAFTS, weights=_noise(f"{_LAYER}self_attn.q_proj.weight")),
    Plan("noise in lm_head", _DRAFTS, weights=_noise("lm_head.weight")),
    Plan(
        "keys for values",
        _DRAFTS,
        weights=_swapped(f"{_LAYER}self_attn.k_proj.weight", f"{_LAYER}self_attn.v_proj.weight"),
    ),
    Plan(
        "gate for up",
        _DRAFTS,
        weights=_swapped(f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight"),
    ),
    Plan(
        "heads of the queries rolled",
        _DRAFTS,
        weights=changed(f"{_LAYER}self_attn.q_proj.weight", lambda each: each.roll(64, 0)),
    ),
    Plan("a head of four bits", _DRAFTS, weights=_rounded(4)),
    Plan("another eps", _DRAFTS, config=_set(rms_norm_eps=1e-2)),
    Plan("norm_before_residual", _DRAFTS, config=_set(norm_before_residual=True)),
    Plan("norm_output", _DRAFTS, config=_set(norm_output=True)),
    Plan(
        "a window of 8",
        _DRAFTS,
        config=_set(layer_types=["sliding_attention"], sliding_window=8),
    ),
    Plan("all aux layers one later, fp32", _DRAFTS, "float32", config=_aux(1)),
    Plan("the low aux layer one later, fp32", _DRAFTS, "float32", config=_aux(1, 0)),
    Plan("rotary base 500,000, fp32", _DRAFTS, "float32", config=_rope(5e5)),
    Plan(
        "a target with noise in one MLP",
        _TEXT,
        target=_noise(f"{_TARGET}mlp.down_proj.weight", 0.5),
    ),
    Plan(
        "a target with noise in one layer's keys",
        _TEXT,
        target=_noise("model.layers.5.self_attn.k_proj.weight", 0.5),
    ),
    Plan("a target of eight bits", _TEXT, target=_rounded(8)),
    Plan("a target of four bits", _TEXT, target=_rounded(4)),
    Plan("a target with another rotary base", _TEXT, target_config=_rope(1e4)),
    Plan(
        "a target with two layers' MLPs exchanged",
        _TEXT,
        target=_swapped(f"{_TARGET}mlp.down_proj.weight", "model.layers.4.mlp.down_proj.weight"),
    ),
    Plan(
        "n-grams in place of the head",
        _DRAFTS,
        speculative=(("method", "ngram"), ("model", None), ("prompt_lookup_max", 3)),
    ),
    Plan("the drafter reads 96 tokens", _DRAFTS, speculative=(("max_model_len", 96),)),
    Plan(
        "replies of 20 tokens",
        ("replies_cut",),
        options=("--override-generation-config", '{"max_new_tokens": 20}'),
    ),
    Plan("no drafter", ("no_acceptance",), drafter=False),
    Plan("another draft length", ("tree_differs",), drafts=12),
    Plan("a short context", ("context_cut", "requests_failed"), options=("--max-model-len", "160")),
)
