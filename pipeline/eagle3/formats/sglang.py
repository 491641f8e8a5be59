"""SGLang's dialect, `LlamaForCausalLMEagle3`, which is also our own head directory.

Tensors: fc, midlayer.*, norm, lm_head, d2t, t2d; no embedding, since SGLang sets the target's.
"""

from __future__ import annotations

from typing import Any

from pipeline.eagle3.formats.fields import (
    SWITCHES,
    layer_config,
    layer_ids,
    refuse_unsupported,
    shape_fields,
)
from pipeline.eagle3.head import HeadShape
from pipeline.errors import HeadError
from pipeline.records import CAPTURE_CONVENTION, TargetContract

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def sglang_config(shape: HeadShape, contract: TargetContract) -> dict[str, Any]:
    """config.json with all fields that SGLang, SpecForge and vLLM read in a head of this dialect.

    The layers are written twice. Inside `eagle_config` they are output indices: SGLang adds one to
    reach the layer that the state enters. At the top level they are already one higher: vLLM looks
    there first and takes them as the layers that the states enter.
    """
    return {
        "architectures": [ARCHITECTURE],
        **layer_config(shape),
        "draft_vocab_size": shape.draft_vocab_size,
        **{name: value for name in SWITCHES if (value := getattr(shape, name))},
        _LAYERS: [layer + 1 for layer in contract.capture_layers],
        "eagle_config": {
            _LAYERS: list(contract.capture_layers),
            "aux_layer_convention": CAPTURE_CONVENTION,
            "use_aux_hidden_state": True,
        },
    }


def read_config(body: dict[str, Any], where: str) -> tuple[HeadShape, tuple[int, int, int] | None]:
    """Shape and aux layers (output indices; None: the loaders' default). Raises HeadError."""
    eagle = body.get("eagle_config") or {}
    norm_before_fc = eagle.get("norm_before_fc", body.get("norm_before_fc"))
    refuse_unsupported({**body, "norm_before_fc": norm_before_fc}, where)
    if body.get("model_type", "llama") != "llama":
        fix = "import a head whose layer is a Llama layer"
        raise HeadError(f"model_type is {body['model_type']!r}", where=where, fix=fix)
    if eagle.get("use_aux_hidden_state") is False:
        problem = "eagle_config.use_aux_hidden_state is off: the head reads no aux states"
        raise HeadError(problem, where=where, fix="import an EAGLE-3 head")
    inside = layer_ids(eagle.get(_LAYERS), where, f"eagle_config.{_LAYERS}", offset=0)
    top = layer_ids(body.get(_LAYERS), where, _LAYERS, offset=1)
    if inside and top and inside != top:
        problem = (
            f"eagle_config.{_LAYERS} {list(inside)} and {_LAYERS} {body[_LAYERS]} "
            "name different layers: the latter count one higher"
        )
        raise HeadError(problem, where=where, fix="keep the list that the head was trained with")
    # `use_aux_norm` is what SGLang called `fc_norm` first, and still reads.
    fc_norm = body.get("fc_norm") or body.get("use_aux_norm")
    return shape_fields({**body, "fc_norm": fc_norm}, where), inside or top
