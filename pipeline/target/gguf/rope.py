"""A GGUF file's rotary scaling as transformers' `rope_parameters`.

rope.scaling.type       none, linear or yarn, with their numbers
rope_freqs.weight       each frequency is divided by it: how converters store Llama 3.1's scaling
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pipeline.errors import TargetError

FREQUENCIES = "rope_freqs.weight"
_SCALING = "rope.scaling."
#: Longest lengths that Llama 3's scaling is searched for: powers of two.
_LENGTHS = [1 << bits for bits in range(4, 21)]


def rope_parameters(
    metadata: dict[str, Any], factors: Any | None, *, head_dim: int, positions: int, where: str
) -> dict[str, Any] | None:
    """What config.json has to say; None where plain rotary positions are right.

    `metadata` is by names without the architecture, `factors` the tensor [d/2] that frequencies are
    divided by. Raises TargetError for a scaling that transformers does not compute.
    """
    theta = float(metadata.get("rope.freq_base", 10000.0))
    scaled = _scaling(metadata, where)
    if factors is None:
        return None if scaled is None else {"rope_theta": theta, **scaled}
    factors = np.asarray(factors, dtype=np.float64).reshape(-1)
    if scaled is not None or len(factors) != head_dim // 2 or not (factors > 0).all():
        problem = f"{FREQUENCIES} holds {len(factors)} factors for heads of {head_dim}"
        problem += f" beside rope.scaling.type={scaled['rope_type']}" if scaled else ""
        raise TargetError(f"{problem}: it cannot be applied", where=where, fix=_FIX)
    if np.allclose(factors, 1.0, rtol=1e-6, atol=0):
        return None
    known = _llama3(factors, theta, head_dim)
    return {"rope_theta": theta, **(known or _exact(factors, positions))}


def _scaling(metadata: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Of the keys, without theta. Raises TargetError for one that is not known."""
    given = {
        name.removeprefix(_SCALING): value
        for name, value in metadata.items()
        if name.startswith(_SCALING) and name != f"{_SCALING}finetuned"
    }
    kind = given.pop("type", None)
    factor = given.pop("factor", None)
    if (legacy := metadata.get("rope.scale_linear")) is not None:
        kind, factor = kind or "linear", factor if factor is not None else legacy
    length = given.pop("original_context_length", None)
    strength = given.pop("attn_factor", None), given.pop("yarn_attn_factor", None)
    extrapolation = given.pop("yarn_ext_factor", None)
    betas = {
        name: float(given.pop(f"yarn_{name}"))
        for name in ("beta_fast", "beta_slow")
        if f"yarn_{name}" in given
    }
    plain = all(each in (None, 1.0) for each in (*strength, extrapolation))
    if not given and plain:
        if kind in (None, "none") and not betas and factor in (None, 0.0, 1.0):
            return None
        if kind == "linear" and factor and not betas:
            # A factor of 1 turns no frequency.
            return None if factor == 1.0 else {"rope_type": "linear", "factor": float(factor)}
        if kind == "yarn" and factor and length:
            return {
                "rope_type": "yarn",
                "factor": float(factor),
                "original_max_position_embeddings": int(length),
                **betas,
            }
    named = {name: metadata[name] for name in metadata if name.startswith(("rope.scal",))}
    shown = ", ".join(f"{name}={value}" for name, value in sorted(named.items()))
    raise TargetError(f"{shown} cannot be applied", where=where, fix=_FIX)


def _llama3(factors: Any, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The parameters that give these factors to the precision of a float32, where there are any."""
    factor = float(factors.max())
    lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # of a whole turn
    for original in _LENGTHS:
        share = (original / lengths - 1.0) / (4.0 - 1.0)
        middle = 1 / ((1 - share) / factor + share)
        expected = np.where(
            lengths < original / 4.0, 1.0, np.where(lengths > original, factor, middle)
        )
        if np.allclose(factors, expected, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    return None


def _exact(factors: Any, positions: int) -> dict[str, Any]:
    """The factors as they are, for texts of every length."""
    listed = [float(each) for each in factors]
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": positions,
    }
