"""Fields of a config.json: those of a head's layer, and which others change what a head computes.

    read         honoured: becomes part of the shape
    harmless     token ids, types, versions, dropout, settings of generation: nothing to a head
    by value     passes where its value changes nothing, such as `partial_rotary_factor: 1.0`
    any other    refused by name, unless it is null, which leaves a field unset

A reader that skips a field which it does not know drafts with other maths, and drafts badly. The
lists were made from what SpecForge, SafeAILab, AngelSlim, ModelOpt, speculators, DFlash's authors
and MiMo write, and from the attributes that every transformers configuration has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from pipeline.errors import HeadError
from pipeline.heads.base import DraftShape
from pipeline.heads.rope import ROPE_FIELDS, check_rotary, rope_fields, rope_parameters

Shape = TypeVar("Shape", bound=DraftShape)


_HARMLESS_NAMES = """
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id image_token_id image_token_index
    video_token_id vision_token_id vision_start_token_id vision_end_token_id
    eod_token_id pad_id im_start_id im_end_id im_newline_id text_start_id text_end_id mask_init_id
    image_start_token_id image_end_token_id image_newline_token_id
    class_num pool_type dense_list cla_share_factor router_aux_loss_coef
    torch_dtype dtype transformers_version transformers.js_config
    initializer_range use_cache max_window_layers decoder_sparse_step
    attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop
    embd_pdrop attn_pdrop dropout embedding_dropout
    _name_or_path name_or_path auto_map _attn_implementation attn_implementation
    _attn_implementation_autoset _attn_implementation_internal _commit_hash _flash_attn_2_enabled
    _experts_implementation
    target_model_type target_model_name_or_path modal_type
    return_dict return_dict_in_generate output_hidden_states output_attentions output_scores
    output_router_logits torchscript use_bfloat16 tf_legacy_loss cross_attention_hidden_size
    is_decoder tie_encoder_decoder chunk_size_feed_forward gradient_checkpointing
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    cache_implementation
    finetuning_task id2label label2id num_labels problem_type task_specific_params prefix
    tokenizer_class
    base_model_tp_plan base_model_pp_plan base_model_ep_plan keys_to_ignore_at_inference
    has_no_defaults_at_init is_composition
"""


_HARMLESS = frozenset(_HARMLESS_NAMES.split())


class Rule(NamedTuple):
    """When a field changes nothing."""

    changes_nothing: Callable[[Any, Mapping[str, Any]], bool]  # of its value and of all fields
    reason: str  # why another value is refused


def only(*values: Any, reason: str) -> Rule:
    """One of these values; 1 is not true, and 0 not false."""

    def fits(value: Any, _: Mapping[str, Any]) -> bool:
        return any(
            value == each and isinstance(value, bool) is isinstance(each, bool) for each in values
        )

    return Rule(fits, reason)


def _is_inverse_root(value: Any, body: Mapping[str, Any]) -> bool:
    size = _head_dim(body)
    return isinstance(value, float) and size > 0 and abs(value * size**0.5 - 1) < 1e-6


def _head_dim(body: Mapping[str, Any]) -> float:
    head_dim = body.get("head_dim")
    hidden, heads = body.get("hidden_size"), body.get("num_attention_heads")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden / heads
    return head_dim if isinstance(head_dim, int) else 0


def _window_hides_nothing(value: Any, body: Mapping[str, Any]) -> bool:
    """Switched off, of no layer, or as long as the text can be."""
    kinds, positions = body.get("layer_types"), body.get("max_position_embeddings")
    off = body.get("use_sliding_window") is False
    none = isinstance(kinds, list) and bool(kinds) and set(map(str, kinds)) == {"full_attention"}
    number = isinstance(value, int) and not isinstance(value, bool)
    return off or none or (number and isinstance(positions, int) and value >= positions)


def _no_window_is_used(value: Any, body: Mapping[str, Any]) -> bool:
    """An absent window is 4,096 in Qwen's configurations, one of null is none."""
    window = body.get("sliding_window", 4096)
    unused = window is None or _window_hides_nothing(window, body)
    return value is False or (value is True and unused)


_NO_BIAS = only(False, reason="the head's projections have no bias")


_NO_FACTOR = only(1, reason="the head has no such factor")


_NO_HEAD_NORM = only(False, reason="the head does not norm queries and keys")


_DENSE = only(0, reason="the head has no experts")


_WHOLE = only(1, reason="this head turns whole heads")


_SILU = only("silu", "swish", reason="the head's MLP is SwiGLU")


_NEIGHBOURS = only(False, reason="the head turns the halves of a head, not neighbours")


_PLAIN = only({}, reason="the head's weights are bf16, fp16 or fp32")


_CAUSAL = only(False, reason="the head's attention is causal")


#: Of any head's layer.
LAYER_RULES: dict[str, Rule] = {
    "hidden_act": _SILU,
    "hidden_activation": _SILU,
    **dict.fromkeys(
        ("attention_bias", "qkv_bias", "use_qkv_bias", "mlp_bias", "bias", "use_bias"), _NO_BIAS
    ),
    **dict.fromkeys(("add_bias_linear", "attention_out_bias", "add_qkv_bias"), _NO_BIAS),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct"), _WHOLE),
    **dict.fromkeys(
        ("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"), _NO_FACTOR
    ),
    **dict.fromkeys(("scale_emb", "lm_head_multiplier", "pretraining_tp"), _NO_FACTOR),
    "attention_multiplier": Rule(_is_inverse_root, "attention is scaled by head_dim ** -0.5"),
    "query_pre_attn_scalar": Rule(
        lambda value, body: value == _head_dim(body), "attention is scaled by head_dim ** -0.5"
    ),
    **dict.fromkeys(
        ("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm", "use_qk_norm_rope"),
        _NO_HEAD_NORM,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _DENSE),
    "mlp_only_layers": only([], reason="the head has no experts"),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "rotary_interleaved"), _NEIGHBOURS),
    "position_embedding_type": only("rope", reason="the head's positions are rotary"),
    "use_rotary_pos_emb": only(True, reason="the head's positions are rotary"),
    "use_mrope": only(False, reason="a token of the head has one position"),
    "use_cla": only(False, reason="each layer of the head has keys and values of its own"),
    "norm_type": only("rms", reason="the head's norms are RMS norms"),
    "add_classification_head": only(False, reason="the head gives logits of tokens"),
    "attention_head_dim": Rule(
        lambda value, body: value == _head_dim(body), "the size of an attention head is head_dim"
    ),
    "pruned_heads": only({}, reason="the head has all its attention heads"),
    **dict.fromkeys(("quantization_config", "compression_config"), _PLAIN),
    **dict.fromkeys(
        ("add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention"), _CAUSAL
    ),
    "transformers_weights": only("model.safetensors", reason="that file holds a head's weights"),
    "is_causal": only(True, reason="the head's attention is causal"),
    "use_parallel_residual": only(False, reason="the head's MLP follows its attention"),
    "use_sliding_window": Rule(_no_window_is_used, "the head attends to everything"),
    "sliding_window": Rule(_window_hides_nothing, "the head attends to everything"),
    "target_hidden_size": Rule(
        lambda value, body: value == body.get("hidden_size"),
        "the head borrows the target's embedding, so this and hidden_size are one",
    ),
    **dict.fromkeys(
        ("target_vocab_size", "org_vocab_size"),
        Rule(
            lambda value, body: value == body.get("vocab_size"),
            "the target's vocabulary is vocab_size",
        ),
    ),
}


def untied(vocabulary: Any, draft: Any) -> dict[str, Rule]:
    """The rule of `tie_word_embeddings`.

    Trainers copy the field from the target. With a draft vocabulary it cannot be meant: rows of
    lm_head are fewer than the embedding's.
    """
    part = type(vocabulary) is int and type(draft) is int and draft < vocabulary
    allowed = (True, False) if part else (False,)
    reason = "over the whole vocabulary a tied lm_head is the embedding"
    return {"tie_word_embeddings": only(*allowed, reason=reason)}


def refuse_unknown(
    body: Mapping[str, Any],
    where: str,
    *,
    read: Collection[str],
    rules: Mapping[str, Rule],
    harmless: Collection[str] = _HARMLESS,
    prefix: str = "",
) -> None:
    """Raise HeadError for the first field that changes, or may change, what the head computes.

    read: fields that the caller honours; prefix: of the section's fields, such as `eagle_config.`.
    """
    for name, value in body.items():
        if value is None or name in read or name in harmless:
            continue
        field, rule = f"{prefix}{name}", rules.get(name)
        if rule is None:
            problem = f"{field} is {_shown(value)}: not a field that is known here"
            fix = f"take {field} out if it does not change what the head computes"
            raise HeadError(f"{problem}, so it may change the maths", where=where, fix=fix)
        if not rule.changes_nothing(value, body):
            problem = f"{field} is {_shown(value)}: {rule.reason}"
            fix = f"correct {field} if it is wrong; a head that was trained so is not supported"
            raise HeadError(problem, where=where, fix=fix)


def section(body: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """A nested mapping, empty where there is none. Raises HeadError for anything else."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        fix = f"write {name} as a JSON object, or export the head again"
        raise HeadError(f"{name} is {_shown(value)}, not an object", where=where, fix=fix)
    return value


def architectures_of(body: Mapping[str, Any], where: str) -> list[str]:
    """The list of a config.json, empty where there is none. Raises HeadError for anything else."""
    value = body.get("architectures")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        fix = "write architectures as a list of names, or export the head again"
        raise HeadError(f"architectures is {_shown(value)}", where=where, fix=fix)
    return value


def check_layer_types(body: Mapping[str, Any], where: str, *, prefix: str = "") -> None:
    """Raise HeadError for layers that do not see the whole text."""
    kinds = body.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list):
        fix = "write a list of full_attention, one a layer"
        raise HeadError(f"{prefix}layer_types is {_shown(kinds)}", where=where, fix=fix)
    others = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if others:
        problem = f"{prefix}layer_types has {', '.join(others)}"
        fix = "use a head whose layers attend to everything"
        raise HeadError(f"{problem}: every layer here has full attention", where=where, fix=fix)


def _shown(value: Any) -> str:
    """As Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


#: Output indices of the aux layers, low to high.
Layers = tuple[int, ...]


#: What an EAGLE-3 head has beside its layers, written only when on: a reader that does not know a
#: switch then still reads a plain head right. `window_fields` say a draft window to servers.
SWITCHES = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "draft_window")


#: Fields of a config.json that become part of any head's shape.
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "layer_types"),
    *ROPE_FIELDS,
)


#: What an EAGLE-3 head of either dialect cannot carry, beside what no layer can.
EAGLE3_RULES = {
    **LAYER_RULES,
    **untied(None, None),
    "truncated_vocab_size": Rule(
        lambda value, body: value == body.get("draft_vocab_size"), "it names draft_vocab_size"
    ),
}


#: Fields of an EAGLE-3 head's shape, under their own names.
EAGLE3_SHAPE = (
    *("num_hidden_layers", "attention_bias", "qk_norm", "sliding_window", "aux_layers"),
    *("target_hidden_size", "own_embedding"),
)


#: What an EAGLE-3 head of either dialect has beside fields of any layer.
EAGLE3_FIELDS = (
    *("num_hidden_layers", "attention_bias", "num_aux_hidden_states", "target_hidden_size"),
    "own_embedding",
)


#: The shortest window that is honoured: longer than any draft, so that it hides entries alone.
LEAST_WINDOW = 64


def read_window(
    body: Mapping[str, Any], layers: int, where: str, *, prefix: str = ""
) -> tuple[int, tuple[int, ...]]:
    """The sliding window of a layer's fields and the numbers of the layers that have it; 0: none.

    `layer_types` decides, as in vLLM. Raises HeadError.
    """
    kinds = body.get("layer_types")
    if kinds is None:
        return 0, ()
    name = f"{prefix}layer_types"
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        fix = f"write a list of {' and '.join(known)}, one a layer"
        raise HeadError(f"{name} is {_shown(kinds)}", where=where, fix=fix)
    sliding = tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
    if len(kinds) != layers and sliding:
        problem = f"{name} has {len(kinds)} entries, the head {layers} layers"
        raise HeadError(problem, where=where, fix="write one entry a layer")
    if not sliding:
        return 0, ()
    window, used = body.get("sliding_window"), body.get("use_sliding_window")
    if used is False:
        problem = f"{prefix}use_sliding_window is False, and {name} has sliding_attention"
        raise HeadError(problem, where=where, fix="keep the value that the head was trained with")
    if type(window) is not int or window < LEAST_WINDOW:
        problem = f"{prefix}sliding_window is {_shown(window)}, and {name} has sliding_attention"
        fix = f"write the window of its training, of at least {LEAST_WINDOW} positions"
        raise HeadError(problem, where=where, fix=fix)
    return window, sliding


#: What `read_window` honours where there is a window.
WINDOW_FIELDS = ("sliding_window", "use_sliding_window")


def window_fields(window: int, sliding: Collection[int], layers: int) -> dict[str, Any]:
    """What `read_window` reads."""
    kinds = [f"{'sliding' if number in sliding else 'full'}_attention" for number in range(layers)]
    fields: dict[str, Any] = {"layer_types": kinds}
    return {**fields, "sliding_window": window, "use_sliding_window": True} if window else fields


def eagle3_windows(
    body: Mapping[str, Any], where: str, *, draft_window: Any, prefix: str = ""
) -> tuple[int, tuple[str, ...]]:
    """The sliding window of an EAGLE-3 head's layers, and the fields that were read for it.

    Beside a draft window they are what servers are told instead of it. Raises HeadError.
    """
    count = body.get("num_hidden_layers") or 1
    if draft_window:
        said = window_fields(draft_window, range(count), count)
        for name in WINDOW_FIELDS:
            if body.get(name) not in (None, said.get(name)):
                problem = f"{prefix}{name} is {_shown(body[name])}, draft_window is {draft_window}"
                raise HeadError(problem, where=where, fix="make the two say the same")
        return 0, WINDOW_FIELDS
    window, sliding = read_window(body, count, where, prefix=prefix)
    if window and len(sliding) < count:
        problem = f"{prefix}layer_types mixes sliding and full attention"
        raise HeadError(problem, where=where, fix="use a head whose layers are all of one type")
    return window, WINDOW_FIELDS if window else ()


def eagle3_shape(body: Mapping[str, Any], layers: Layers | None, where: str) -> dict[str, Any]:
    """Fields of the shape that follow from others: how many aux states, whose width, which
    embedding. Raises HeadError."""
    count, name = body.get("num_aux_hidden_states"), "num_aux_hidden_states"
    if count is not None and count != (len(layers) if layers else 3):
        listed = f"its list has {len(layers)}" if layers else "it names no layers"
        problem = f"{name} is {_shown(count)}, and {listed}"
        raise HeadError(problem, where=where, fix="name the layers that the head was trained on")
    width = body.get("target_hidden_size")
    other = width is not None and width != body.get("hidden_size")
    # A head of another width cannot read the target's embedding.
    own = other or body.get("own_embedding", False)
    sizes = {"target_hidden_size": width if other else 0, "own_embedding": own}
    if body.get("qk_norm") and body.get("attention_bias"):
        problem = "attention_bias is True: vLLM's Qwen3 layer has no bias of its output, others do"
        raise HeadError(problem, where=where, fix="use a head without biases, or of Llama layers")
    return {**sizes, "aux_layers": len(layers) if layers else 3}


def layer_config(shape: DraftShape) -> dict[str, Any]:
    """The head's decoder layer as a Llama configuration."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        **rope_fields(shape.rope_parameters),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def shape_fields(kind: type[Shape], body: dict[str, Any], where: str) -> Shape:
    """The shape that `body` describes, defaults as in transformers' Llama. Raises HeadError."""
    sizes = ("hidden_size", "num_attention_heads", "vocab_size")
    hidden, heads, vocabulary = (_positive(body, name, where) for name in sizes)
    copied = ("intermediate_size", "rms_norm_eps", "max_position_embeddings")
    known = [name for name in (*copied, *SWITCHES, *EAGLE3_SHAPE) if name in kind.model_fields]
    fields = {name: body[name] for name in known if body.get(name) is not None}
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": default_head_dim(body, where),
        "draft_vocab_size": vocabulary,
    }
    fields |= {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **{
            name: default if body.get(name) is None else body[name]
            for name, default in defaults.items()
        },
        "rope_parameters": rope_parameters(body, where),
    }
    return validated(kind, fields, where)


def default_head_dim(body: Mapping[str, Any], where: str) -> int | None:
    """What transformers takes for an absent head_dim; None where the body has one.

    Raises HeadError where the heads do not divide the hidden size.
    """
    heads, hidden = body.get("num_attention_heads"), body.get("hidden_size")
    whole = all(isinstance(each, int) and each > 0 for each in (heads, hidden))
    if body.get("head_dim") is not None or not whole:
        return None
    assert isinstance(heads, int) and isinstance(hidden, int)
    if hidden % heads:
        problem = f"num_attention_heads {heads} does not divide hidden_size {hidden}"
        raise HeadError(problem, where=where, fix="write head_dim, or correct the two")
    return hidden // heads


def validated(kind: type[Shape], fields: dict[str, Any], where: str) -> Shape:
    """A shape of a kind that a head can have.

    Raises HeadError that names the first missing or unreadable field, and numbers that contradict
    each other.
    """
    try:
        shape = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Input ")
        problem = f"{name} is {first['input']!r}: it {reason}"
        if first["type"] == "missing":
            problem = f"lacks {name}"
        fix = f"write {name}, or export the head again"
        raise HeadError(problem, where=where, fix=fix) from error
    _check_numbers(shape, where)
    check_rotary(shape.rope_parameters, shape.rope_config, shape.head_dim, where)
    return shape


def _check_numbers(shape: DraftShape, where: str) -> None:
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    problem = ""
    if heads % groups:
        problem = f"num_key_value_heads {groups} does not divide num_attention_heads {heads}"
    elif shape.head_dim % 2:
        problem = f"head_dim is {shape.head_dim}, and rotary positions turn pairs"
    elif shape.draft_vocab_size > shape.vocab_size:
        draft, whole = shape.draft_vocab_size, shape.vocab_size
        problem = f"draft_vocab_size {draft} is larger than vocab_size {whole}"
    if problem:
        raise HeadError(problem, where=where, fix="correct the field, or export the head again")


def layer_ids(ids: Any, where: str, name: str, *, offset: int) -> Layers | None:
    """Output indices from the `ids` of a dialect that counts `offset` higher; None without any."""
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        problem = f"{name} is {ids!r}, not a list of layers"
        raise HeadError(problem, where=where, fix="write the ids of the layers that fc reads")
    layers = tuple(layer - offset for layer in ids)
    if any(low >= high for low, high in pairwise((-1, *layers))):
        meaning = f"with ids that mean layer id - {offset}, these are no ascending layers"
        fix = "write the ids low to high; fc's columns follow that order"
        raise HeadError(f"{name} is {ids!r}: {meaning}", where=where, fix=fix)
    return layers


def _positive(body: dict[str, Any], name: str, where: str) -> int:
    value = body.get(name)
    if type(value) is not int or value <= 0:
        problem = f"lacks {name}" if value is None else f"{name} is {value!r}"
        raise HeadError(problem, where=where, fix=f"write {name} as a positive number")
    return value
