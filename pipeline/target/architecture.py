"""Which targets can be captured and trained for, known from config.json alone.

    config.json ─► the model without memory ─┬─► its parts ──┬─► Architecture
                                             └─► its logits ─┴─► UnsupportedModel

No name has to be known: what is looked for is a list of decoder layers, a norm, and logits that are
a multiple of `lm_head` times the final state; to be captured here, layers that are all attention
too. `FAMILIES` is what tests try, and docs/targets.md shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.documents import read_json
from pipeline.errors import TargetError, UnsupportedModel, brief


class Family(NamedTuple):
    """Models of one `model_type`."""

    models: str
    decoded: bool = False  # by the bundled decoder
    refused: str = ""  # why, as the error says it
    served: bool = False  # refused for local capture alone: an engine can compute its states


_MEMORY = "its layers are not all attention"
_CAPPED = "its logits are soft-capped"
_NOT_CAUSAL = "transformers knows no causal language model of this kind"
#: Families that look right and are not.
_WRONG = {
    "gemma3n": "its layers pass on four streams, not one",
    "gemma4": "its layers share keys and differ in shape",
}

FAMILIES = {
    "llama": Family("Llama 2 to 3.3, SmolLM2, TinyLlama", decoded=True),
    "mistral": Family("Mistral 7B, Ministral 8B", decoded=True),
    "qwen2": Family("Qwen2, Qwen2.5, QwQ", decoded=True),
    "qwen3": Family("Qwen3", decoded=True),
    "qwen3_moe": Family("Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder"),
    "mixtral": Family("Mixtral"),
    "gpt_oss": Family("gpt-oss-20b, 120b"),
    "llama4": Family("Llama 4 Scout, Maverick"),
    "deepseek_v3": Family("DeepSeek-V3, R1"),
    "glm4_moe": Family("GLM-4.5, 4.6"),
    "phi3": Family("Phi-3, Phi-4", decoded=True),
    "olmo2": Family("OLMo 2"),
    "smollm3": Family("SmolLM3", decoded=True),
    "gemma": Family("Gemma", decoded=True),
    "gemma3": Family("Gemma 3", decoded=True),
    "gemma3_text": Family("Gemma 3 1B, 270M", decoded=True),
    "granite": Family("Granite 3"),
    "cohere": Family("Command R"),
    "cohere2": Family("Command R7B, Command A"),
    "mistral3": Family("Mistral Small 3.1, 3.2", decoded=True),
    "qwen3_vl": Family("Qwen3-VL"),
    "gemma2": Family("Gemma 2", refused=_CAPPED),
    "gemma3n": Family("Gemma 3n", refused=_WRONG["gemma3n"]),
    "gemma4": Family("Gemma 4", refused=_WRONG["gemma4"]),
    "qwen3_next": Family("Qwen3-Next", refused=_MEMORY, served=True),
    "qwen3_5": Family("Qwen3.5", refused=_MEMORY, served=True),
    "deepseek_v32": Family("DeepSeek-V3.2", refused=_MEMORY, served=True),
    "falcon_h1": Family("Falcon-H1", refused="its decoder has no `norm`"),
    "jamba": Family("Jamba", refused="its decoder has no `norm`"),
    "mamba": Family("Mamba", refused="its decoder has no `embed_tokens`"),
    "phi": Family("Phi-1.5, Phi-2", refused="its decoder has no `norm`"),
    "gpt_neox": Family("Pythia", refused="its decoder has no `embed_tokens`"),
    "gpt2": Family("GPT-2", refused="its decoder has no `embed_tokens`"),
    "stablelm": Family("StableLM", refused="its attention cannot be exchanged", served=True),
    "t5": Family("T5", refused=_NOT_CAUSAL),
}

#: What the bundled decoder runs.
DECODED = tuple(name for name, family in FAMILIES.items() if family.decoded)
#: Layers of these kinds read keys of earlier tokens and nothing else.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class Architecture:
    """Where a target departs from Llama: factors that can be folded into its weights."""

    logit_scale: float = 1.0  # logits = scale · lm_head(final)
    norm_offset: float = 0.0  # norms multiply by offset + weight
    query_scale: float = 1.0  # scores = scale · q·k / √d
    #: Whether lm_head is the embedding; None where nothing is said of it.
    tied: bool | None = field(default=None, compare=False)
    #: Name → shape of all that transformers' model is made of; None where files use other names.
    tensors: Mapping[str, tuple[int, ...]] | None = field(default=None, compare=False)
    #: Whether config.json says that weights may be; without one nothing is known.
    quantised: bool = field(default=True, compare=False)
    #: Why documents of one batch cannot be kept apart here; an engine that serves it does.
    not_packed: str = field(default="", compare=False)


#: Name in config.json → least and largest value that a model can have. Beyond them transformers
#: takes memory or hours before anybody compares the weights.
_SIZES = {
    "num_hidden_layers": (1, 1 << 10),
    "num_attention_heads": (1, 1 << 14),
    "num_key_value_heads": (1, 1 << 14),
    "num_experts": (0, 1 << 14),
    "num_local_experts": (0, 1 << 14),
    "n_routed_experts": (0, 1 << 14),
    "num_labels": (0, 1 << 16),
    "head_dim": (1, 1 << 14),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 24),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 28),
    "rms_norm_eps": (0, 1),
}


def read_config(directory: Path, where: str) -> Any:
    """The transformers configuration. Raises TargetError."""
    from transformers import AutoConfig

    try:
        fields = read_json(directory / "config.json", finite=False)
    except (ValueError, OSError) as error:
        problem, fix = f"config.json cannot be read: {brief(error)}", "download it again"
        raise TargetError(problem, where=where, fix=fix) from error
    if isinstance(fields, dict):
        _check_sizes(fields, f"{where}, config.json")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # a field of another type is an error of huggingface_hub's own
        problem = f"config.json cannot be read: {brief(error)}"
        fix = "use a causal language model that transformers knows"
        if "Validation error for field" in problem:
            fix = "correct that field of config.json"
        raise TargetError(problem, where=where, fix=fix) from error


def _check_sizes(fields: Mapping[str, Any], where: str, part: str = "") -> None:
    """Raise TargetError for a size that no model has, in a part of a configuration too."""
    for name, value in fields.items():
        least, most = _SIZES.get(name, (0, 0))
        if most and type(value) in (int, float) and not least <= value <= most:
            problem, fix = f"{value} is not from {least:,} to {most:,}", "correct config.json"
            raise TargetError(problem, where=f"{where}: {part}{name}", fix=fix)
        if isinstance(value, dict):
            _check_sizes(value, where, f"{part}{name}.")


#: What transformers and torch raise for fields of another type and for sizes no tensor can have.
_CANNOT_BUILD = (
    *(ValueError, TypeError, AttributeError, ImportError),
    *(ArithmeticError, LookupError, RuntimeError, AssertionError),
)


def read_architecture(
    config: Any, where: str, *, decoded: bool = False, packed: bool = False
) -> Architecture:
    """How a target with this configuration computes; no weights are read.

    Raises UnsupportedModel for one whose logits this pipeline would get wrong, for one that is to
    be captured here, `packed`, and whose states would be, and for one that is to be `decoded` here
    and is not of a family that is.
    """
    if reason := _WRONG.get(config.model_type, ""):
        raise _refusal(config, reason, where)
    try:
        with torch.device("meta"):
            model = model_class(config, where).from_config(config).eval()
    except _CANNOT_BUILD as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise _refusal(config, f"transformers cannot build it: {line}", where) from error
    decoder = decoder_of(model)
    if reason := _misfit(model, decoder):
        raise _refusal(config, reason, where)
    not_packed = _not_packed(model, decoder, config.get_text_config())
    if packed and not_packed:
        problem = f"a target of model_type {config.model_type!r} cannot be captured here"
        fix = "let an engine compute its states (features.backend: vllm, docs/capture.md)"
        raise UnsupportedModel(f"{problem}: {not_packed}", where=where, fix=fix)
    if not _turns_positions(decoder):
        raise _refusal(config, "its rope_parameters turn positions by no finite angle", where)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tensors = _tensors(model, tied) if _stores_as_named(config) else None
    scale, large = (_logit(model, decoder, value) for value in (1.0, 1000.0))
    if abs(large - 1000 * scale) > abs(scale):
        raise _refusal(config, _CAPPED, where)
    if decoded and config.model_type not in DECODED:
        problem = f"the bundled decoder does not run model_type {config.model_type!r}"
        ways = "let servers answer (synth.generator.backend) and draft (eagle3 eval --server URL)"
        fix = f"{ways}, without train.evaluate_every; or choose a target of docs/targets.md"
        raise UnsupportedModel(problem, where=where, fix=fix)
    attention = getattr(decoder.layers[-1], "self_attn", None)
    scaling, size = getattr(attention, "scaling", None), getattr(attention, "head_dim", None)
    return Architecture(
        logit_scale=scale,
        norm_offset=_norm_offset(decoder.norm, config.get_text_config().hidden_size),
        query_scale=round(scaling * size**0.5, 9) if scaling and size else 1.0,
        tied=tied,
        tensors=tensors,
        quantised=_is_quantised(config),
        not_packed=not_packed,
    )


def _stores_as_named(config: Any) -> bool:
    """Whether files hold a model's tensors under their names: elsewhere transformers renames and
    joins them while it loads, as it does with experts, or unpacks quantised ones."""
    text_alone = config.get_text_config() is config
    return config.model_type in DECODED and text_alone and not _is_quantised(config)


def _is_quantised(config: Any) -> bool:
    parts = (config, config.get_text_config())
    return any(getattr(part, "quantization_config", None) for part in parts)


def _tensors(model: Any, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shapes[name] for name in shapes if not (tied and name == "lm_head.weight")}


def model_class(config: Any, where: str) -> Any:
    """The class that loads a target: with image and sound where it has no other."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise _refusal(config, _NOT_CAUSAL, where)


def decoder_of(model: Any) -> Any:
    """The part of a causal language model that holds its layers and ends with the final state."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else getattr(decoder, "model", decoder)


def _misfit(model: Any, decoder: Any) -> str:
    """Why logits cannot be computed from a model's final states."""
    for part in ("embed_tokens", "layers", "norm"):
        if not hasattr(decoder, part):
            return f"its decoder has no `{part}`"
    output = model.get_output_embeddings()
    if output is None or getattr(output, "bias", None) is not None:
        return "its output layer is not one matrix"
    return ""


def _not_packed(model: Any, decoder: Any, config: Any) -> str:
    """Why one forward of ours cannot keep several documents apart."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if model._is_stateful or kinds - _ATTENTION:
        named = f" ({', '.join(sorted(kinds - _ATTENTION))})" if kinds - _ATTENTION else ""
        return f"{_MEMORY}{named}: one document would be seen by the next one of its batch"
    if not decoder._supports_attention_backend:
        return "its attention cannot be exchanged for one that keeps documents apart"
    return ""


def _turns_positions(decoder: Any) -> bool:
    """Whether rotary frequencies, where there are any, are finite and not negative."""
    rotary = getattr(decoder, "rotary_emb", None)
    config = getattr(rotary, "config", None)
    if rotary is None or config is None:
        return True
    frequencies = type(rotary)(config=config).buffers()
    return all(bool((each >= 0).all() & each.isfinite().all()) for each in frequencies)


class _Output(SimpleNamespace):
    """What a decoder returns: a final state, and None by any other name."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return torch.as_tensor(self.last_hidden_state)


@torch.no_grad()
def _logit(model: Any, decoder: Any, value: float) -> float:
    """What the model makes of an output row's product `value` with the final state."""
    size = model.config.get_text_config().hidden_size
    row = nn.Linear(size, 1, bias=False)
    row.weight.copy_(torch.eye(1, size))
    model.set_output_embeddings(row)
    inner = decoder if model.base_model is model else model.base_model
    inner.forward = lambda *_, **__: _Output(last_hidden_state=torch.full((1, 1, size), value))
    return float(model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits)


@torch.no_grad()
def _norm_offset(norm: nn.Module, size: int) -> float:
    """What a norm multiplies by where its weight is zero: Gemma's weights are relative to one."""
    norm = norm.to_empty(device="cpu")
    for parameter in norm.parameters():
        parameter.zero_()
    signs = torch.ones(1, size)
    signs[:, ::2] = -1  # no mean, so that a LayerNorm does the same
    if not list(norm.parameters()):
        return 0.0
    return round(float((norm(1e6 * signs) * signs).mean()), 3)  # so large that no eps shows


def _refusal(config: Any, reason: str, where: str) -> UnsupportedModel:
    problem = f"a target of model_type {config.model_type!r} cannot be trained for: {reason}"
    return UnsupportedModel(problem, where=where, fix="choose a target of docs/targets.md")
