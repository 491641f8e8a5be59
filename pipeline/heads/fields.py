"""Fields of a config.json that both dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline.errors import HeadError
from pipeline.heads.base import DraftShape
from pipeline.heads.known import LAYER_RULES, only
from pipeline.heads.rope import ROPE_FIELDS, check_rotary, rope_fields, rope_parameters

Shape = TypeVar("Shape", bound=DraftShape)


#: Output indices of the three aux layers, low to high.
Layers = tuple[int, int, int]


#: EAGLE-3.1's switches and the draft window, written only when on: a reader that does not know them
#: then still reads a plain head right. Servers know no window: there such a head sees everything.
SWITCHES = ("fc_norm", "norm_output", "draft_window")


#: Fields of a config.json that become part of any head's shape.
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "layer_types"),
    *ROPE_FIELDS,
)


#: What an EAGLE-3 head of either dialect cannot carry, beside what no layer can.
EAGLE3_RULES = {
    **LAYER_RULES,
    "num_hidden_layers": only(1, reason="the head has one decoder layer"),
    "num_aux_hidden_states": only(3, reason="the head reads three aux states"),
    "tie_word_embeddings": only(False, reason="the head has an lm_head of its own"),
    "norm_before_fc": only(
        False,
        reason="one norm over the joined aux states is not supported, `fc_norm` over each is",
    ),
    "norm_before_residual": only(False, reason="the head's residual stream is un-normed"),
}


def layer_config(shape: DraftShape) -> dict[str, Any]:
    """The head's decoder layer as a Llama configuration."""
    return {
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
        "max_position_embeddings": shape.max_position_embeddings,
        **rope_fields(shape.rope_parameters),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def shape_fields(kind: type[Shape], body: dict[str, Any], where: str) -> Shape:
    """The shape that `body` describes, defaults as in transformers' Llama. Raises HeadError."""
    sizes = ("hidden_size", "num_attention_heads", "vocab_size")
    hidden, heads, vocabulary = (_positive(body, name, where) for name in sizes)
    copied = ("intermediate_size", "rms_norm_eps", "max_position_embeddings", *SWITCHES)
    fields = {name: body[name] for name in copied if body.get(name) is not None}
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": default_head_dim(body, where),
        "draft_vocab_size": vocabulary,
    }
    fields |= {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **{name: _given(body, name, default) for name, default in defaults.items()},
        "rope_parameters": rope_parameters(body, where),
    }
    return validated(kind, fields, where)


def default_head_dim(body: Mapping[str, Any], where: str) -> int | None:
    """What transformers takes for an absent head_dim; None where the body has one.

    Raises HeadError where the heads do not divide the hidden size.
    """
    heads, hidden = body.get("num_attention_heads"), body.get("hidden_size")
    whole = all(isinstance(each, int) and each > 0 for each in (heads, hidden))
    if body.get("head_dim") is not None or not whole:
        return None
    assert isinstance(heads, int) and isinstance(hidden, int)
    if hidden % heads:
        problem = f"num_attention_heads {heads} does not divide hidden_size {hidden}"
        raise HeadError(problem, where=where, fix="write head_dim, or correct the two")
    return hidden // heads


def _given(body: Mapping[str, Any], name: str, default: Any) -> Any:
    return default if body.get(name) is None else body[name]


def validated(kind: type[Shape], fields: dict[str, Any], where: str) -> Shape:
    """A shape of a kind that a head can have.

    Raises HeadError that names the first missing or unreadable field, and numbers that contradict
    each other.
    """
    try:
        shape = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Input ")
        problem = f"{name} is {first['input']!r}: it {reason}"
        if first["type"] == "missing":
            problem = f"lacks {name}"
        fix = f"write {name}, or export the head again"
        raise HeadError(problem, where=where, fix=fix) from error
    _check_numbers(shape, where)
    check_rotary(shape.rope_parameters, shape.rope_config, shape.head_dim, where)
    return shape


def _check_numbers(shape: DraftShape, where: str) -> None:
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    problem = ""
    if heads % groups:
        problem = f"num_key_value_heads {groups} does not divide num_attention_heads {heads}"
    elif shape.head_dim % 2:
        problem = f"head_dim is {shape.head_dim}, and rotary positions turn pairs"
    elif shape.draft_vocab_size > shape.vocab_size:
        draft, whole = shape.draft_vocab_size, shape.vocab_size
        problem = f"draft_vocab_size {draft} is larger than vocab_size {whole}"
    if problem:
        raise HeadError(problem, where=where, fix="correct the field, or export the head again")


def layer_ids(ids: Any, where: str, name: str, *, offset: int) -> Layers | None:
    """Output indices from the `ids` of a dialect that counts `offset` higher; None without any."""
    if ids is None or ids == []:
        return None
    whole = isinstance(ids, list) and all(type(layer) is int for layer in ids)
    if not whole or len(ids) != 3:
        problem = f"{name} is {ids!r}: the head reads three aux states"
        raise HeadError(problem, where=where, fix="write the ids of three layers")
    low, middle, high = (layer - offset for layer in ids)
    if not 0 <= low < middle < high:
        meaning = f"with ids that mean layer id - {offset}, these are no ascending layers"
        fix = "write the ids low to high; fc's columns follow that order"
        raise HeadError(f"{name} is {ids!r}: {meaning}", where=where, fix=fix)
    return low, middle, high


def _positive(body: dict[str, Any], name: str, where: str) -> int:
    value = body.get(name)
    if type(value) is not int or value <= 0:
        problem = f"lacks {name}" if value is None else f"{name} is {value!r}"
        raise HeadError(problem, where=where, fix=f"write {name} as a positive number")
    return value
