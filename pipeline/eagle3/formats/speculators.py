"""The dialect of speculators and, through it, vLLM: `Eagle3Speculator`.

Tensors: embed_tokens, fc, layers.0.*, norm, lm_head, d2t, t2d. The embedding is the target's: a
reader that finds none fills it from the verifier when it can reach one, and otherwise with noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeline.eagle3.formats.fields import (
    SWITCHES,
    layer_config,
    layer_ids,
    refuse_unsupported,
    shape_fields,
)
from pipeline.eagle3.head import HeadShape
from pipeline.errors import HeadError
from pipeline.records import TargetContract

#: Its presence tells this dialect from the other.
MARK = "speculators_model_type"
EMBEDDING = "embed_tokens.weight"
_CONVENTION = "entering-layer"  # id i + 1 is the stream that enters layer i + 1, our output index i


def speculators_config(
    shape: HeadShape,
    contract: TargetContract,
    *,
    verifier: str,
    architectures: Sequence[str],
    speculative_tokens: int,
) -> dict[str, Any]:
    """config.json for speculators ≥ 0.3 and vLLM.

    verifier: hub id or path of the target; architectures: those of its config.json;
    speculative_tokens: how many tokens vLLM drafts a round unless told otherwise.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        MARK: "eagle3",
        "draft_vocab_size": shape.draft_vocab_size,
        # vLLM takes its absence for true, speculators for false.
        "norm_before_residual": False,
        "norm_before_fc": False,
        **{name: True for name in SWITCHES if getattr(shape, name)},
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in contract.capture_layers],
        "aux_layer_convention": _CONVENTION,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer_config(shape),
    }


def speculators_tensors(tensors: Mapping[str, Tensor], embedding: Tensor) -> dict[str, Tensor]:
    """Our tensors under that dialect's names, with the target's embedding [V, H].

    A head over the whole vocabulary has no map there.
    """
    whole = len(tensors["d2t"]) == len(tensors["t2d"])
    named = {
        theirs_of(name): tensor
        for name, tensor in tensors.items()
        if not (whole and name in ("d2t", "t2d"))
    }
    return {**named, EMBEDDING: embedding}


def theirs_of(name: str) -> str:
    """`midlayer.mlp.up_proj.weight` → `layers.0.mlp.up_proj.weight`; other names are the same."""
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def ours_of(name: str) -> str:
    """The way back."""
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def read_config(body: dict[str, Any], where: str) -> tuple[HeadShape, tuple[int, int, int] | None]:
    """Shape and aux layers (output indices; None: the loaders' default). Raises HeadError."""
    kind, layer = body[MARK], body.get("transformer_layer_config")
    if kind != "eagle3":
        raise HeadError(f"{MARK} is {kind!r}", where=where, fix="import a head of type eagle3")
    if not isinstance(layer, dict):
        raise HeadError(
            "lacks transformer_layer_config",
            where=where,
            fix="save the head again with speculators",
        )
    # Without a type, speculators builds a Qwen3 layer, whose queries and keys are normed.
    if layer.get("model_type") != "llama":
        problem = f"transformer_layer_config.model_type is {layer.get('model_type')!r}"
        raise HeadError(problem, where=where, fix="import a head whose layer is a Llama layer")
    if body.get("norm_before_residual") is None:
        problem = "norm_before_residual is missing: vLLM takes that for true, speculators for false"
        raise HeadError(problem, where=where, fix="write the value that the head was trained with")
    refuse_unsupported(body, where)
    refuse_unsupported(
        {**layer, "target_hidden_size": body.get("target_hidden_size")},
        f"{where}: transformer_layer_config",
    )
    ids = layer_ids(
        body.get("eagle_aux_hidden_state_layer_ids"),
        where,
        "eagle_aux_hidden_state_layer_ids",
        offset=1,
    )
    own = {name: body.get(name) for name in ("draft_vocab_size", *SWITCHES)}
    return shape_fields({**layer, **own}, where), ids
