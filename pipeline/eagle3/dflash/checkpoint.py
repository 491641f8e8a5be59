"""A block drafter on disk, in the layout of DFlashDraftModel.

    config.json        DFlashDraftModel on the fields of Qwen3, as SGLang and vLLM read it
    model.safetensors  fc, hidden_norm, layers.*, norm; lm_head, d2t, t2d; no embedding, and no
                       lm_head where dflash_config says target_lm_head
    eagle3.json        contract, provenance and metrics, as of every head

vLLM drafts with lm_head and d2t. SGLang and the authors' own code know no draft vocabulary: they
take the target's lm_head, which is what a head trained with train_lm_head=false has, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.eagle3.checkpoint import BLOCK_DRAFTER, CONFIG
from pipeline.eagle3.dflash.head import MOST_BLOCK, DflashShape
from pipeline.eagle3.formats.fields import layer_config, validated
from pipeline.eagle3.formats.foreign import read_json
from pipeline.errors import HeadError
from pipeline.records import CAPTURE_CONVENTION, TargetContract

_SETTINGS = "dflash_config"


def dflash_config(shape: DflashShape, contract: TargetContract) -> dict[str, Any]:
    """config.json with all fields that SGLang, vLLM and the authors' code read.

    `target_layer_ids` are output indices: state i is the one behind decoder layer i.
    """
    layers = shape.num_hidden_layers
    return {
        "architectures": [BLOCK_DRAFTER],
        **layer_config(shape),
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_target_layers": contract.num_layers,
        "block_size": shape.block_size,
        "draft_vocab_size": shape.draft_vocab_size,
        _SETTINGS: {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(contract.capture_layers),
            "aux_layer_convention": CAPTURE_CONVENTION,
            **({"target_lm_head": True} if shape.target_lm_head else {}),
        },
    }


def read_dflash_shape(directory: Path) -> DflashShape:
    """The shape in a directory's config.json. Raises HeadError."""
    body, where = read_json(directory / CONFIG), f"head {directory}: {CONFIG}"
    own = body.get(_SETTINGS)
    settings = own if isinstance(own, dict) else {}
    fields = {name: body[name] for name in DflashShape.model_fields if name in body}
    fields |= {name: settings[name] for name in DflashShape.model_fields if name in settings}
    shape = validated(DflashShape, fields, where)
    check_numbers(shape, where)
    return shape


def check_numbers(shape: DflashShape, where: str) -> None:
    """Raise HeadError for numbers that no drafter has."""
    for name, value, least, most in (
        ("block_size", shape.block_size, 2, MOST_BLOCK),
        ("mask_token_id", shape.mask_token_id, 0, shape.vocab_size - 1),
        ("num_hidden_layers", shape.num_hidden_layers, 1, None),
        ("draft_vocab_size", shape.draft_vocab_size, 1, shape.vocab_size),
    ):
        if value < least or (most is not None and value > most):
            allowed = f"{least} or more" if most is None else f"{least} … {most}"
            problem = f"{name} is {value}, it can be {allowed}"
            raise HeadError(problem, where=where, fix="export the head again")
    if shape.target_lm_head and shape.draft_vocab_size != shape.vocab_size:
        problem = f"target_lm_head proposes all {shape.vocab_size} tokens of the target"
        own = f"draft_vocab_size is {shape.draft_vocab_size}"
        raise HeadError(f"{problem}, and {own}", where=where, fix="export the head again")
