"""SGLang's dialect, `LlamaForCausalLMEagle3`, which is also our own head directory.

Tensors: fc, midlayer.*, norm, lm_head, d2t, t2d; no embedding, since SGLang sets the target's.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import HeadError
from pipeline.heads.eagle3.shape import HeadShape
from pipeline.heads.fields import (
    EAGLE3_RULES,
    LAYER_FIELDS,
    SWITCHES,
    Layers,
    architectures_of,
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
from pipeline.records import CAPTURE_CONVENTION, TargetContract

ARCHITECTURE = "LlamaForCausalLMEagle3"


#: The same class under vLLM's name, and as SafeAILab's trainer writes its target's.
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")


_MODEL_TYPES = ("llama", "qwen2", "phi3")


_SECTION, _LAYERS = "eagle_config", "eagle_aux_hidden_state_layer_ids"


_READ = ("architectures", "model_type", "draft_vocab_size", "use_aux_norm", _LAYERS, _SECTION)


_ONE_LAYER = only(1, None, reason="the head has one layer, and drafts a token a step")


#: What ModelOpt writes, most of it inside `eagle_config`.
_EAGLE_RULES = {
    "aux_layer_convention": only(CAPTURE_CONVENTION, reason="ids are read as output indices"),
    "use_aux_hidden_state": only(True, reason="an EAGLE-3 head reads aux states"),
    "use_input_layernorm_in_first_layer": only(True, reason="the head norms its embedding"),
    "use_last_layernorm": only(True, reason="the head norms what lm_head reads"),
    "use_mtp_layernorm": only(False, reason="the head norms its hidden state inside the layer"),
    "next_layer_regular": only(True, reason="the head has no layer of another kind"),
    "has_lm_head": only(True, reason="the head has an lm_head of its own"),
    "eagle_decoder_type": only("llama", reason="the head's layer is a Llama layer"),
    "parallel_draft_step": _ONE_LAYER,
    "parallel_draft_heads_num_layers": only(0, 1, reason="the head has no parallel heads"),
}


def sglang_config(shape: HeadShape, contract: TargetContract) -> dict[str, Any]:
    """config.json with all fields that SGLang, SpecForge and vLLM read in a head of this dialect.

    The layers are written twice. Inside `eagle_config` they are output indices: SGLang adds one to
    reach the layer that the state enters. At the top level they are already one higher: vLLM looks
    there first and takes them as the layers that the states enter.
    """
    return {
        "architectures": [ARCHITECTURE],
        **layer_config(shape),
        **window_fields(shape.draft_window),
        "draft_vocab_size": shape.draft_vocab_size,
        **{name: value for name in SWITCHES if (value := getattr(shape, name))},
        _LAYERS: [layer + 1 for layer in contract.capture_layers],
        "eagle_config": {
            _LAYERS: list(contract.capture_layers),
            "aux_layer_convention": CAPTURE_CONVENTION,
            "use_aux_hidden_state": True,
        },
    }


def read_config(body: dict[str, Any], where: str) -> tuple[HeadShape, Layers | None]:
    """Shape and aux layers (output indices; None: the loaders' default). Raises HeadError."""
    _check_kind(body, where)
    body = without_window_fields(body, body.get("draft_window"))
    eagle = section(body, "eagle_config", where)
    read = (*LAYER_FIELDS, *SWITCHES, *_READ)
    refuse_unknown(body, where, read=read, rules={**EAGLE3_RULES, **_EAGLE_RULES})
    refuse_unknown(
        eagle, where, read=(_LAYERS,), rules={**EAGLE3_RULES, **_EAGLE_RULES}, prefix=f"{_SECTION}."
    )
    check_layer_types(body, where)
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
    return shape_fields(HeadShape, {**body, "fc_norm": old if new is None else new}, where), (
        inside or top
    )


def _check_kind(body: dict[str, Any], where: str) -> None:
    """Raise HeadError for another class than the one whose maths these are."""
    architectures = architectures_of(body, where)
    if architectures and not set(architectures) & set(_ARCHITECTURES):
        problem = f"architectures is {architectures}"
        raise HeadError(problem, where=where, fix=f"use a head of {', '.join(_ARCHITECTURES)}")
    # The class builds a Llama layer; a trainer may still write its target's type. Of these, the
    # configuration's defaults are the same, and tensors of another layer would be surplus.
    if body.get("model_type", "llama") not in _MODEL_TYPES:
        fix = "use a head whose layer is a Llama layer"
        raise HeadError(f"model_type is {body['model_type']!r}", where=where, fix=fix)
