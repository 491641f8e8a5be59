"""Fields of a config.json that both dialects share."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline.eagle3.head import DraftShape, HeadShape
from pipeline.errors import HeadError

Shape = TypeVar("Shape", bound=DraftShape)

#: EAGLE-3.1's switches and the draft window, written only when on: a reader that does not know them
#: then still reads a plain head right. Servers know no window: there such a head sees everything.
SWITCHES = ("fc_norm", "norm_output", "draft_window")

#: Without a base, transformers' Llama configuration means this, and so do the loaders built on it.
_ROPE_THETA = 10000.0

_NO_BIAS = (False, "the head's projections have no bias")
#: field → (the only value that this head can carry, why another one is refused)
_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the head's MLP is SwiGLU"),
    "num_hidden_layers": (1, "the head has one decoder layer"),
    "num_aux_hidden_states": (3, "the head reads three aux states"),
    "tie_word_embeddings": (False, "the head has an lm_head of its own"),
    "attention_bias": _NO_BIAS,
    "qkv_bias": _NO_BIAS,
    "mlp_bias": _NO_BIAS,
    "bias": _NO_BIAS,
    "norm_before_fc": (
        False,
        "one norm over the joined aux states is not supported, `fc_norm` over each of them is",
    ),
    "norm_before_residual": (False, "the head's residual stream is un-normed"),
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


def refuse_unsupported(body: dict[str, Any], where: str) -> None:
    """Raise HeadError for the first field with a value that would change the maths."""
    for name, (supported, reason) in _FIXED.items():
        value = body.get(name)
        if value is not None and value != supported:
            fix = f"import a head with {name} {supported!r}"
            raise HeadError(f"{name} is {value!r}: {reason}", where=where, fix=fix)
    wide, hidden = body.get("target_hidden_size"), body.get("hidden_size")
    if wide is not None and wide != hidden:
        problem = (
            f"target_hidden_size {wide} differs from hidden_size {hidden}: "
            "the head borrows the target's embedding, so both are one"
        )
        raise HeadError(problem, where=where, fix="import a head of the target's width")


def shape_fields(body: dict[str, Any], where: str) -> HeadShape:
    """The shape that `body` describes, defaults as in transformers' Llama. Raises HeadError."""
    sizes = ("num_attention_heads", "hidden_size", "vocab_size")
    heads, hidden, vocabulary = (_positive(body, name, where) for name in sizes)
    copied = ("intermediate_size", "rms_norm_eps", "max_position_embeddings")
    fields = {name: body[name] for name in copied if body.get(name) is not None}
    fields |= {name: body[name] for name in SWITCHES if body.get(name)}
    fields |= {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "num_key_value_heads": body.get("num_key_value_heads") or heads,
        "head_dim": body.get("head_dim") or hidden // heads,
        "draft_vocab_size": body.get("draft_vocab_size") or vocabulary,
        "rope_parameters": rope_parameters(body, where),
    }
    return shape_of(fields, where)


def shape_of(fields: dict[str, Any], where: str) -> HeadShape:
    """A HeadShape; raises HeadError that names the first missing or unreadable field."""
    return validated(HeadShape, fields, where)


def validated(kind: type[Shape], fields: dict[str, Any], where: str) -> Shape:
    """A shape of a kind; raises HeadError that names the first missing or unreadable field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        problem = f"garbles {name}: {first['msg']}, got {first['input']!r}"
        if first["type"] == "missing":
            problem = f"lacks {name}"
        fix = f"write {name}, or export the head again"
        raise HeadError(problem, where=where, fix=fix) from error


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in every spelling that readers look for.

    transformers ≥ 5 reads `rope_parameters`; older readers and converters read only a top-level
    `rope_theta`, which they take for 10000 when it is absent, and `rope_scaling`.
    """
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    fields = {"rope_theta": rope.get("rope_theta", _ROPE_THETA), "rope_parameters": rope}
    if scaling.get("rope_type", "default") != "default":
        fields["rope_scaling"] = scaling
    return fields


def rope_parameters(body: dict[str, Any], where: str) -> dict[str, Any]:
    """The rotary parameters in either spelling. Raises HeadError when the two disagree."""
    theta = body.get("rope_theta")
    parameters = body.get("rope_parameters") or body.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        problem = f"rope_parameters is no mapping: {parameters!r}"
        raise HeadError(problem, where=where, fix="write rope_type and rope_theta")
    inner = parameters.get("rope_theta")
    if theta is not None and inner is not None and float(theta) != float(inner):
        problem = f"rope_theta {theta} contradicts rope_parameters.rope_theta {inner}"
        fix = "write the value that the head was trained with in both places"
        raise HeadError(problem, where=where, fix=fix)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    others = {name: value for name, value in parameters.items() if name != "type"}
    return {**others, "rope_type": kind, "rope_theta": float(inner or theta or _ROPE_THETA)}


def layer_ids(ids: Any, where: str, name: str, *, offset: int) -> tuple[int, int, int] | None:
    """Output indices from the `ids` of a dialect that counts `offset` higher; None without any."""
    if not ids:
        return None
    whole = isinstance(ids, list) and all(isinstance(layer, int) for layer in ids)
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
    if not isinstance(value, int) or value <= 0:
        problem = f"lacks {name}" if value is None else f"{name} is {value!r}"
        raise HeadError(problem, where=where, fix=f"write {name} as a positive number")
    return value
