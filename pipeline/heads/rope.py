"""Rotary parameters of a config.json, in all their spellings, as transformers would compute them.

    rope_theta: 1e6                                          the base
    rope_scaling: {type | rope_type, factor, …}              transformers < 5
    rope_parameters: {rope_type, rope_theta, factor, …}      transformers ≥ 5, also by layer type

A reader that meets a type without its parameters invents them or leaves the scaling out, each in
its own way. Here a missing, unknown, contradicting or wrongly typed one is a HeadError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.errors import HeadError

#: Without a base, transformers' Llama configuration means this, and so do the loaders built on it.
DEFAULT_THETA = 10000.0


#: Other names of a type. `mrope` turns text by one position, as the default does.
_ALIASES = {"mrope": "default", "su": "longrope"}


#: How images and videos are turned; nothing to a head, which reads text.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


_ORIGINAL = "original_max_position_embeddings"


_TRAINED = "write the value that the head was trained with"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_factors(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(each) and each > 0 for each in value)


class Parameter(NamedTuple):
    """What a parameter can be."""

    fits: Callable[[Any], bool]
    meaning: str


_POSITIVE = Parameter(lambda value: _is_number(value) and value > 0, "a positive number")


_FACTORS = Parameter(_are_factors, "a list of positive numbers")


_PARAMETERS = {
    "factor": Parameter(lambda value: _is_number(value) and value >= 1, "a number of at least 1"),
    _ORIGINAL: Parameter(_is_count, "a positive integer"),
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "mscale": Parameter(lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "mscale_all_dim": Parameter(
        lambda value: _is_number(value) and value >= 0, "a number of at least 0"
    ),
    "truncate": Parameter(lambda value: isinstance(value, bool), "true or false"),
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
}


#: type → (parameters that it needs, parameters that it may have)
_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "proportional": ((), ("factor",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "longrope": (("short_factor", "long_factor", _ORIGINAL), ("factor", "attention_factor")),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


#: Top-level fields that `rope_parameters` reads.
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL)


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in every spelling that readers look for.

    transformers ≥ 5 reads `rope_parameters`; older readers and converters read only a top-level
    `rope_theta`, which they take for 10000 when it is absent, and `rope_scaling`.
    """
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    fields = {"rope_theta": rope.get("rope_theta", DEFAULT_THETA), "rope_parameters": rope}
    if scaling.get("rope_type", "default") != "default":
        fields["rope_scaling"] = scaling
    return fields


def rope_of_target(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a head takes over of its target's: a type's own parameters, for whole heads and text."""
    kind = _ALIASES.get(str(parameters.get("rope_type")), parameters.get("rope_type"))
    if kind not in _TYPES:
        return dict(parameters)
    known = ("rope_theta", *(name for names in _TYPES[kind] for name in names))
    known_values = {name: parameters[name] for name in known if parameters.get(name) is not None}
    return {"rope_type": kind, **known_values}


def rope_parameters(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the type's own parameters, from either spelling.

    Raises HeadError for a type that is not supported, a parameter that is missing, unknown or of
    the wrong type, and spellings that contradict each other.
    """
    bases = {"rope_theta": body.get("rope_theta")}
    spelled: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if (spelling := _mapping(body, name, where)) is not None:
            field, parameters = spelling
            bases[f"{field}.rope_theta"] = parameters.pop("rope_theta", None)
            if parameters:
                spelled[field] = _of_type(parameters, body.get(_ORIGINAL), field, where)
    first, *others = [*spelled.items()] or [("", {"rope_type": "default"})]
    for field, parameters in others:
        if parameters != first[1]:
            problem = f"{field} {parameters} contradicts {first[0]} {first[1]}"
            raise HeadError(problem, where=where, fix=f"{_TRAINED} in both places")
    return {**first[1], "rope_theta": _base(bases, where)}


def _base(bases: Mapping[str, Any], where: str) -> float:
    stated = {name: value for name, value in bases.items() if value is not None}
    for name, value in stated.items():
        if not _POSITIVE.fits(value):
            problem = f"{name} is {value!r}, not a positive number"
            raise HeadError(problem, where=where, fix=_TRAINED)
    first, *others = [*stated.items()] or [("", DEFAULT_THETA)]
    for name, value in others:
        if float(value) != float(first[1]):
            problem = f"{first[0]} {first[1]} contradicts {name} {value}"
            raise HeadError(problem, where=where, fix=f"{_TRAINED} in both places")
    return float(first[1])


def _mapping(body: Mapping[str, Any], name: str, where: str) -> tuple[str, dict[str, Any]] | None:
    """A field's name and what it holds; of parameters by layer type, those of full attention."""
    value = body.get(name)
    if value is None or value == {}:
        return None
    if isinstance(value, dict) and all(isinstance(each, dict) for each in value.values()):
        name, value = f"{name}.full_attention", value.get("full_attention")
    if not isinstance(value, dict):
        problem = f"{name} is {value!r}, not a mapping"
        raise HeadError(problem, where=where, fix="write rope_type and rope_theta")
    return name, {key: each for key, each in value.items() if each is not None}


def _of_type(parameters: dict[str, Any], original: Any, field: str, where: str) -> dict[str, Any]:
    """The type under its present name and its parameters, checked."""
    kind = _type(parameters, field, where)
    others = {
        name: value for name, value in parameters.items() if name not in ("type", "rope_type")
    }
    if kind == "default":
        others = {name: value for name, value in others.items() if name not in _OF_IMAGES}
    if others.pop("partial_rotary_factor", 1) != 1:
        value = parameters["partial_rotary_factor"]
        problem = f"{field}.partial_rotary_factor is {value!r}: this head turns whole heads"
        raise HeadError(problem, where=where, fix="use a head with partial_rotary_factor 1")
    needed, optional = _TYPES[kind]
    # Some trainers, as Phi-3's configuration, write it beside the mapping and not in it.
    if original is not None and _ORIGINAL in needed:
        if others.setdefault(_ORIGINAL, original) != original:
            problem = f"{field}.{_ORIGINAL} {others[_ORIGINAL]} contradicts {_ORIGINAL} {original}"
            raise HeadError(problem, where=where, fix=f"{_TRAINED} in both places")
    elif _ORIGINAL not in needed:
        others.pop(_ORIGINAL, None)  # no reader of this type looks at it
    if kind == "default" and others.get("factor") == 1:
        del others["factor"]
    if missing := [name for name in needed if name not in others]:
        problem = f"{field} lacks {', '.join(missing)}, which rope_type {kind} needs"
        raise HeadError(problem, where=where, fix=_TRAINED)
    for name, value in others.items():
        if name not in needed and name not in optional:
            problem = f"{field}.{name} is {value!r}: rope_type {kind} has no such parameter"
            fix = "correct rope_type, or take the parameter out if the head was trained without"
            raise HeadError(problem, where=where, fix=fix)
        if not _PARAMETERS[name].fits(value):
            problem = f"{field}.{name} is {value!r}, not {_PARAMETERS[name].meaning}"
            raise HeadError(problem, where=where, fix=_TRAINED)
    _check_order(others, field, where)
    return {"rope_type": kind, **others}


def _type(parameters: Mapping[str, Any], field: str, where: str) -> str:
    names = [parameters[name] for name in ("rope_type", "type") if name in parameters]
    kinds = {_ALIASES.get(name, name) if isinstance(name, str) else repr(name) for name in names}
    if not kinds:
        scaled = sorted(parameters.keys() - {*_OF_IMAGES, _ORIGINAL, "partial_rotary_factor"})
        if scaled:
            problem = f"{field} has {', '.join(scaled)} and no rope_type"
            raise HeadError(problem, where=where, fix="write the rope_type of its training")
        return "default"
    if len(kinds) > 1:
        problem = f"{field}.rope_type {names[0]!r} contradicts {field}.type {names[1]!r}"
        raise HeadError(problem, where=where, fix=f"{_TRAINED} in both places")
    (kind,) = kinds
    if kind not in _TYPES:
        problem = f"{field}.rope_type is {names[0]!r}, which is not supported"
        fix = f"use a head of one of {', '.join((*_TYPES, *_ALIASES))}"
        raise HeadError(problem, where=where, fix=fix)
    return kind


def _check_order(parameters: Mapping[str, Any], field: str, where: str) -> None:
    """Raise HeadError for pairs that are the wrong way round: what lies between them is empty."""
    defaults = {"beta_fast": 32, "beta_slow": 1}
    pairs = ("low_freq_factor", "high_freq_factor", True), ("beta_slow", "beta_fast", False)
    for low, high, apart in pairs:
        if low not in parameters and high not in parameters:
            continue
        less, more = (parameters.get(name, defaults.get(name)) for name in (low, high))
        if less > more or (apart and less == more):
            problem = f"{field}.{high} {more} is not above {field}.{low} {less}"
            raise HeadError(problem, where=where, fix=_TRAINED)


def check_rotary(rope: Mapping[str, Any], config: Any, head_dim: int, where: str) -> None:
    """Raise HeadError where transformers cannot compute a rotary table of these parameters.

    config: a transformers configuration that carries them, of one head of `head_dim`.
    """
    for name in ("short_factor", "long_factor"):
        if name in rope and len(rope[name]) != head_dim // 2:
            problem = f"{name} has {len(rope[name])} numbers, a head of {head_dim} needs"
            raise HeadError(f"{problem} {head_dim // 2}", where=where, fix=_TRAINED)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        rotary = LlamaRotaryEmbedding(config=config())
        sound = bool(rotary.inv_freq.isfinite().all()) and _is_number(rotary.attention_scaling)
        reason = "" if sound else "it is not finite"
    except Exception as error:  # transformers and its checks raise many kinds
        reason = f"{type(error).__name__}: {error}"
    if reason:
        problem = f"rope_parameters {dict(rope)} give no rotary table: {' '.join(reason.split())}"
        raise HeadError(problem, where=where, fix=_TRAINED)
