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
    eagle3_shape,
    eagle3_windows,
    layer_config,
    layer_ids,
    only,
    refuse_unknown,
    section,
    shape_fields,
    untied,
    window_fields,
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
    "target_hidden_size",
)


#: What `layers.0` is → whether it norms queries and keys.
_LAYER_TYPES = {"llama": False, "qwen3": True}


_TOP_RULES = {
    **EAGLE3_RULES,
    "aux_layer_convention": only(_CONVENTION, reason="ids are read as layers that a state enters"),
}


#: Of the layers, beside the fields of any.
_OF_LAYERS = ("num_hidden_layers", "attention_bias")


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
        **({"target_hidden_size": shape.target_hidden_size} if shape.target_hidden_size else {}),
        "embed_requires_grad": False,
        _LAYERS: [layer + 1 for layer in contract.capture_layers],
        "aux_layer_convention": _CONVENTION,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        SETTINGS: drafting,
        LAYER: _layer_config(shape),
    }


def _layer_config(shape: HeadShape) -> dict[str, Any]:
    layers, window = shape.num_hidden_layers, shape.sliding_window or shape.draft_window
    return {
        **layer_config(shape),
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "num_hidden_layers": layers,
        "attention_bias": shape.attention_bias,
        **(window_fields(window, range(layers), layers) if window else {}),
    }


def speculators_tensors(tensors: Mapping[str, Tensor], embedding: Tensor) -> dict[str, Tensor]:
    """Our tensors under that dialect's names, with an embedding [V, H]: the target's, unless the
    head has its own.

    A head over the whole vocabulary has no map there.
    """
    whole_vocabulary = len(tensors["d2t"]) == len(tensors["t2d"])
    left_out = ("d2t", "t2d") if whole_vocabulary else ()
    renamed = {
        _replace_prefix(name, "midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if name not in left_out
    }
    return {EMBEDDING: embedding, **renamed}


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
    layer = section(body, LAYER, where)
    if not layer:
        fix = "save the head again with speculators"
        raise HeadError(f"lacks {LAYER}", where=where, fix=fix)
    # Without a type, speculators builds a Qwen3 layer, vLLM a Llama layer.
    if layer.get("model_type") not in _LAYER_TYPES:
        problem = f"{LAYER}.model_type is {layer.get('model_type')!r}"
        fix = f"import a head whose layers are of type {' or '.join(_LAYER_TYPES)}"
        raise HeadError(problem, where=where, fix=fix)
    if body.get("norm_before_residual") is None:
        problem = "norm_before_residual is missing: vLLM takes that for true, speculators for false"
        raise HeadError(problem, where=where, fix="write the value that the head was trained with")
    # Two fields of the top level compare with the layer's.
    vocabulary = layer.get("vocab_size")
    tie = untied(vocabulary, body.get("draft_vocab_size"))
    differs = only(vocabulary, reason=f"differs from vocab_size {vocabulary}")
    refuse_unknown(
        {"vocab_size": None, **body},
        where,
        read=(*SWITCHES, *_READ),
        rules={**_TOP_RULES, **tie, "target_vocab_size": differs},
    )
    settings = section(body, SETTINGS, where)
    refuse_unknown(settings, where, read=HOW_TO_DRAFT, rules=_ALGORITHM, prefix=f"{SETTINGS}.")
    window, prefix = body.get("draft_window"), f"{LAYER}."
    sliding, windows = eagle3_windows(layer, where, draft_window=window, prefix=prefix)
    refuse_unknown(
        layer,
        where,
        read=(*LAYER_FIELDS, "model_type", "architectures", *_OF_LAYERS, *windows),
        rules={**EAGLE3_RULES, **tie, "draft_vocab_size": _equal(body, "draft_vocab_size")},
        prefix=prefix,
    )
    layers = layer_ids(body.get(_LAYERS), where, _LAYERS, offset=1)
    top = ("draft_vocab_size", "target_hidden_size", *SWITCHES)
    fields = {**layer, **{name: body.get(name) for name in top}, "sliding_window": sliding}
    fields["qk_norm"] = _LAYER_TYPES[layer["model_type"]]
    return shape_fields(HeadShape, {**fields, **eagle3_shape(fields, layers, where)}, where), layers


def _equal(body: Mapping[str, Any], name: str) -> Rule:
    return only(body.get(name), reason=f"it contradicts the top level's {body.get(name)}")


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
