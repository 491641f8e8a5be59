"""A GGUF file of the head, as llama.cpp reads it (`llama-server -md`, architecture `eagle3`).

    eagle3.target_layers     layers that a state enters: our output index i, plus one
    fc.weight                [3H, H], in GGUF's order of dimensions
    blk.0.attn_norm          our input_layernorm; attn_norm_2 is hidden_norm
    blk.0.attn_{q,k}         rows in pairs that llama.cpp rotates together: i and i + d/2
    rope_freqs               divisors of the frequencies, where the rotary type is not the default
    d2t                      target ids, int64: not offsets, as in our own directory

Matrices are bfloat16, vectors float32. The embedding is the target's own, as in SGLang. There is no
tokenizer in it: a head reads ids, and llama.cpp takes the text from the target.

Read in llama.cpp's src/models/eagle3.cpp and conversion/llama.py (build 11434): its graph has one
norm of all aux states together or none, carries the un-normed output from step to step, and attends
to every position.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from pipeline.errors import HeadError, MissingPackage, StoreError
from pipeline.heads.checkpoint import CARD, HeadCard, card_fields
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.rope import DEFAULT_THETA

#: llama.cpp finds a head beside a target on the hub by the beginning of this name.
FILE = "eagle3-BF16.gguf"
_ARCHITECTURE = "eagle3"
_WHERE, _FIX = "--format gguf", "serve it with SGLang or vLLM, or train one without"
_REFUSED = {
    "fc_norm": "llama.cpp has one norm over all aux states together, this head one for each",
    "norm_output": "llama.cpp hands the un-normed output to the next step",
    "draft_window": "llama.cpp's head attends to all positions",
}
#: Rotary types whose frequencies are the same at every length.
_STATIC = ("default", "linear", "llama3", "yarn")
_NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}


def export_gguf(folder: Path, head: Eagle3Head, card: HeadCard) -> None:
    """Write the file, and the card beside it. Raises HeadError for what llama.cpp would compute
    otherwise, MissingPackage."""
    try:
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType
        from gguf.quants import quantize
    except ImportError:
        problem = "package 'gguf' is needed to write GGUF files"
        fix = "pip install 'eagle3[gguf]'"
        raise MissingPackage(problem, where=_WHERE, fix=fix) from None
    shape, matrix = head.shape, GGMLQuantizationType.BF16
    _check(shape)
    divisors, scale = _rotary(shape)
    writer = GGUFWriter(None, _ARCHITECTURE)
    writer.add_type("model")
    writer.add_name(f"EAGLE-3 head for {card.contract.source}")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_block_count(1)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_parameters.get("rope_theta", DEFAULT_THETA))
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_float32(f"{_ARCHITECTURE}.rope.scaling.attn_factor", scale)
    layers = [layer + 1 for layer in card.contract.capture_layers]
    writer.add_array(f"{_ARCHITECTURE}.target_layers", layers)
    writer.add_uint32(f"{_ARCHITECTURE}.target_hidden_size", shape.hidden_size)
    writer.add_bool(f"{_ARCHITECTURE}.norm_before_residual", False)
    writer.add_bool(f"{_ARCHITECTURE}.norm_before_fc", False)
    for name, tensor in _tensors(head).items():
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, quantize(tensor.numpy(), matrix), raw_dtype=matrix)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.add_tensor("d2t", head.target_ids().numpy())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file(folder / FILE)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        (folder / CARD).write_text(json.dumps(card_fields(card), indent=2) + "\n")
    except OSError as error:
        problem = f"cannot write the head: {error.strerror}"
        fix = "free some space or choose a writable directory"
        raise StoreError(problem, where=str(folder), fix=fix) from error
    finally:
        with suppress(OSError):  # the full disk again, at bytes that were not written
            writer.close()


def _check(shape: HeadShape) -> None:
    """Raise HeadError for a head that llama.cpp would compute otherwise."""
    for name, reason in _REFUSED.items():
        if getattr(shape, name):
            problem = f"{name} is {str(getattr(shape, name)).lower()}: {reason}"
            raise HeadError(problem, where=_WHERE, fix=_FIX)
    kind = shape.rope_parameters.get("rope_type", "default")
    if kind not in _STATIC:
        problem = f"rope_parameters.rope_type is {kind}, whose frequencies change with the length"
        raise HeadError(problem, where=_WHERE, fix=_FIX)


def _rotary(shape: HeadShape) -> tuple[Tensor | None, float]:
    """What the default's frequencies are divided by [d/2], None for 1, and the factor of cos and
    sin, as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta = shape.rope_parameters.get("rope_theta", DEFAULT_THETA)
    plain = shape.model_copy(
        update={"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    )
    own, default = (LlamaRotaryEmbedding(config=each.rope_config()) for each in (shape, plain))
    divisors = default.inv_freq / own.inv_freq
    changed = not bool((divisors == 1).all())
    return divisors if changed else None, float(own.attention_scaling)


def _tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """Under llama.cpp's names, in float32 of what bfloat16 holds."""
    shape, tensors = head.shape, dict[str, Tensor]()
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    for name, parameter in head.named_parameters():
        stem = name.removesuffix(".weight")
        tensor = parameter.detach().cpu().bfloat16().float()
        if count := heads.get(stem.rpartition(".")[2]):
            # Halves of a head, which we rotate together, become neighbours: [2, d/2] → [d/2, 2].
            halves = tensor.view(count, 2, shape.head_dim // 2, -1)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[f"{_NAMES[stem]}.weight"] = tensor
    return tensors
