"""A block drafter on disk, in the layout of DFlashDraftModel.

    config.json        DFlashDraftModel on the fields of Qwen3, as SGLang and vLLM read it
    model.safetensors  fc, hidden_norm, layers.*, norm; lm_head, d2t, t2d; no embedding, and no
                       lm_head where dflash_config says target_lm_head
    eagle3.json        contract, provenance and metrics, as of every head

vLLM drafts with lm_head and d2t. SGLang and the authors' own code know no draft vocabulary: they
take the target's lm_head, which is what a head trained with train_lm_head=false has, too.

A block drafter of another trainer, in the layout of DFlashDraftModel, read and checked.

    config.json        fields of Qwen3, block_size, dflash_config: mask_token_id, target_layer_ids
    *.safetensors      fc, hidden_norm, layers.*, norm; where there is a draft vocabulary d2t, t2d,
                       lm_head

The authors' own checkpoints have neither a draft vocabulary nor an lm_head: the target's rows give
the logits, of all of its tokens. Of a part of them, rows that are missing are the target's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import HeadError
from pipeline.heads.checkpoint import (
    CONFIG,
    ForeignHead,
    HeadCard,
    fill_head,
    read_json,
    read_tensors,
)
from pipeline.heads.dflash import ALGORITHM
from pipeline.heads.dflash.shape import MOST_BLOCK, DflashHead, DflashShape
from pipeline.heads.fields import (
    LAYER_FIELDS,
    LAYER_RULES,
    Layers,
    architectures_of,
    check_layer_types,
    layer_config,
    layer_ids,
    only,
    refuse_unknown,
    section,
    validated,
)
from pipeline.heads.rope import rope_parameters
from pipeline.records import CAPTURE_CONVENTION, TargetContract
from pipeline.target.open import Target

_SETTINGS, _LAYERS, _BORROWED = "dflash_config", "target_layer_ids", "target_lm_head"


#: Fields of a Qwen3 configuration that this drafter carries as they are.
_COPIED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "num_hidden_layers"),
    "draft_vocab_size",
)


#: Honoured at the top level or inside `dflash_config`. A drafter has no embedding, and an lm_head
#: only where its weights hold one; how many layers the target has says nothing about this one.
_READ = (
    *("block_size", "mask_token_id", _LAYERS, _BORROWED, _SETTINGS, "num_target_layers"),
    *("architectures", "num_hidden_layers", "draft_vocab_size", "tie_word_embeddings"),
)


_SETTING_RULES = {
    "aux_layer_convention": only(CAPTURE_CONVENTION, reason="ids are read as output indices"),
    "use_aux_hidden_state": only(True, reason="a block drafter reads aux states"),
    "causal": only(False, reason="every position of a block sees the whole block"),
    "sample_from_anchor": only(False, reason="the root is a token of the target's"),
}


_RULES = {
    **LAYER_RULES,
    "model_type": only("qwen3", reason="a layer is one of Qwen3"),
    **dict.fromkeys(
        ("qk_norm", "use_qk_norm", "qk_layernorm"), only(True, reason="a layer norms both")
    ),
    # A drafter's block is not causal, and a trainer may say so of its attention.
    "is_causal": only(True, False, reason="every position of a block sees the whole block"),
}


def head_config(shape: DflashShape, contract: TargetContract) -> dict[str, Any]:
    """config.json with all fields that SGLang, vLLM and the authors' code read.

    `target_layer_ids` are output indices: state i is the one behind decoder layer i.
    """
    layers = shape.num_hidden_layers
    return {
        "architectures": [ALGORITHM.architecture],
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
            _LAYERS: list(contract.capture_layers),
            "aux_layer_convention": CAPTURE_CONVENTION,
            **({_BORROWED: True} if shape.target_lm_head else {}),
        },
    }


def read_config(
    body: dict[str, Any], where: str, tensors: Callable[[], Mapping[str, Tensor]]
) -> tuple[DflashShape, Layers | None]:
    """Shape and aux layers of a config.json. Raises HeadError."""
    return read_dflash_config(body, where, has_rows=_LM_HEAD in tensors())


def read_dflash_config(
    body: dict[str, Any], where: str, *, has_rows: bool
) -> tuple[DflashShape, Layers | None]:
    """Shape and aux layers, which are output indices, of a head with an lm_head or without.

    Raises HeadError.
    """
    settings = section(body, _SETTINGS, where)
    refuse_unknown(body, where, read=(*LAYER_FIELDS, *_READ), rules=_RULES)
    refuse_unknown(settings, where, read=_READ, rules=_SETTING_RULES, prefix=f"{_SETTINGS}.")
    check_layer_types(body, where)
    if has_rows and body.get("tie_word_embeddings"):
        problem = "tie_word_embeddings is True, and the weights hold an lm_head of their own"
        raise HeadError(problem, where=where, fix="write false, or use a head without lm_head")
    fields = {name: body[name] for name in _COPIED if body.get(name) is not None}
    fields.setdefault("num_key_value_heads", body.get("num_attention_heads"))
    for name in ("block_size", "mask_token_id"):
        if (value := _one_of(body, settings, name, where)) is not None:
            fields[name] = value
    fields["rope_parameters"] = rope_parameters(body, where)
    if body.get("draft_vocab_size") is None and "vocab_size" in fields:
        fields["draft_vocab_size"] = fields["vocab_size"]
    whole = fields.get("draft_vocab_size") == fields.get("vocab_size")
    borrowed = settings.get(_BORROWED)
    fields[_BORROWED] = whole and not has_rows if borrowed is None else borrowed
    shape = validated(DflashShape, fields, where)
    _check_numbers(shape, where)
    ids = _one_of(body, settings, _LAYERS, where)
    return shape, layer_ids(ids, where, _LAYERS, offset=0)


def _one_of(body: dict[str, Any], settings: dict[str, Any], name: str, where: str) -> Any:
    """A field that may stand at the top level, in `dflash_config`, or in both."""
    inside, top = settings.get(name), body.get(name)
    if inside is not None and top is not None and inside != top:
        problem = f"{_SETTINGS}.{name} {inside!r} contradicts {name} {top!r}"
        raise HeadError(problem, where=where, fix="keep the value that the head was trained with")
    return top if inside is None else inside


def _check_numbers(shape: DflashShape, where: str) -> None:
    """Raise HeadError for numbers that no drafter has."""
    for name, value, least, most in (
        ("block_size", shape.block_size, 2, MOST_BLOCK),
        ("mask_token_id", shape.mask_token_id, 0, shape.vocab_size - 1),
    ):
        if not least <= value <= most:
            problem = f"{name} is {value}, it can be {least} … {most}"
            raise HeadError(problem, where=where, fix="export the head again")
    if shape.target_lm_head and shape.draft_vocab_size != shape.vocab_size:
        problem = f"target_lm_head proposes all {shape.vocab_size} tokens of the target"
        own = f"draft_vocab_size is {shape.draft_vocab_size}"
        raise HeadError(f"{problem}, and {own}", where=where, fix="export the head again")


_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def read_foreign(directory: Path) -> ForeignHead | None:
    """A block drafter's directory; None for other ones. Raises HeadError with file, field and fix.

    The rows of an lm_head that it lacks are for the caller to fill (`lacks_rows`).
    """
    body, where = read_json(directory / CONFIG), f"{directory}/{CONFIG}"
    if ALGORITHM.architecture not in architectures_of(body, where):
        return None
    tensors = {name.removeprefix("model."): each for name, each in read_tensors(directory).items()}
    embedding = tensors.pop(_EMBEDDING, None)
    shape, layers = read_dflash_config(body, where, has_rows=_LM_HEAD in tensors)
    if layers is None:
        fix = "write the output indices of the three layers that fc reads"
        raise HeadError("lacks dflash_config.target_layer_ids", where=where, fix=fix)
    lacks_rows = not shape.target_lm_head and _LM_HEAD not in tensors
    if lacks_rows:
        tensors[_LM_HEAD] = torch.zeros(shape.draft_vocab_size, shape.hidden_size)
    head = fill_head(DflashHead, shape, tensors, where=str(directory))
    return ForeignHead("dflash", layers, head, embedding, lacks_rows)


def export(
    folder: Path, head: DflashHead, card: HeadCard, format: str, target: Callable[[], Target]
) -> None:
    """Our own directory is what SGLang reads; there is no other format."""
    raise AssertionError(format)
