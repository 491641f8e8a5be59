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
from pipeline.target.gguf import GgufMetadata
from pipeline.target.open import resolve
from pipeline.target.template import load_template
from tests.conftest import CHATML
from tests.decoder.conftest import states_of

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.target.gguf_files import (  # noqa: E402
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    WIDTH,
    D,
    byte_level,
    write_model,
    write_weights,
)

pytestmark = pytest.mark.usefixtures("own_cache")
Writer = Any
Change = Callable[[Writer], None]
_CLASSES = {
    **{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"},
    **{"qwen2moe": "Qwen2Moe", "qwen3moe": "Qwen3Moe"},
}
_SCALED = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **_SCALED,
}
_YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_SCALED}}
_LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "head_dim": D, "norm_topk_prob": True},
    "moe_intermediate_size": 64,
}
#: Factors that no formula gives.
_ODD = [1.0, 1.5, 2.5, 7.0]


@pytest.fixture
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


def _write(
    path: Path,
    architecture: str,
    fields: dict[str, Any],
    change: Change,
    tokenizer: Any,
    without: str = "",
) -> Any:
    """A random model whose attention matters, as a file at `path`."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{_CLASSES[architecture]}Config")(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **fields},
    )
    model = getattr(transformers, f"{_CLASSES[architecture]}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10 if "q_proj" in name or "k_proj" in name else 4)
            parameter.copy_(parameter.bfloat16().float())  # what the file becomes
    if change in (_odd_factors, _experts_with_factors):  # no rope type of transformers has them
        model.model.rotary_emb.inv_freq /= torch.tensor(_ODD)
    vocabulary = byte_level(tokenizer, "qwen2" if "qwen" in architecture else "gpt-2")
    write_weights(path, architecture, model, vocabulary, change, without=without)
    return model.eval()


def _all(*changes: Change) -> Change:
    def change(writer: Writer) -> None:
        for each in changes:
            each(writer)

    return change


def _nothing(writer: Writer) -> None: ...


def _experts(width: int) -> Change:
    def change(writer: Writer) -> None:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(width)
        writer.add_key_length(D)
        writer.add_value_length(D)

    return change


def _tensor(name: str, values: Any) -> Change:
    return lambda writer: writer.add_tensor(name, np.array(values, dtype=np.float32))


def _llama3_factors(writer: Writer) -> None:
    """As convert_hf_to_gguf.py stores them: one formula of Llama 3.1's paper."""
    factors = []
    for at in range(0, D, 2):
        length = 2 * math.pi * 1e4 ** (at / D)
        share = (32 / length - 1) / 3
        smooth = 1 / ((1 - share) / 8 + share)
        factors.append(1.0 if length < 32 / 4 else 8.0 if length > 32 else smooth)
    _tensor("rope_freqs.weight", factors)(writer)


def _yarn(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def _linear(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


_odd_factors = _tensor("rope_freqs.weight", _ODD)
_experts_with_factors = _all(_experts(64), _odd_factors)
_pad: Change = lambda writer: writer.add_pad_token_id(0)  # noqa: E731  # which Phi-3's needs

_CONVERTED: dict[str, tuple[str, dict[str, Any], Change]] = {
    "plain": ("llama", {}, _nothing),
    "llama3's factors": ("llama", {"rope_parameters": _LLAMA3}, _llama3_factors),
    "factors of no formula": ("llama", {}, _odd_factors),
    "factors of one": ("llama", {}, _tensor("rope_freqs.weight", np.ones(D // 2))),
    "yarn": ("llama", _YARN, _yarn),
    "linear": ("llama", _LINEAR, _linear),
    "linear, spelt as before": (
        *("llama", _LINEAR),
        lambda w: w.add_float32("llama.rope.scale_linear", 2.0),
    ),
    "neutral": (
        *("llama", {}),
        _all(
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
            lambda w: w.add_bool("llama.rope.scaling.finetuned", True),
            lambda w: w.add_uint32("llama.expert_count", 0),
            lambda w: w.add_key_length(D),
            lambda w: w.add_rope_dimension_count(D),
            lambda w: w.add_sliding_window(4096),  # beyond every text
        ),
    ),
    "experts": ("qwen3moe", _EXPERTS, _experts(64)),
    "experts with yarn": ("qwen3moe", _EXPERTS | _YARN, _all(_experts(64), _yarn)),
    "experts with factors": ("qwen3moe", _EXPERTS, _experts_with_factors),
    "a shared expert": (
        "qwen2moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "shared_expert_intermediate_size": 80,
        },
        _all(_experts(64), lambda w: w.add_expert_shared_feed_forward_length(80)),
    ),
    "fused matrices": ("phi3", {}, _pad),
    "heads of another size": ("qwen3", {"head_dim": 16}, lambda w: w.add_key_length(16)),
    "yarn in qwen2": ("qwen2", _YARN, _yarn),
}


@pytest.mark.parametrize("name", _CONVERTED)
def test_the_converted_model_has_the_original_s_logits(
    tokenizer: Any, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    architecture = _CONVERTED[name][0]
    original = _write(tmp_path / "m.gguf", *_CONVERTED[name], tokenizer)
    directory = resolve(TargetSection(source=str(tmp_path / "m.gguf"))).directory
    tokens = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(1))
    auto: Any = AutoModelForCausalLM
    converted = auto.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = original(input_ids=tokens[None]).logits[0]
        logits = converted(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)
    if architecture == "llama":
        cpu = torch.device("cpu")
        decoder = DecoderModel.load(
            directory, (0,), device=cpu, dtype=torch.float32, max_length=150
        )
        ours = decoder.logits(states_of(decoder, tokens).final)
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=5e-4)


_REFUSED: dict[str, tuple[str, Change, str]] = {
    "another head size": ("llama", lambda w: w.add_key_length(16), r"key_length=16, but"),
    "partial rotation": ("llama", lambda w: w.add_value_length(4), r"value_length=4, but"),
    "scores": ("llama", lambda w: w.add_attention_scale(0.5), r"attention\.scale=0\.5 is not kno"),
    "clamp": ("llama", lambda w: w.add_clamp_kqv(8.0), r"clamp_kqv=8\.0 is not known"),
    "cap": ("llama", lambda w: w.add_final_logit_softcapping(30.0), r"logit_softcapping=30\.0"),
    "logits": ("llama", lambda w: w.add_logit_scale(0.5), r"logit_scale=0\.5 is not known"),
    "embedding": ("llama", lambda w: w.add_embedding_scale(12.0), r"embedding_scale=12\.0"),
    "residual": ("llama", lambda w: w.add_residual_scale(0.2), r"residual_scale=0\.2"),
    "window": ("llama", lambda w: w.add_sliding_window(16), r"sliding_window=16, but"),
    "experts": ("llama", lambda w: w.add_expert_count(8), r"expert_count=8 is not known"),
    "a key of tomorrow": (
        *("llama", lambda w: w.add_float32("llama.swirl", 1.0)),
        r"llama\.swirl=1\.0 is not",
    ),
    "another architecture's key": (
        *("llama", lambda w: w.add_float32("qwen2.rope.scaling.factor", 4.0)),
        r"the key qwen2\.rope\.scaling\.factor is not of its architecture",
    ),
    "yarn with a strength": (
        *("llama", _all(_yarn, lambda w: w.add_rope_scaling_attn_factors(0.5))),
        r"rope\.scaling\.attn_factor=0\.5.* cannot be applied",
    ),
    "yarn without a length": (
        *("llama", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)),
        r"rope\.scaling\.type=yarn cannot be applied",
    ),
    "longrope": (
        *("llama", _tensor("rope_factors_long.weight", np.ones(4))),
        r"rope_factors_long\.weight is not read",
    ),
    "both scalings": (
        *("llama", _all(_linear, _tensor("rope_freqs.weight", _ODD))),
        r"rope_freqs\.weight .* beside rope\.scaling\.type=linear",
    ),
    "too few factors": (
        *("llama", _tensor("rope_freqs.weight", np.ones(2))),
        r"rope_freqs\.weight holds 2 factors for heads of 8",
    ),
    "biases": (
        *("llama", _tensor("blk.0.attn_q.bias", np.ones(HIDDEN))),
        r"blk\.0\.attn_q\.bias is not read by transformers' llama",
    ),
    "a part": ("llama", lambda w: w.add_uint16("split.count", 2), r"one of 2 parts .*fix: join"),
    "biases of experts": (
        *("qwen3moe", _all(_experts(64), _tensor("blk.0.attn_q.bias", np.ones(HIDDEN)))),
        r"blk\.0\.attn_q\.bias is not read by transformers' qwen3_moe",
    ),
    "weights of experts": (
        *("qwen3moe", _all(_experts(64), lambda w: w.add_expert_weights_scale(2.0))),
        r"qwen3moe\.expert_weights_scale=2\.0 is not known here",
    ),
    "other sizes than its tensors": ("qwen3moe", _experts(48), r"cannot be read as GGUF"),
    "longrope of phi3": (
        *("phi3", _all(_pad, _tensor("rope_factors_long.weight", np.ones(D // 2)))),
        r"rope_factors_long\.weight is not read",
    ),
    "linear for phi3": ("phi3", _all(_pad, _linear), r"linear rotary .* not supported by phi3"),
    "a window of phi3": (
        *("phi3", _all(_pad, lambda w: w.add_sliding_window(16))),
        r"sliding_window=16, but the converted model has sliding_window=None",
    ),
    "partial rotation of phi3": (
        *("phi3", _all(_pad, lambda w: w.add_rope_dimension_count(6))),
        r"rope\.dimension_count=6, but the converted model has head_dim=8",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_transformers_would_leave_out_is_refused(
    tokenizer: Any, tmp_path: Path, own_cache: Path, name: str
) -> None:
    architecture, change, message = _REFUSED[name]
    fields = _EXPERTS if architecture == "qwen3moe" else {}
    _write(tmp_path / "m.gguf", architecture, fields, change, tokenizer)
    with pytest.raises(TargetError, match=message):
        resolve(TargetSection(source=str(tmp_path / "m.gguf")))
    assert not list(own_cache.rglob("config.json")), "no cache entry remains"


def test_a_tensor_that_is_missing_is_not_made_up(tokenizer: Any, tmp_path: Path) -> None:
    path, name = tmp_path / "m.gguf", "blk.1.attn_q_norm.weight"
    _write(path, "qwen3moe", _EXPERTS, _experts(64), tokenizer, without=name)
    with pytest.raises(TargetError, match=r"has no tensor for model\.layers\.1\.self_attn\.q_norm"):
        resolve(TargetSection(source=str(path)))


@pytest.mark.parametrize("architecture", ["granite", "command-r"])
def test_an_architecture_that_transformers_does_not_convert_is_named(
    tokenizer: Any, tmp_path: Path, architecture: str
) -> None:
    vocabulary = byte_level(tokenizer, "gpt-2")
    path = write_model(tmp_path / "m.gguf", vocabulary, architecture=architecture)
    message = rf"architecture {architecture} is not supported.*\(fix: use an architecture"
    with pytest.raises(TargetError, match=message):
        resolve(TargetSection(source=str(path)))


def test_all_of_llama_cpp_s_end_ids_end_a_reply_and_a_changed_file_is_converted_again(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    _write(path, "llama", {}, lambda w: w.add_eot_token_id(0), tokenizer)
    directory = resolve(TargetSection(source=str(path))).directory
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, 1]
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    assert resolve(TargetSection(source=str(path))).directory != directory


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(TargetError, match=r"x\.gguf: cannot be read as GGUF"):
        resolve(TargetSection(source=str(tmp_path / "x.gguf")))


def _info(data: bytes, name: str) -> int:
    """Where the description of a tensor goes on after its name."""
    return data.rindex(name.encode()) + len(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: (8, 2**60), "cannot be read as GGUF"),
        (lambda data: (16, 2**60), "cannot be read as GGUF"),
        (lambda data: (24, 2**62), "cannot be read as GGUF"),
        (lambda data: (_info(data, "tokenizer.ggml.tokens") + 8, 2**61), "cannot be read as GGUF"),
        (lambda data: (_info(data, "output_norm.weight") + 4, 2**62), "cannot be read as GGUF"),
        (lambda data: (_info(data, "output_norm.weight") + 16, 2**50), "cannot be read as GGUF"),
        (lambda data: (_info(data, "output_norm.weight") + 16, 0), "overlap"),
    ],
    ids=["tensors", "keys", "name", "array", "size", "offset", "overlap"],
)
def test_counts_and_offsets_that_are_hostile(
    tokenizer: Any, tmp_path: Path, change: Callable[[bytes], tuple[int, int]], said: str
) -> None:
    path = write_model(tmp_path / "x.gguf", byte_level(tokenizer, "gpt-2"))
    GgufMetadata(path)
    data = bytearray(path.read_bytes())
    at, value = change(bytes(data))
    data[at : at + 8] = value.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(TargetError, match=rf"x\.gguf: .*{said}"):
        GgufMetadata(path)


@pytest.mark.parametrize(
    ("added", "ends"),
    [
        ((), ["<|im_end|>"]),
        (("<|eot_id|>", "<|eom_id|>", "<|end|>"), ["<|end|>", "<|eom_id|>", "<|eot_id|>"]),
        (("<|return|>", "<|call|>", "<|end|>"), ["<|call|>", "<|return|>"]),  # gpt-oss
    ],
)
def test_tokens_that_end_a_turn_are_known_by_their_text(
    tokenizer: Any, tmp_path: Path, added: tuple[str, ...], ends: list[str]
) -> None:
    """Of a file whose only key is that of the token that ends a document."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", *added]})
    tokenizer.eos_token = "<|endoftext|>"
    path = tmp_path / "model.gguf"
    _write(path, "llama", {}, lambda w: w.add_chat_template(CHATML), tokenizer)
    directory = resolve(TargetSection(source=str(path))).directory
    template = load_template(directory, source="model.gguf", system_prompt=None)
    texts = [template.text([token], special=True) for token in template.stop_ids]
    assert sorted(texts) == sorted({"<|im_end|>", "<|endoftext|>", *ends})
    assert template.text([template.end_of_turn or 0], special=True) == "<|im_end|>"
