"""SGLang's dialect, `LlamaForCausalLMEagle3`, which is also our own head directory.

Tensors: fc, midlayer.*, norm, lm_head, d2t, t2d; no embedding, since SGLang sets the target's.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import HeadError
from pipeline.heads.eagle3.shape import HeadShape
from pipeline.heads.fields import (
    EAGLE3_FIELDS,
    EAGLE3_RULES,
    LAYER_FIELDS,
    SWITCHES,
    Layers,
    architectures_of,
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
from pipeline.records import CAPTURE_CONVENTION

ARCHITECTURE = "LlamaForCausalLMEagle3"


#: vLLM's names of that class, and of one whose layers are Qwen3's.
OF_VLLM, _VLLM_QWEN3 = "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"


#: Of EAGLE-3 heads alone.
CLASSES = (ARCHITECTURE, OF_VLLM, _VLLM_QWEN3)


#: The last one as SafeAILab's trainer writes its target's.
_ARCHITECTURES = (*CLASSES, "LlamaForCausalLM")


_MODEL_TYPES = ("llama", "qwen2", "phi3")


_SECTION, _LAYERS = "eagle_config", "eagle_aux_hidden_state_layer_ids"


_READ = ("architectures", "model_type", "draft_vocab_size", "use_aux_norm", _LAYERS, _SECTION)


#: What may stand inside `eagle_config` as well.
_INSIDE = ("norm_before_fc", "num_aux_hidden_states", "target_hidden_size")


_SIZES = ("target_hidden_size", "own_embedding")


#: What ModelOpt writes, most of it inside `eagle_config`.
_EAGLE_RULES = {
    "aux_layer_convention": only(CAPTURE_CONVENTION, reason="ids are read as output indices"),
    "use_aux_hidden_state": only(True, reason="an EAGLE-3 head reads aux states"),
    "use_input_layernorm_in_first_layer": only(True, reason="the head norms its embedding"),
    "use_last_layernorm": only(True, reason="the head norms what lm_head reads"),
    "use_mtp_layernorm": only(False, reason="the head norms its hidden state inside the layer"),
    "next_layer_regular": only(True, reason="the head has no layer of another kind"),
    # The tensors say it.
    "has_lm_head": only(True, False, reason="it is true or false"),
    "eagle_decoder_type": only("llama", reason="the head's layer is a Llama layer"),
    "parallel_draft_step": only(1, reason="the head drafts a token a step"),
    "parallel_draft_heads_num_layers": only(0, 1, reason="the head has no parallel heads"),
}


def sglang_config(shape: HeadShape, capture_layers: tuple[int, ...]) -> dict[str, Any]:
    """config.json with all fields that SGLang, SpecForge and vLLM read in a head of this dialect.

    The layers are written twice. Inside `eagle_config` they are output indices: SGLang adds one to
    reach the layer that the state enters. At the top level they are already one higher: vLLM looks
    there first and takes them as the layers that the states enter.

    A head that SGLang's class would compute wrongly has the name of vLLM's, which SGLang does not
    load.
    """
    architecture = OF_VLLM if unknown_to_sglang(shape) else ARCHITECTURE
    layers, window = shape.num_hidden_layers, shape.sliding_window or shape.draft_window
    return {
        "architectures": [_VLLM_QWEN3 if shape.qk_norm else architecture],
        **layer_config(shape),
        **({"model_type": "qwen3"} if shape.qk_norm else {}),
        "num_hidden_layers": layers,
        "attention_bias": shape.attention_bias,
        **(window_fields(window, range(layers), layers) if window else {}),
        "draft_vocab_size": shape.draft_vocab_size,
        **{name: value for name in (*SWITCHES, *_SIZES) if (value := getattr(shape, name))},
        _LAYERS: [layer + 1 for layer in capture_layers],
        "eagle_config": {
            _LAYERS: list(capture_layers),
            "aux_layer_convention": CAPTURE_CONVENTION,
            "use_aux_hidden_state": True,
        },
    }


def unknown_to_sglang(shape: HeadShape) -> list[str]:
    """Fields of a shape that SGLang's class does not read, or reads as something else."""
    fields = ("norm_before_residual", "attention_bias", "qk_norm", "sliding_window")
    unknown = [name for name in fields if getattr(shape, name)]
    if shape.num_hidden_layers > 1:  # it norms what later layers read by `hidden_norm`
        unknown.append("num_hidden_layers")
    if shape.own_embedding and not shape.target_hidden_size:  # it puts the target's over it
        unknown.append("own_embedding")
    return unknown


def read_config(body: dict[str, Any], where: str) -> tuple[HeadShape, Layers | None]:
    """Shape and aux layers (output indices; None: the loaders' default). Raises HeadError."""
    qk_norm = _check_kind(body, where)
    eagle = section(body, "eagle_config", where)
    sliding, windows = eagle3_windows(body, where, draft_window=body.get("draft_window"))
    tie = untied(body.get("vocab_size"), body.get("draft_vocab_size"))
    rules = {**EAGLE3_RULES, **_EAGLE_RULES, **tie}
    read = (*LAYER_FIELDS, *SWITCHES, *_READ, *EAGLE3_FIELDS, *windows)
    refuse_unknown(body, where, read=read, rules=rules)
    refuse_unknown(eagle, where, read=(_LAYERS, *_INSIDE), rules=rules, prefix=f"{_SECTION}.")
    body = {**body, **{name: _one_of(body, eagle, name, where) for name in _INSIDE}}
    inside = layer_ids(eagle.get(_LAYERS), where, f"{_SECTION}.{_LAYERS}", offset=0)
    top = layer_ids(body.get(_LAYERS), where, _LAYERS, offset=1)
    if inside and top and inside != top:
        problem = (
            f"{_SECTION}.{_LAYERS} {list(inside)} and {_LAYERS} {body[_LAYERS]} "
            "name different layers: the latter count one higher"
        )
        raise HeadError(problem, where=where, fix="keep the list that the head was trained with")
    # `use_aux_norm` is what SGLang called `fc_norm` first, and still reads.
    new, old = body.get("fc_norm"), body.get("use_aux_norm")
    if new is not None and old is not None and new != old:
        problem = f"fc_norm {new!r} contradicts use_aux_norm {old!r}, its older name"
        raise HeadError(problem, where=where, fix="keep the value that the head was trained with")
    layers, fields = inside or top, {**body, "qk_norm": qk_norm, "sliding_window": sliding}
    fields |= {"fc_norm": old if new is None else new, **eagle3_shape(fields, layers, where)}
    return shape_fields(HeadShape, fields, where), layers


def _one_of(body: dict[str, Any], eagle: dict[str, Any], name: str, where: str) -> Any:
    """A field that may stand at the top level, in `eagle_config`, or in both."""
    inside, top = eagle.get(name), body.get(name)
    if inside is not None and top is not None and inside != top:
        problem = f"{_SECTION}.{name} {inside!r} contradicts {name} {top!r}"
        raise HeadError(problem, where=where, fix="keep the value that the head was trained with")
    return top if inside is None else inside


def _check_kind(body: dict[str, Any], where: str) -> bool:
    """Whether layers are Qwen3's, which norm queries and keys.

    Raises HeadError for another class than those whose maths these are.
    """
    architectures = architectures_of(body, where)
    if architectures and not set(architectures) & set(_ARCHITECTURES):
        problem = f"architectures is {architectures}"
        raise HeadError(problem, where=where, fix=f"use a head of {', '.join(_ARCHITECTURES)}")
    # The class builds a Llama layer; a trainer may still write its target's type. Of these, the
    # configuration's defaults are the same, and tensors of another layer would be surplus.
    qk_norm = _VLLM_QWEN3 in architectures
    if body.get("model_type", "llama") not in (("qwen3",) if qk_norm else _MODEL_TYPES):
        fix = "use a head whose layer is the one that architectures names"
        raise HeadError(f"model_type is {body['model_type']!r}", where=where, fix=fix)
    return qk_norm
