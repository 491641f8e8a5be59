"""A block drafter on disk, in the layout of DFlashDraftModel; and heads of either kind.

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

from pipeline.eagle3.checkpoint import (
    BLOCK_DRAFTER,
    CONFIG,
    HeadCard,
    open_files,
    read_shape,
    read_weights,
    save_head,
    write_files,
)
from pipeline.eagle3.dflash.head import MOST_BLOCK, DflashHead, DflashShape
from pipeline.eagle3.formats.fields import layer_config, validated
from pipeline.eagle3.formats.foreign import read_json
from pipeline.eagle3.head import DraftingHead, DraftShape, Eagle3Head, HeadShape
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


def load_any_head(
    directory: Path, *, expected: TargetContract | None = None
) -> tuple[DraftingHead, HeadCard]:
    """Read a head directory of either kind, as its architecture says, in float32.

    Raises HeadError, or ContractMismatch when it is for another target than `expected`.
    """
    card = open_files(directory, expected)
    head = empty_head(read_any_shape(directory))
    read_weights(directory, head)
    return head.float(), card


def read_any_shape(directory: Path) -> DraftShape:
    """The shape in a head directory's config.json, as its architecture says. Raises HeadError."""
    if BLOCK_DRAFTER in (read_json(directory / CONFIG).get("architectures") or ()):
        return read_dflash_shape(directory)
    return read_shape(directory)


def save_any_head(directory: Path, head: DraftingHead, card: HeadCard) -> None:
    """Write a head of either kind atomically, weights in bfloat16; an existing one is replaced."""
    if isinstance(head, DflashHead):
        config = dflash_config(head.shape, card.contract)
        write_files(directory, config, head.state_dict(), card)
    else:
        assert isinstance(head, Eagle3Head)
        save_head(directory, head, card)


def empty_head(shape: DraftShape) -> DraftingHead:
    """A head of the kind that a shape is of, not started."""
    if isinstance(shape, DflashShape):
        return DflashHead(shape)
    assert isinstance(shape, HeadShape)
    return Eagle3Head(shape)
