"""A head on disk, loadable by SGLang as it is.

    config.json        LlamaForCausalLMEagle3, as SGLang reads it
    model.safetensors  fc, midlayer.*, norm, lm_head, d2t, t2d; no embedding
    eagle3.json        contract, provenance and metrics: what SGLang ignores and people need

The directory is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.errors import HeadError, StoreError
from pipeline.records import TargetContract, match_contracts

ARCHITECTURE = "LlamaForCausalLMEagle3"
HEAD_FILES = CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "eagle3.json"


@dataclass(frozen=True)
class HeadCard:
    """`eagle3.json`: which target the head is for, what it was made from, how good it is."""

    contract: TargetContract
    provenance: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


def save_head(directory: Path, head: Eagle3Head, card: HeadCard) -> None:
    """Write a head directory atomically, weights in bfloat16; an existing one is replaced."""
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {name: _stored(tensor) for name, tensor in head.state_dict().items()}
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(sglang_config(head.shape, card.contract), indent=2) + "\n")
        body = {"contract": card.contract.model_dump(mode="json"), "provenance": card.provenance, "metrics": card.metrics}
        (partial / CARD).write_text(json.dumps(body, indent=2) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(partial, directory)
    except OSError as error:
        raise StoreError(f"cannot write the head: {error.strerror}", where=str(directory), fix="free some space or choose a writable run.uri") from error


def load_head(directory: Path, *, expected: TargetContract | None = None) -> tuple[Eagle3Head, HeadCard]:
    """Read a head directory in float32. Raises HeadError, or ContractMismatch when it is for another target."""
    for name in (CONFIG, WEIGHTS, CARD):
        if not (directory / name).is_file():
            raise HeadError(f"has no {name}", where=f"head {directory}", fix="pass a head directory that `eagle3 train` wrote")
    card = _read_card(directory)
    if expected is not None:
        match_contracts(expected, card.contract, where=f"head {directory}")
    head = Eagle3Head(_read_shape(directory))
    try:
        tensors = load_file(directory / WEIGHTS)
        head.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise HeadError(f"{WEIGHTS} does not fit {CONFIG}: {reason}", where=f"head {directory}", fix="export the head again") from error
    return head.float(), card


def sglang_config(shape: HeadShape, contract: TargetContract) -> dict[str, Any]:
    """config.json with every field that today's loaders look at.

    `rope_theta` stands at the top level and inside `rope_parameters`: some converters read only the
    former and fall back to 10000 without it. Layer ids are output indices, which is also how SGLang
    reads `eagle_aux_hidden_state_layer_ids`.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_parameters.get("rope_theta", 10000.0),
        "rope_parameters": shape.rope_parameters,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(contract.capture_layers),
            "use_aux_hidden_state": True,
        },
    }


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _read_card(directory: Path) -> HeadCard:
    try:
        body = json.loads((directory / CARD).read_text())
        return HeadCard(TargetContract.model_validate(body["contract"]), body["provenance"], body["metrics"])
    except (ValueError, KeyError, ValidationError) as error:
        raise HeadError(f"{CARD} cannot be read: {str(error).splitlines()[0]}", where=f"head {directory}", fix="export the head again") from error


def _read_shape(directory: Path) -> HeadShape:
    try:
        body = json.loads((directory / CONFIG).read_text())
        return HeadShape.model_validate({name: body[name] for name in HeadShape.model_fields})
    except (ValueError, KeyError, ValidationError) as error:
        raise HeadError(f"{CONFIG} lacks or garbles {error}", where=f"head {directory}", fix="export the head again") from error
