"""The dialect of speculators 0.9 and, through it, vLLM: `dflash` or `dspark`.

Tensors are those of our directory; over the whole vocabulary there is no map, and lm_head is the
target's. Both readers take the target's embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.errors import HeadError
from pipeline.heads.algorithm import Export
from pipeline.heads.checkpoint import MAPS, HeadCard, write_files
from pipeline.heads.dflash import ALGORITHM, DSPARK, kind_of
from pipeline.heads.dflash.shape import DflashHead
from pipeline.heads.fields import (
    LAYER_RULES,
    check_layer_types,
    layer_config,
    layer_ids,
    only,
    refuse_unknown,
    section,
    untied,
)
from pipeline.heads.speculators import (
    HOW_TO_DRAFT,
    LAYER,
    MODEL_TYPE,
    SETTINGS,
    drafting_section,
)

#: speculators_model_type → the architecture in a config.json of ours.
KINDS = {each.name: each.architecture for each in (ALGORITHM, DSPARK)}


#: Ids of the layers that the states enter: one higher than output indices.
_LAYERS, _CONVENTION = "aux_hidden_state_layer_ids", "entering-layer"


_READ = (
    *(MODEL_TYPE, LAYER, SETTINGS, _LAYERS, "draft_vocab_size", "block_size", "mask_token_id"),
    *("architectures", "model_type", "speculators_version"),
)


#: Of DSpark alone. Where `sample_from_anchor` is not said, speculators takes true and vLLM false.
ANCHOR = "sample_from_anchor"
_BIASED = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


NOT_THE_ANCHOR = {ANCHOR: only(False, reason="the root is a token of the target's")}


_RULES = {
    # speculators asks it of sliding layers, which are refused; vLLM of every layer.
    "sliding_window_non_causal": only(True, False, reason="it is true or false"),
    "aux_layer_convention": only(_CONVENTION, reason="ids are read as layers that a state enters"),
    "target_hidden_size": LAYER_RULES["target_hidden_size"],
}


_ALGORITHM = {"algorithm": only(*KINDS, reason="the head is a block drafter")}


def export_speculators(folder: Path, head: DflashHead, card: HeadCard, request: Export) -> None:
    """Write `head` as speculators and vLLM read it, with its card beside it.

    Raises HeadError for an lm_head over the whole vocabulary that is not the target's.
    """
    target, shape, tensors = request.target(), head.shape, head.state_dict()
    if shape.draft_vocab_size == shape.vocab_size:
        check_rows(head, request, "speculators takes the target's for a whole vocabulary")
        for name in (*MAPS, "lm_head.weight"):
            tensors.pop(name, None)
    layers, biased = shape.num_hidden_layers, shape.markov_rank > 0
    name = kind_of(shape).name
    values = shape.markov_rank, "vanilla", shape.confidence, True
    config = {
        "architectures": ["DSparkSpeculator" if biased else "DFlashSpeculator"],
        MODEL_TYPE: name,
        **(dict(zip(_BIASED, values, strict=True)) if biased else {}),
        "draft_vocab_size": shape.draft_vocab_size,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        _LAYERS: [layer + 1 for layer in card.contract.capture_layers],
        "aux_layer_convention": _CONVENTION,
        ANCHOR: shape.anchor_predicts,
        # vLLM takes false for a causal block in every layer, of whatever kind.
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        SETTINGS: drafting_section(name, shape.predicted, target, request),
        LAYER: {
            **layer_config(shape),
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
        },
    }
    write_files(folder, config, tensors, card)


def check_rows(head: DflashHead, request: Export, reason: str) -> None:
    """Raise HeadError unless what the head has of an lm_head is the target's, where a format or its
    reader takes the target's.
    """
    if head.shape.target_lm_head:
        return
    rows = request.target().weights.lm_head()[head.target_ids()]
    if not torch.equal(head.lm_head.weight.bfloat16(), rows.bfloat16()):
        name = kind_of(head.shape).name
        keys = f"train.train_lm_head=false or train.{name}.target_lm_head=true"
        others = "" if request.format == "speculators" else "; for vLLM, use --format speculators"
        raise HeadError(
            f"the head has an lm_head of its own, and {reason}",
            where=f"--format {request.format}",
            fix=f"train with {keys}{others}",
        )


def as_own_config(body: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a config.json in this dialect, as our own has them. Raises HeadError."""
    layer, settings = section(body, LAYER, where), section(body, SETTINGS, where)
    check_layer_types(layer, where, prefix=f"{LAYER}.")
    sizes = {"hidden_size": layer.get("hidden_size"), **body}
    biased = body.get(MODEL_TYPE) == "dspark"
    also = (*_BIASED, ANCHOR) if biased else ()
    rules = {**_RULES, **untied(layer.get("vocab_size"), body.get("draft_vocab_size"))}
    rules |= {} if biased else NOT_THE_ANCHOR
    refuse_unknown(sizes, where, read=(*_READ, "hidden_size", *also), rules=rules)
    if biased and not isinstance(body.get(ANCHOR), bool):
        fix = "write true where every position of a block predicts, else false"
        raise HeadError(f"lacks {ANCHOR}", where=where, fix=fix)
    refuse_unknown(settings, where, read=HOW_TO_DRAFT, rules=_ALGORITHM, prefix=f"{SETTINGS}.")
    ids = layer_ids(body.get(_LAYERS), where, _LAYERS, offset=1)
    names = ("draft_vocab_size", "block_size", "mask_token_id", *also)
    own = {name: body.get(name) for name in names}
    own["architectures"] = [KINDS[body[MODEL_TYPE]]]
    return {**layer, **own, "target_layer_ids": list(ids or ())}
