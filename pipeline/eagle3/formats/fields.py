"""Fields of a config.json that both dialects share."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from pipeline.eagle3.head import HeadShape
from pipeline.errors import HeadError

#: EAGLE-3.1's switches. They are written only when on: a reader that does not know them then still reads a plain head right.
SWITCHES = ("fc_norm", "norm_output")

#: field → (the only value that this head can carry, why another one is refused)
_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the head's MLP is SwiGLU"),
    "num_hidden_layers": (1, "the head has one decoder layer"),
    "num_aux_hidden_states": (3, "the head reads three aux states"),
    "tie_word_embeddings": (False, "the head has an lm_head of its own"),
    "attention_bias": (False, "the head's projections have no bias"),
    "qkv_bias": (False, "the head's projections have no bias"),
    "mlp_bias": (False, "the head's projections have no bias"),
    "bias": (False, "the head's projections have no bias"),
    "norm_before_fc": (
        False,
        "one norm over the joined aux states is not supported, `fc_norm` over each of them is",
    ),
    "norm_before_residual": (False, "the head's residual stream is un-normed"),
}


def layer_config(shape: HeadShape) -> dict[str, Any]:
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
    for name, (value, reason) in _FIXED.items():
        found = body.get(name)
        if found is not None and found != value:
            raise HeadError(
                f"{name} is {found!r}: {reason}",
                where=where,
                fix=f"import a head with {name} {value!r}",
            )
    wide, hidden = body.get("target_hidden_size"), body.get("hidden_size")
    if wide is not None and wide != hidden:
        problem = f"target_hidden_size {wide} differs from hidden_size {hidden}: the head borrows the target's embedding, so both are one"
        raise HeadError(problem, where=where, fix="import a head of the target's width")


def shape_fields(body: dict[str, Any], where: str) -> HeadShape:
    """The shape that `body` describes, with the defaults that transformers' Llama configuration has. Raises HeadError."""
    heads, hidden, vocabulary = (
        _whole(body, name, where) for name in ("num_attention_heads", "hidden_size", "vocab_size")
    )
    fields = {
        name: body[name]
        for name in ("intermediate_size", "rms_norm_eps", "max_position_embeddings")
        if body.get(name) is not None
    }
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
    try:
        return HeadShape.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        problem = (
            f"lacks {name}"
            if first["type"] == "missing"
            else f"garbles {name}: {first['msg']}, got {first['input']!r}"
        )
        raise HeadError(
            problem, where=where, fix=f"write {name}, or export the head again"
        ) from error


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in every spelling that readers look for.

    transformers ≥ 5 reads `rope_parameters`; older readers and converters read only a top-level
    `rope_theta`, which they take for 10000 when it is absent, and `rope_scaling`.
    """
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
        **({"rope_scaling": scaling} if scaled else {}),
    }


def rope_parameters(body: dict[str, Any], where: str) -> dict[str, Any]:
    """The rotary parameters of a config.json in either spelling. Raises HeadError when the two disagree."""
    theta = body.get("rope_theta")
    parameters = body.get("rope_parameters") or body.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise HeadError(
            f"rope_parameters is no mapping: {parameters!r}",
            where=where,
            fix="write rope_type and rope_theta",
        )
    inner = parameters.get("rope_theta")
    if theta is not None and inner is not None and float(theta) != float(inner):
        problem = f"rope_theta {theta} contradicts rope_parameters.rope_theta {inner}"
        raise HeadError(
            problem,
            where=where,
            fix="write the value that the head was trained with in both places",
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    found = {name: value for name, value in parameters.items() if name != "type"}
    # Without either, transformers' Llama configuration means 10000, and so do the loaders that build on it.
    return {**found, "rope_type": kind, "rope_theta": float(inner or theta or 10000.0)}


def layer_ids(found: Any, where: str, name: str, *, offset: int) -> tuple[int, int, int] | None:
    """Output indices from the ids of a dialect that counts `offset` higher; None when it names none."""
    if not found:
        return None
    if (
        not isinstance(found, list)
        or not all(isinstance(layer, int) for layer in found)
        or len(found) != 3
    ):
        raise HeadError(
            f"{name} is {found!r}: the head reads three aux states",
            where=where,
            fix="write the ids of three layers",
        )
    low, middle, high = (layer - offset for layer in found)
    if not 0 <= low < middle < high:
        problem = f"{name} is {found!r}: with ids that mean layer id - {offset}, these are no ascending layers"
        raise HeadError(
            problem, where=where, fix="write the ids low to high; fc's columns follow that order"
        )
    return low, middle, high


def _whole(body: dict[str, Any], name: str, where: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or value <= 0:
        raise HeadError(
            f"lacks {name}" if value is None else f"{name} is {value!r}",
            where=where,
            fix=f"write {name} as a positive number",
        )
    return value
