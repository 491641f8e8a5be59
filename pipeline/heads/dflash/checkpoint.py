"""A block drafter on disk, in the layout of DFlashDraftModel.

    config.json        DFlashDraftModel on the fields of Qwen3, as SGLang and vLLM read it
    model.safetensors  fc, hidden_norm, layers.*, norm; lm_head, d2t, t2d; no embedding, and no
                       lm_head where dflash_config says target_lm_head
    eagle3.json        contract, provenance and metrics, as of every head

DSpark's directory is the same, as DSparkDraftModel, with markov_head.markov_w1 and markov_w2 and
confidence_head.proj, and with its fields at the top level, where servers read them.

vLLM drafts with lm_head and d2t. SGLang and the authors' own code know no draft vocabulary: they
take the target's lm_head, which is what a head trained with train_lm_head=false has, too; any other
is not exported for SGLang. speculators.py is the other format.

A block drafter of another trainer, in the layout of DFlashDraftModel, read and checked.

    config.json        fields of Qwen3, block_size, dflash_config: mask_token_id, target_layer_ids
    *.safetensors      fc, hidden_norm, layers.*, norm; where there is a draft vocabulary d2t, t2d,
                       lm_head

The authors' own checkpoints have neither a draft vocabulary nor an lm_head: the target's rows give
the logits, of all of its tokens. Of a part of them, rows that are missing are the target's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import HeadError
from pipeline.heads.algorithm import Export
from pipeline.heads.checkpoint import (
    CONFIG,
    ForeignHead,
    HeadCard,
    add_t2d,
    fill_head,
    read_json,
    read_tensors,
    write_files,
)
from pipeline.heads.dflash import ALGORITHM, DSPARK, kind_of, speculators
from pipeline.heads.dflash.shape import MOST_BLOCK, MOST_LAYERS, DflashHead, DflashShape
from pipeline.heads.fields import (
    LAYER_FIELDS,
    LAYER_RULES,
    LEAST_WINDOW,
    WINDOW_FIELDS,
    Layers,
    architectures_of,
    layer_config,
    layer_ids,
    only,
    read_window,
    refuse_unknown,
    section,
    validated,
    window_fields,
)
from pipeline.heads.rope import rope_parameters
from pipeline.heads.speculators import MODEL_TYPE
from pipeline.records import CAPTURE_CONVENTION, TargetContract

_SETTINGS, _LAYERS, _BORROWED = "dflash_config", "target_layer_ids", "target_lm_head"


#: Fields of a Qwen3 configuration that this drafter carries as they are.
_COPIED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "num_hidden_layers"),
    *("draft_vocab_size", "attention_bias"),
)


#: Honoured at the top level or inside `dflash_config`. A drafter has no embedding, and an lm_head
#: only where its weights hold one; how many layers the target has says nothing about this one.
_READ = (
    *("block_size", "mask_token_id", _LAYERS, _BORROWED, _SETTINGS, "num_target_layers"),
    *("architectures", "num_hidden_layers", "draft_vocab_size", "tie_word_embeddings"),
    *("attention_bias", "is_causal"),
)


#: Of DSpark, in either place: fields of its shape, and what says that its head is of this kind.
_RANK, _CONFIDENCE, _ANCHOR = "markov_rank", "enable_confidence_head", speculators.ANCHOR


_DSPARK = {
    "markov_head_type": "vanilla",
    "confidence_head_with_markov": True,
    "projector_type": "dspark",
}


_DSPARK_RULES = {
    "markov_head_type": only("vanilla", reason="the bias is of the token before alone"),
    "confidence_head_with_markov": only(True, reason="the confidence reads the token before"),
    "projector_type": only("dspark", reason="the architecture is DSparkDraftModel"),
    "attention_mode": only("gqa", reason="a layer is one of Qwen3"),
}


#: Of `dflash_config` alone: one window for all layers, and whether the block is causal in them.
_WINDOW, _WINDOW_SIZE, _CAUSAL = "use_swa", "swa_window_size", "causal"


_SETTING_RULES = {
    "aux_layer_convention": only(CAPTURE_CONVENTION, reason="ids are read as output indices"),
    "use_aux_hidden_state": only(True, reason="a block drafter reads aux states"),
    "attention_sink_bias": only(False, reason="attention has no sinks"),
    "attention_value_scale": only(1, reason="values are not scaled"),
}


_RULES = {
    **LAYER_RULES,
    "model_type": only("qwen3", reason="a layer is one of Qwen3"),
    **dict.fromkeys(
        ("qk_norm", "use_qk_norm", "qk_layernorm"), only(True, reason="a layer norms both")
    ),
    "add_swa_attention_sink_bias": only(False, reason="attention has no sinks"),
    **dict.fromkeys(
        ("is_neox_style", "rope_is_neox_style"),
        only(True, reason="the head turns the halves of a head, not neighbours"),
    ),
}


def head_config(shape: DflashShape, contract: TargetContract) -> dict[str, Any]:
    """config.json with all fields that SGLang, vLLM and the authors' code read.

    `target_layer_ids` are output indices: state i is the one behind decoder layer i. Servers take
    sliding layers for causal ones and others for not, unless `causal` says so of all.
    """
    layers, causal = shape.num_hidden_layers, shape.causal_layers
    causality = {} if causal == shape.sliding_layers else {_CAUSAL: bool(causal)}
    dspark: dict[str, Any] = {}
    if shape.markov_rank:
        dspark = {_RANK: shape.markov_rank, _CONFIDENCE: shape.confidence} | _DSPARK
        dspark[_ANCHOR] = shape.anchor_predicts
    return {
        "architectures": [kind_of(shape).architecture],
        **layer_config(shape),
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "attention_bias": shape.attention_bias,
        **window_fields(shape.sliding_window, shape.sliding_layers, layers),
        "num_target_layers": contract.num_layers,
        "block_size": shape.block_size,
        "draft_vocab_size": shape.draft_vocab_size,
        **({"mask_token_id": shape.mask_token_id, **dspark} if dspark else {}),
        **({_LAYERS: list(contract.capture_layers)} if dspark else {}),
        _SETTINGS: {
            **dspark,
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            _LAYERS: list(contract.capture_layers),
            "aux_layer_convention": CAPTURE_CONVENTION,
            **({_BORROWED: True} if shape.target_lm_head else {}),
            **causality,
        },
    }


def read_config(
    body: dict[str, Any], where: str, tensors: Callable[[], Mapping[str, Tensor]]
) -> tuple[DflashShape, Layers | None]:
    """Shape and aux layers of a config.json. Raises HeadError."""
    return read_dflash_config(body, where, has_rows=_LM_HEAD in tensors())


def read_dflash_config(
    body: dict[str, Any], where: str, *, has_rows: bool
) -> tuple[DflashShape, Layers | None]:
    """Shape and aux layers, which are output indices, of a head with an lm_head or without.

    Raises HeadError.
    """
    settings = section(body, _SETTINGS, where)
    sights = _sights(body, settings, where)
    windows = WINDOW_FIELDS if sights["sliding_window"] else ()
    # First what says the most.
    body = {"model_type": body.get("model_type"), **body}
    biased = DSPARK.architecture in architectures_of(body, where)
    own = (_RANK, _CONFIDENCE, _ANCHOR, "confidence_head_alpha") if biased else ()
    rules = _DSPARK_RULES if biased else speculators.NOT_THE_ANCHOR
    read = (*LAYER_FIELDS, *_READ, *windows, *own)
    refuse_unknown(body, where, read=read, rules={**_RULES, **(rules if biased else {})})
    inside, rules = (*_READ, _WINDOW, _WINDOW_SIZE, _CAUSAL, *own), {**_SETTING_RULES, **rules}
    refuse_unknown(settings, where, read=inside, rules=rules, prefix=f"{_SETTINGS}.")
    part = body.get("draft_vocab_size") not in (None, body.get("vocab_size"))
    if has_rows and body.get("tie_word_embeddings") and not part:
        problem = "tie_word_embeddings is True, and the weights hold an lm_head of their own"
        raise HeadError(problem, where=where, fix="write false, or use a head without lm_head")
    fields = {name: body[name] for name in _COPIED if body.get(name) is not None} | sights
    fields.setdefault("num_key_value_heads", body.get("num_attention_heads"))
    for name in ("block_size", "mask_token_id"):
        if (value := _one_of(body, settings, name, where)) is not None:
            fields[name] = value
    if biased:
        for name, field, default in (
            (_RANK, "markov_rank", 0),
            (_CONFIDENCE, "confidence", True),
            (_ANCHOR, "anchor_predicts", True),
        ):
            value = _one_of(body, settings, name, where)
            fields[field] = default if value is None else value
            if type(fields[field]) is not type(default) or (name == _RANK and not value):
                problem = f"lacks {name}" if value is None else f"{name} is {value!r}"
                fix = "write what the head was trained with: a rank above 0, and true or false"
                raise HeadError(problem, where=where, fix=fix)
    fields["rope_parameters"] = rope_parameters(body, where)
    if body.get("draft_vocab_size") is None and "vocab_size" in fields:
        fields["draft_vocab_size"] = fields["vocab_size"]
    whole = fields.get("draft_vocab_size") == fields.get("vocab_size")
    borrowed = settings.get(_BORROWED)
    fields[_BORROWED] = whole and not has_rows if borrowed is None else borrowed
    layers = layer_ids(_one_of(body, settings, _LAYERS, where), where, _LAYERS, offset=0)
    fields["aux_layers"] = len(layers) if layers else 3
    shape = validated(DflashShape, fields, where)
    _check_numbers(shape, where)
    return shape, layers


def _sights(body: dict[str, Any], settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Which layers have a window, and in which the block is causal, as vLLM decides it.

    Raises HeadError.
    """
    count = body.get("num_hidden_layers")
    every = tuple(range(count)) if type(count) is int and 0 < count <= MOST_LAYERS else ()
    window, sliding = read_window(body, len(every), where)
    causal = sliding
    if settings.get(_WINDOW) and not sliding:
        size = settings.get(_WINDOW_SIZE, body.get("sliding_window"))
        if type(size) is not int or size < LEAST_WINDOW:
            problem = f"{_SETTINGS}.{_WINDOW_SIZE} is {size!r}, with {_WINDOW}"
            fix = f"write the window of its training, of at least {LEAST_WINDOW} positions"
            raise HeadError(problem, where=where, fix=fix)
        window, sliding = size, every
    elif sliding and settings.get(_WINDOW_SIZE) not in (None, window):
        problem = f"{_SETTINGS}.{_WINDOW_SIZE} contradicts sliding_window {window}"
        raise HeadError(problem, where=where, fix="keep the value that the head was trained with")
    for name, causality in (("is_causal", body.get("is_causal")), (_CAUSAL, settings.get(_CAUSAL))):
        if causality is not None:
            if not isinstance(causality, bool):
                problem = f"{name} is {causality!r}"
                raise HeadError(problem, where=where, fix="write true or false")
            causal = every if causality else ()
            break
    return {"sliding_window": window, "sliding_layers": sliding, "causal_layers": causal}


def _one_of(body: dict[str, Any], settings: dict[str, Any], name: str, where: str) -> Any:
    """A field that may stand at the top level, in `dflash_config`, or in both."""
    inside, top = settings.get(name), body.get(name)
    if inside is not None and top is not None and inside != top:
        problem = f"{_SETTINGS}.{name} {inside!r} contradicts {name} {top!r}"
        raise HeadError(problem, where=where, fix="keep the value that the head was trained with")
    return top if inside is None else inside


def _check_numbers(shape: DflashShape, where: str) -> None:
    """Raise HeadError for numbers that no drafter has."""
    for name, value, least, most in (
        ("block_size", shape.block_size, 2, MOST_BLOCK),
        ("mask_token_id", shape.mask_token_id, 0, shape.vocab_size - 1),
    ):
        if not least <= value <= most:
            problem = f"{name} is {value}, it can be {least} … {most}"
            raise HeadError(problem, where=where, fix="export the head again")
    if shape.target_lm_head and shape.draft_vocab_size != shape.vocab_size:
        problem = f"target_lm_head proposes all {shape.vocab_size} tokens of the target"
        own = f"draft_vocab_size is {shape.draft_vocab_size}"
        raise HeadError(f"{problem}, and {own}", where=where, fix="export the head again")


_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def read_foreign(directory: Path) -> ForeignHead | None:
    """A block drafter's directory; None for other ones. Raises HeadError with file, field and fix.

    The rows of an lm_head that it lacks are for the caller to fill (`lacks_rows`).
    """
    body, where = read_json(directory / CONFIG), f"{directory}/{CONFIG}"
    dialect = "speculators" if body.get(MODEL_TYPE) in [*speculators.KINDS] else "dflash"
    if dialect == "speculators":
        body = speculators.as_own_config(body, where)
    elif not {ALGORITHM.architecture, DSPARK.architecture} & {*architectures_of(body, where)}:
        return None
    tensors = {name.removeprefix("model."): each for name, each in read_tensors(directory).items()}
    embedding = tensors.pop(_EMBEDDING, None)
    shape, layers = read_dflash_config(body, where, has_rows=_LM_HEAD in tensors)
    if layers is None:
        fix = "write the output indices of the layers that fc reads"
        raise HeadError("lacks dflash_config.target_layer_ids", where=where, fix=fix)
    lacks_rows = not shape.target_lm_head and _LM_HEAD not in tensors
    if lacks_rows:
        tensors[_LM_HEAD] = torch.zeros(shape.draft_vocab_size, shape.hidden_size)
    tensors = add_t2d(tensors, shape.vocab_size, directory)
    head = fill_head(DflashHead, shape, tensors, where=str(directory))
    return ForeignHead(dialect, layers, head, embedding, lacks_rows)


def export(folder: Path, head: DflashHead, card: HeadCard, request: Export) -> None:
    """Write the dialect of speculators, or our own directory, which SGLang reads.

    Raises HeadError for an lm_head that SGLang would not use.
    """
    if request.format == "speculators":
        speculators.export_speculators(folder, head, card, request)
        return
    speculators.check_rows(head, request, "SGLang drafts with the target's")
    if head.shape.markov_rank and head.shape.draft_vocab_size < head.shape.vocab_size:
        problem = "the bias of a part of the vocabulary, which SGLang drafts with the whole of"
        fix = "train with train.dspark.target_lm_head=true; for vLLM, use --format speculators"
        raise HeadError(problem, where=f"--format {request.format}", fix=fix)
    write_files(folder, head_config(head.shape, card.contract), head.state_dict(), card)
