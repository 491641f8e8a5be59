"""GGUF files written from a transformers model: the converted one is its equal, or is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import TargetSection
from pipeline.decoder.model import DecoderModel
from pipeline.errors import TargetError
from pipeline.target.open import resolve
from tests.decoder.conftest import states_of

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HIDDEN, HEADS, GROUPS, LAYERS, D = 32, 4, 2, 5, 8
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
Writer = Any


def _model(tokenizer: Path, rope: dict[str, Any] | None = None) -> Any:
    """A random Llama whose attention matters."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokens: Any = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=256,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        eos_token_id=tokens.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(10)
            layer.self_attn.k_proj.weight.mul_(10)
            layer.self_attn.o_proj.weight.mul_(4)
        for parameter in model.parameters():  # bf16 is what the file becomes
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()  # type: ignore[no-untyped-call]


def _write(
    path: Path,
    model: Any,
    tokenizer: Path,
    change: Callable[[Writer], None] = lambda _: None,
    *,
    positions: int = 256,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it, with what `change` adds."""
    tree = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    special = {each["content"] for each in tree["added_tokens"]}
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    template = tokenizer / "chat_template.jinja"
    chat = template.read_text() if template.is_file() else settings["chat_template"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(positions)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(D)
    writer.add_vocab_size(model.config.vocab_size)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    merges = tree["model"]["merges"]
    writer.add_token_merges([" ".join(each) if isinstance(each, list) else each for each in merges])
    writer.add_eos_token_id(tree["model"]["vocab"][settings["eos_token"]])
    writer.add_chat_template(chat)
    stored = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", stored["model.embed_tokens.weight"])
    writer.add_tensor("output.weight", stored["lm_head.weight"])
    writer.add_tensor("output_norm.weight", stored["model.norm.weight"])
    for index in range(LAYERS):
        for ours, theirs in _NAMES.items():
            tensor = stored[f"model.layers.{index}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):  # llama.cpp turns neighbours, not halves
                heads = HEADS if theirs == "attn_q" else GROUPS
                split = tensor.reshape(heads, 2, D // 2, HIDDEN)
                tensor = np.ascontiguousarray(split.swapaxes(1, 2).reshape(tensor.shape))
            writer.add_tensor(f"blk.{index}.{theirs}.weight", tensor)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama3_factors(writer: Writer) -> None:
    """As convert_hf_to_gguf.py stores them: one formula of Llama 3.1's paper."""
    factors = []
    for at in range(0, D, 2):
        length = 2 * math.pi * 1e4 ** (at / D)
        if length < 32 / 4:
            factors.append(1.0)
        elif length > 32 / 1:
            factors.append(8.0)
        else:
            share = (32 / length - 1) / 3
            factors.append(1 / ((1 - share) / 8 + share))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def _odd_factors(writer: Writer) -> None:
    writer.add_tensor("rope_freqs.weight", np.array([1.0, 1.5, 2.5, 7.0], dtype=np.float32))


def _odd_model(tokenizer: Path) -> Any:
    """Frequencies divided by hand: what no rope type of transformers was asked for."""
    model = _model(tokenizer)
    model.model.rotary_emb.inv_freq /= torch.tensor([1.0, 1.5, 2.5, 7.0])
    return model


def _add_yarn(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def _add_linear(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


def _ones(writer: Writer) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(D // 2, dtype=np.float32))


_APPLIED: dict[str, tuple[Callable[[Path], Any], Callable[[Writer], None]]] = {
    "plain": (_model, lambda _: None),
    "llama3's factors": (lambda t: _model(t, _LLAMA3), _llama3_factors),
    "factors of no formula": (_odd_model, _odd_factors),
    "factors of one": (_model, _ones),
    "yarn": (lambda t: _model(t, _YARN), _add_yarn),
    "linear": (lambda t: _model(t, _LINEAR), _add_linear),
    "linear, spelt as before": (
        lambda t: _model(t, _LINEAR),
        lambda w: w.add_float32("llama.rope.scale_linear", 2.0),
    ),
    "no scaling": (_model, lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE)),
    "harmless": (_model, lambda w: w.add_bool("llama.rope.scaling.finetuned", True)),
    "neutral": (_model, lambda w: w.add_uint32("llama.expert_count", 0)),
    "the same head size": (_model, lambda w: w.add_key_length(D)),
    "a window beyond every text": (_model, lambda w: w.add_sliding_window(4096)),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", _APPLIED)
def test_the_converted_model_has_the_original_s_logits(
    tiny_target: Path, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    make, change = _APPLIED[name]
    original = make(tiny_target)
    path = _write(tmp_path / "model.gguf", original, tiny_target, change)
    directory = resolve(TargetSection(source=str(path))).directory
    tokens = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(1))
    auto: Any = AutoModelForCausalLM
    converted = auto.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = original(input_ids=tokens[None]).logits[0]
        logits = converted(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)
    cpu = torch.device("cpu")
    decoder = DecoderModel.load(directory, (0,), device=cpu, dtype=torch.float32, max_length=150)
    ours = decoder.logits(states_of(decoder, tokens).final)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=5e-4)


def _longrope(writer: Writer) -> None:
    writer.add_tensor("rope_factors_long.weight", np.ones(4, dtype=np.float32))


def _biases(writer: Writer) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.ones(HIDDEN, dtype=np.float32))


def _strong_yarn(writer: Writer) -> None:
    _add_yarn(writer)
    writer.add_rope_scaling_attn_factors(0.5)


def _two_scalings(writer: Writer) -> None:
    _add_linear(writer)
    _odd_factors(writer)


def _split(writer: Writer) -> None:
    writer.add_uint16("split.count", 2)


_REFUSED: dict[str, tuple[Callable[[Writer], None], str]] = {
    "another head size": (lambda w: w.add_key_length(16), r"attention\.key_length=16, but"),
    "partial rotation": (lambda w: w.add_value_length(4), r"attention\.value_length=4, but"),
    "scores": (lambda w: w.add_attention_scale(0.5), r"llama\.attention\.scale=0\.5 is not known"),
    "clamp": (lambda w: w.add_clamp_kqv(8.0), r"llama\.attention\.clamp_kqv=8\.0 is not known"),
    "cap": (lambda w: w.add_final_logit_softcapping(30.0), r"final_logit_softcapping=30\.0"),
    "logits": (lambda w: w.add_logit_scale(0.5), r"llama\.logit_scale=0\.5 is not known"),
    "embedding": (lambda w: w.add_embedding_scale(12.0), r"llama\.embedding_scale=12\.0"),
    "residual": (lambda w: w.add_residual_scale(0.2), r"llama\.residual_scale=0\.2"),
    "window": (lambda w: w.add_sliding_window(16), r"attention\.sliding_window=16, but"),
    "experts": (lambda w: w.add_expert_count(8), r"llama\.expert_count=8 is not known"),
    "a key of tomorrow": (lambda w: w.add_float32("llama.swirl", 1.0), r"llama\.swirl=1\.0 is not"),
    "another architecture's key": (
        lambda w: w.add_float32("qwen2.rope.scaling.factor", 4.0),
        r"the key qwen2\.rope\.scaling\.factor is not of its architecture",
    ),
    "yarn with a strength": (_strong_yarn, r"rope\.scaling\.attn_factor=0\.5.* cannot be applied"),
    "yarn without a length": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        r"rope\.scaling\.type=yarn cannot be applied",
    ),
    "longrope": (_longrope, r"rope_factors_long\.weight is not read"),
    "both scalings": (_two_scalings, r"rope_freqs\.weight .* beside rope\.scaling\.type=linear"),
    "too few factors": (
        lambda w: w.add_tensor("rope_freqs.weight", np.ones(2, dtype=np.float32)),
        r"rope_freqs\.weight holds 2 factors for heads of 8",
    ),
    "biases": (_biases, r"blk\.0\.attn_q\.bias is not read by transformers' llama"),
    "a part": (_split, r"is one of 2 parts of a model \(fix: join them"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_transformers_would_leave_out_is_refused(
    tiny_target: Path, tmp_path: Path, name: str
) -> None:
    change, message = _REFUSED[name]
    path = _write(tmp_path / "model.gguf", _model(tiny_target), tiny_target, change)
    with pytest.raises(TargetError, match=message):
        resolve(TargetSection(source=str(path)))
    assert not list((tmp_path / "cache").rglob("config.json")), "no cache entry remains"


def test_all_of_llama_cpp_s_end_ids_end_a_reply(tiny_target: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(path, _model(tiny_target), tiny_target, lambda w: w.add_eot_token_id(0))
    directory = resolve(TargetSection(source=str(path))).directory
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, 1]


def test_a_changed_file_is_converted_again(tiny_target: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "model.gguf", _model(tiny_target), tiny_target)
    first = resolve(TargetSection(source=str(path))).directory
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    assert resolve(TargetSection(source=str(path))).directory != first


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(TargetError, match=r"x\.gguf: cannot be read as GGUF"):
        resolve(TargetSection(source=str(tmp_path / "x.gguf")))
