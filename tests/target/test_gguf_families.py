"""GGUF files of families outside the bundled decoder: the original's logits, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import TargetSection
from pipeline.errors import TargetError
from pipeline.target.open import resolve

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

import numpy as np  # noqa: E402

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

Writer = Any
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": D, "norm_topk_prob": True}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


def _model(family: str, tokenizer: Any, **fields: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        **{"rope_parameters": _PLAIN, **fields},
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so that attention matters
                parameter.mul_(4)
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()


def _experts(width: int) -> Callable[[Writer], None]:
    def change(writer: Writer) -> None:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(width)
        writer.add_key_length(D)
        writer.add_value_length(D)

    return change


def _yarn(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def _odd_factors(model: Any) -> Any:
    model.model.rotary_emb.inv_freq /= torch.tensor([1.0, 1.5, 2.5, 7.0])
    return model


def _frequencies(writer: Writer) -> None:
    factors = np.array([1.0, 1.5, 2.5, 7.0], dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _both(*changes: Callable[[Writer], None]) -> Callable[[Writer], None]:
    def change(writer: Writer) -> None:
        for each in changes:
            each(writer)

    return change


_CONVERTED: dict[str, tuple[str, Callable[[Any], Any], Callable[[Writer], None]]] = {
    "experts": (
        "qwen3moe",
        lambda t: _model("Qwen3Moe", t, moe_intermediate_size=64, **_EXPERTS),
        _experts(64),
    ),
    "experts with yarn": (
        "qwen3moe",
        lambda t: _model(
            "Qwen3Moe", t, moe_intermediate_size=64, rope_parameters=_YARN, **_EXPERTS
        ),
        _both(_experts(64), _yarn),
    ),
    "experts with factors": (
        "qwen3moe",
        lambda t: _odd_factors(_model("Qwen3Moe", t, moe_intermediate_size=64, **_EXPERTS)),
        _both(_experts(64), _frequencies),
    ),
    "a shared expert": (
        "qwen2moe",
        lambda t: _model(
            "Qwen2Moe",
            t,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=80,
        ),
        _both(_experts(64), lambda w: w.add_expert_shared_feed_forward_length(80)),
    ),
    "fused matrices": ("phi3", lambda t: _model("Phi3", t), lambda w: w.add_pad_token_id(0)),
    "heads of another size": (
        "qwen3",
        lambda t: _model("Qwen3", t, head_dim=16),
        lambda w: w.add_key_length(16),
    ),
    "yarn in a family of the decoder": (
        "qwen2",
        lambda t: _model("Qwen2", t, rope_parameters=_YARN),
        _yarn,
    ),
}


@pytest.mark.parametrize("name", _CONVERTED)
def test_the_converted_model_has_the_original_s_logits(
    tokenizer: Any, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    architecture, make, change = _CONVERTED[name]
    original = make(tokenizer)
    pre = "qwen2" if architecture.startswith("qwen") else "gpt-2"
    vocabulary = byte_level(tokenizer, pre)
    path = write_weights(tmp_path / "m.gguf", architecture, original, vocabulary, change)
    directory = resolve(TargetSection(source=str(path))).directory
    auto: Any = AutoModelForCausalLM
    converted = auto.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.randint(0, 300, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = original(input_ids=tokens).logits
        logits = converted(input_ids=tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)


def _bias(writer: Writer) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.ones(HIDDEN, dtype=np.float32))


def _long_factors(writer: Writer) -> None:
    writer.add_tensor("rope_factors_long.weight", np.ones(D // 2, dtype=np.float32))


def _linear(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


_REFUSED: dict[str, tuple[str, str, dict[str, Any], Callable[[Writer], None], str]] = {
    "a tensor too many": (
        "qwen3moe",
        "Qwen3Moe",
        {"moe_intermediate_size": 64, **_EXPERTS},
        _both(_experts(64), _bias),
        r"blk\.0\.attn_q\.bias is not read by transformers' qwen3_moe",
    ),
    "longrope": ("phi3", "Phi3", {}, _long_factors, r"rope_factors_long\.weight is not read"),
    "scaling of no phi3": ("phi3", "Phi3", {}, _linear, r"linear rotary scaling is none of phi3's"),
    "a window": (
        "phi3",
        "Phi3",
        {},
        lambda w: w.add_sliding_window(16),
        r"attention\.sliding_window=16, but the converted model has sliding_window=None",
    ),
    "partial rotation": (
        "phi3",
        "Phi3",
        {},
        lambda w: w.add_rope_dimension_count(6),
        r"rope\.dimension_count=6, but the converted model has head_dim=8",
    ),
    "weights of experts": (
        "qwen3moe",
        "Qwen3Moe",
        {"moe_intermediate_size": 64, **_EXPERTS},
        _both(_experts(64), lambda w: w.add_expert_weights_scale(2.0)),
        r"qwen3moe\.expert_weights_scale=2\.0 is not known here",
    ),
    "other sizes than its tensors": (
        "qwen3moe",
        "Qwen3Moe",
        {"moe_intermediate_size": 64, **_EXPERTS},
        _experts(48),
        r"cannot be read as GGUF",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_transformers_would_leave_out_is_refused(
    tokenizer: Any, tmp_path: Path, name: str
) -> None:
    architecture, family, fields, change, message = _REFUSED[name]
    pre = "qwen2" if architecture.startswith("qwen") else "gpt-2"
    if architecture == "phi3":
        change = _both(change, lambda w: w.add_pad_token_id(0))
    model, vocabulary = _model(family, tokenizer, **fields), byte_level(tokenizer, pre)
    path = write_weights(tmp_path / "m.gguf", architecture, model, vocabulary, change)
    with pytest.raises(TargetError, match=message):
        resolve(TargetSection(source=str(path)))
    assert not list((tmp_path / "cache").rglob("config.json")), "no cache entry remains"


def test_a_tensor_that_is_missing_is_not_made_up(tokenizer: Any, tmp_path: Path) -> None:
    model = _model("Qwen3Moe", tokenizer, moe_intermediate_size=64, **_EXPERTS)
    path, vocabulary = tmp_path / "m.gguf", byte_level(tokenizer, "qwen2")
    name = "blk.1.attn_q_norm.weight"
    write_weights(path, "qwen3moe", model, vocabulary, _experts(64), without=name)
    with pytest.raises(TargetError, match=r"has no tensor for model\.layers\.1\.self_attn\.q_norm"):
        resolve(TargetSection(source=str(path)))


@pytest.mark.parametrize("architecture", ["granite", "olmo2", "command-r", "glm4", "smollm3"])
def test_an_architecture_that_transformers_does_not_convert_is_named(
    tokenizer: Any, tmp_path: Path, architecture: str
) -> None:
    vocabulary = byte_level(tokenizer, "gpt-2")
    path = write_model(tmp_path / "m.gguf", vocabulary, architecture=architecture)
    message = rf"architecture {architecture} is not supported.*\(fix: use an architecture"
    with pytest.raises(TargetError, match=message):
        resolve(TargetSection(source=str(path)))
