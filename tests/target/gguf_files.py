"""GGUF files of tiny random models, written as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, GROUPS, LAYERS, D, WIDTH = 32, 4, 2, 5, 8, 48
Writer = Any
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_model(
    path: Path,
    vocabulary: Callable[[Writer], int],
    *,
    architecture: str = "llama",
    name: str = "tiny",
    change: Callable[[Writer], None] = lambda _: None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """A random model of Llama's layout; `vocabulary` writes its tokenizer and returns its size.

    `shapes` are tensors of each layer beside Llama's, by name; () leaves one out.
    """
    rng = np.random.default_rng(0)
    writer = _begin(path, architecture, name)
    size = vocabulary(writer)
    layer: dict[str, Sequence[int]] = {
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (GROUPS * D, HIDDEN),
        "attn_v.weight": (GROUPS * D, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_gate.weight": (WIDTH, HIDDEN),
        "ffn_up.weight": (WIDTH, HIDDEN),
        "ffn_down.weight": (HIDDEN, WIDTH),
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        **(shapes or {}),
    }
    tensors: dict[str, Sequence[int]] = {
        "token_embd.weight": (size, HIDDEN),
        "output.weight": (size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for index in range(LAYERS):
        tensors |= {f"blk.{index}.{name}": shape for name, shape in layer.items() if shape}
    for each, shape in tensors.items():
        values = rng.standard_normal(shape) * 0.2 + ("norm" in each)
        writer.add_tensor(each, values.astype(np.float32))
    return _end(path, writer, change)


def write_weights(
    path: Path,
    architecture: str,
    model: Any,
    vocabulary: Callable[[Writer], int],
    change: Callable[[Writer], None] = lambda _: None,
    *,
    without: str = "",
) -> Path:
    """A model of transformers with the sizes above, but for the tensor `without`."""
    writer = _begin(path, architecture, "tiny", model.config.rms_norm_eps)
    vocabulary(writer)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], LAYERS)
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if "mlp.experts." in name:
            block = name.split(".")[2]
            parts = {"ffn_down_exps": values}
            if name.endswith("gate_up_proj"):
                gate, up = np.split(values, 2, axis=1)
                parts = {"ffn_gate_exps": gate, "ffn_up_exps": up}
            for part, each in parts.items():
                writer.add_tensor(f"blk.{block}.{part}.weight", np.ascontiguousarray(each))
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if architecture == "llama" and ("attn_q" in stored or "attn_k" in stored):
            # llama.cpp turns neighbours, not halves.
            halves = values.reshape(-1, 2, D // 2, HIDDEN)
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if stored != without:
            writer.add_tensor(stored, values[0] if "gate_inp_shexp" in stored else values)
    return _end(path, writer, change)


def _begin(path: Path, architecture: str, name: str, epsilon: float = 1e-6) -> Writer:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_rope_freq_base(1e4)
    return writer


def _end(path: Path, writer: Writer, change: Callable[[Writer], None]) -> Path:
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(
    tokenizer: Any,
    pre: str | None,
    *,
    types: Mapping[str, int] | None = None,
    template: str | None = None,
    bos: str | None = None,
) -> Callable[[Writer], int]:
    """The tokenizer of transformers as `tokenizer.ggml.*`; added tokens are of type control."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary: dict[str, int] = dict(tree["model"]["vocab"])
    kinds = {each["content"]: CONTROL for each in tree["added_tokens"]} | dict(types or {})
    vocabulary |= {each["content"]: each["id"] for each in tree["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)

    def write(writer: Writer) -> int:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(token, NORMAL) for token in tokens])
        merges = tree["model"]["merges"]
        writer.add_token_merges([" ".join(each) for each in merges])
        writer.add_eos_token_id(tokenizer.eos_token_id)
        if bos is not None:
            writer.add_bos_token_id(vocabulary[bos])
        if template is not None:
            writer.add_chat_template(template)
        return len(tokens)

    return write


def sentencepiece(
    tokenizer: Any,
    *,
    prefix: bool | None = None,
    types: Mapping[str, int] | None = None,
    template: str | None = None,
    bos: bool | None = None,
) -> Callable[[Writer], int]:
    """A BPE of SentencePiece's kind, whose merges become scores as its converter stores them."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary: dict[str, int] = tree["model"]["vocab"]
    ranks = {"".join(pair): rank for rank, pair in enumerate(tree["model"]["merges"])}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {each["content"]: CONTROL for each in tree["added_tokens"]}
    kinds |= {token: BYTE for token in tokens if token.startswith("<0x")}
    kinds |= {"<unk>": UNKNOWN, **(types or {})}

    def write(writer: Writer) -> int:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        single = len(ranks)
        writer.add_token_scores([float(-ranks.get(token, single)) for token in tokens])
        writer.add_token_types([kinds.get(token, NORMAL) for token in tokens])
        writer.add_bos_token_id(vocabulary["<s>"])
        writer.add_eos_token_id(vocabulary["</s>"])
        writer.add_unk_token_id(vocabulary["<unk>"])
        if prefix is not None:
            writer.add_add_space_prefix(prefix)
        if bos is not None:
            writer.add_add_bos_token(bos)
        if template is not None:
            writer.add_chat_template(template)
        return len(tokens)

    return write
