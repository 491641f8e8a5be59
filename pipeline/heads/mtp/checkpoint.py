"""Chained heads on disk.

    config.json        ChainedDraftModel: the layer as a Llama configuration, K, what head 0 reads
    model.safetensors  mtp_layers.0 … K-1; fc or target_norm; lm_head, d2t, t2d; no embedding
    eagle3.json        contract, provenance and metrics, as of every head

No server reads this directory; `mimo.py` writes what one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.heads.checkpoint import CONFIG, ForeignHead, HeadCard, read_json
from pipeline.heads.fields import (
    EAGLE3_RULES,
    LAYER_FIELDS,
    Layers,
    check_layer_types,
    layer_config,
    layer_ids,
    only,
    refuse_unknown,
    validated,
)
from pipeline.heads.mtp import ALGORITHM, mimo
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape
from pipeline.heads.rope import rope_parameters
from pipeline.records import CAPTURE_CONVENTION, TargetContract
from pipeline.target.open import Target

_LAYERS = "target_layer_ids"


_READ = (*("architectures", "draft_vocab_size", "heads", "chain_input", "attention_bias"), _LAYERS)


_RULES = {
    **EAGLE3_RULES,
    "model_type": only("llama", reason="a head's layer is a Llama layer"),
    "aux_layer_convention": only(CAPTURE_CONVENTION, reason="ids are read as output indices"),
}


def head_config(shape: ChainedShape, contract: TargetContract) -> dict[str, Any]:
    """config.json of a head directory."""
    return {
        "architectures": [ALGORITHM.architecture],
        **layer_config(shape),
        "draft_vocab_size": shape.draft_vocab_size,
        "heads": shape.heads,
        "chain_input": shape.chain_input,
        "attention_bias": shape.attention_bias,
        "target_layer_ids": list(contract.capture_layers),
        "aux_layer_convention": CAPTURE_CONVENTION,
    }


def read_config(
    body: dict[str, Any], where: str, tensors: Callable[[], Mapping[str, Tensor]]
) -> tuple[ChainedShape, Layers | None]:
    """Shape and aux layers of a config.json. Raises HeadError."""
    del tensors
    refuse_unknown(body, where, read=(*LAYER_FIELDS, *_READ), rules=_RULES)
    check_layer_types(body, where)
    names = set(ChainedShape.model_fields) - {"rope_parameters"}
    fields = {name: body[name] for name in names if body.get(name) is not None}
    fields["rope_parameters"] = rope_parameters(body, where)
    layers = layer_ids(body.get(_LAYERS), where, _LAYERS, offset=0)
    return validated(ChainedShape, fields, where), layers


def read_foreign(directory: Path) -> ForeignHead | None:
    """Heads in MiMo's layout; None for other directories."""
    return mimo.read_mtp(directory) if mimo.is_mtp(read_json(directory / CONFIG)) else None


def export(
    folder: Path, head: ChainedHead, card: HeadCard, format: str, target: Callable[[], Target]
) -> None:
    """Write MiMo's layout."""
    assert format == "mtp"
    weights = target().weights
    embedding, lm_head = weights.embedding(), weights.lm_head()
    mimo.export_mtp(folder, head, card, embedding=embedding, lm_head=lm_head)
