"""The dialect of speculators and, through it, vLLM: `Eagle3Speculator`.

Tensors: embed_tokens, fc, layers.0.*, norm, lm_head, d2t, t2d. The embedding is the target's: a
reader that finds none fills it from the verifier when it can reach one, and otherwise with noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.errors import HeadError
from pipeline.heads.algorithm import Export
from pipeline.heads.checkpoint import HeadCard, write_files
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.fields import (
    EAGLE3_RULES,
    LAYER_FIELDS,
    SWITCHES,
    Layers,
    Rule,
    check_layer_types,
    layer_config,
    layer_ids,
    only,
    refuse_unknown,
    section,
    shape_fields,
    window_fields,
    without_window_fields,
)
from pipeline.heads.speculators import (
    HOW_TO_DRAFT,
    LAYER,
    MODEL_TYPE,
    SETTINGS,
    drafting_section,
)
from pipeline.records import TargetContract

EMBEDDING = "embed_tokens.weight"


_LAYERS = "eagle_aux_hidden_state_layer_ids"


_CONVENTION = "entering-layer"  # id i + 1 is the stream that enters layer i + 1, our output index i


#: Honoured, or facts about the file and its training.
_READ = (
    *(MODEL_TYPE, "draft_vocab_size", _LAYERS, LAYER, SETTINGS),
    *("architectures", "model_type", "speculators_version", "embed_requires_grad"),
)


_TOP_RULES = {
    **EAGLE3_RULES,
    "aux_layer_convention": only(_CONVENTION, reason="ids are read as layers that a state enters"),
}


_ALGORITHM = {"algorithm": only("eagle3", reason="the head is an EAGLE-3 head")}


def speculators_config(
    shape: HeadShape, contract: TargetContract, drafting: dict[str, Any]
) -> dict[str, Any]:
    """config.json for speculators ≥ 0.3 and vLLM; `drafting` is its `speculators_config`."""
    return {
        "architectures": ["Eagle3Speculator"],
        MODEL_TYPE: "eagle3",
        "draft_vocab_size": shape.draft_vocab_size,
        # vLLM takes its absence for true, speculators for false.
        "norm_before_residual": False,
        "norm_before_fc": False,
        **{name: value for name in SWITCHES if (value := getattr(shape, name))},
        "embed_requires_grad": False,
        _LAYERS: [layer + 1 for layer in contract.capture_layers],
        "aux_layer_convention": _CONVENTION,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        SETTINGS: drafting,
        LAYER: {**layer_config(shape), **window_fields(shape.draft_window)},
    }


def speculators_tensors(tensors: Mapping[str, Tensor], embedding: Tensor) -> dict[str, Tensor]:
    """Our tensors under that dialect's names, with the target's embedding [V, H].

    A head over the whole vocabulary has no map there.
    """
    whole_vocabulary = len(tensors["d2t"]) == len(tensors["t2d"])
    left_out = ("d2t", "t2d") if whole_vocabulary else ()
    renamed = {
        _replace_prefix(name, "midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if name not in left_out
    }
    return {**renamed, EMBEDDING: embedding}


def head_name(name: str) -> str:
    """`layers.0.mlp.up_proj.weight` → `midlayer.mlp.up_proj.weight`; other names are the same."""
    return _replace_prefix(name, "layers.0.", "midlayer.")


def _replace_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def read_config(body: dict[str, Any], where: str) -> tuple[HeadShape, Layers | None]:
    """Shape and aux layers (output indices; None: the loaders' default). Raises HeadError."""
    kind = body[MODEL_TYPE]
    if kind != "eagle3":
        problem = f"{MODEL_TYPE} is {kind!r}"
        raise HeadError(problem, where=where, fix="import a head of type eagle3")
    layer = without_window_fields(section(body, LAYER, where), body.get("draft_window"))
    if not layer:
        fix = "save the head again with speculators"
        raise HeadError(f"lacks {LAYER}", where=where, fix=fix)
    # Without a type, speculators builds a Qwen3 layer, whose queries and keys are normed.
    if layer.get("model_type") != "llama":
        problem = f"{LAYER}.model_type is {layer.get('model_type')!r}"
        raise HeadError(problem, where=where, fix="import a head whose layer is a Llama layer")
    if body.get("norm_before_residual") is None:
        problem = "norm_before_residual is missing: vLLM takes that for true, speculators for false"
        raise HeadError(problem, where=where, fix="write the value that the head was trained with")
    # Two fields of the top level compare with the layer's.
    sizes = {name: layer.get(name) for name in ("hidden_size", "vocab_size")}
    refuse_unknown(
        {**{name: None for name in sizes}, **body},
        where,
        read=(*SWITCHES, *_READ),
        rules={**_TOP_RULES, **_sized(sizes)},
    )
    settings = section(body, SETTINGS, where)
    refuse_unknown(settings, where, read=HOW_TO_DRAFT, rules=_ALGORITHM, prefix=f"{SETTINGS}.")
    refuse_unknown(
        layer,
        where,
        read=(*LAYER_FIELDS, "model_type", "architectures"),
        rules={**EAGLE3_RULES, "draft_vocab_size": _equal(body, "draft_vocab_size")},
        prefix=f"{LAYER}.",
    )
    check_layer_types(layer, where, prefix=f"{LAYER}.")
    layers = layer_ids(body.get(_LAYERS), where, _LAYERS, offset=1)
    top_level = {name: body.get(name) for name in ("draft_vocab_size", *SWITCHES)}
    return shape_fields(HeadShape, {**layer, **top_level}, where), layers


def _equal(body: Mapping[str, Any], name: str) -> Rule:
    return only(body.get(name), reason=f"it contradicts the top level's {body.get(name)}")


def _sized(sizes: Mapping[str, Any]) -> dict[str, Rule]:
    """Of fields that name the target's sizes, which are the layer's."""
    return {
        "target_hidden_size": only(
            sizes["hidden_size"],
            reason=f"differs from hidden_size {sizes['hidden_size']}: "
            "the head borrows the target's embedding",
        ),
        "target_vocab_size": only(
            sizes["vocab_size"], reason=f"differs from vocab_size {sizes['vocab_size']}"
        ),
    }


#: What vLLM drafts a round when the head does not say how far it was unrolled.
_SPECULATIVE_TOKENS = 3


def export_speculators(folder: Path, head: Eagle3Head, card: HeadCard, request: Export) -> None:
    """Write `head` as speculators and vLLM read it, with its card beside it."""
    target = request.target()
    steps = card.provenance.get("config", {}).get("train", {}).get("ttt_steps")
    tokens = steps if isinstance(steps, int) and steps > 0 else _SPECULATIVE_TOKENS
    drafting = drafting_section("eagle3", tokens, target, request)
    config = speculators_config(head.shape, card.contract, drafting)
    tensors = speculators_tensors(head.state_dict(), target.weights.embedding())
    write_files(folder, config, tensors, card)
