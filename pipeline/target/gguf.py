"""A GGUF file → the model that transformers makes of it, once all that the file says is in it.

    dequantised(path)                the converted model in the cache
    _apply_metadata                  before it is saved: rotary scaling, further end ids
    _apply_tokenizer                 tokenizer.json, where transformers makes another one
    _check_converted                 after: every key and tensor is in the config and tokenizer

    tokenizer.ggml.model   gpt2 (byte-level BPE) or llama (SentencePiece)
    tokenizer.ggml.pre     how a byte-level one splits text before merges: a name for an expression,
                           as llama.cpp defines it, which wrote the file and serves it
    add_space_prefix       whether SentencePiece puts a space before a text, and after each special
                           token, as llama.cpp does
    token_type             control and user-defined tokens stand for themselves in a text
    rope.scaling.type      none, linear or yarn, with their numbers
    rope_freqs.weight      each frequency is divided by it: how converters store Llama 3.1's scaling

A key of the architecture or a tensor that is unknown here is refused: it may change the maths. The
cache entry is named by the file's content and the type it is dequantised to, written under a
temporary name and renamed when complete, so a killed conversion never looks finished.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pipeline.config import cache_directory
from pipeline.console import long_step, notice
from pipeline.errors import MissingPackage, TargetError, brief
from pipeline.target.architecture import DECODED, read_architecture
from pipeline.target.files import sha256_of

#: What a GGUF file is dequantised to, whatever computes with it later: the weights, and with them
#: the fingerprint, are the same on every machine.
_STORED = "bfloat16"
#: Raised when the same file converts to another target: what earlier versions wrote is not taken.
_CONVERSION = 4
_FIX = "use the model's safetensors, or another GGUF file of it"
#: Keys of an architecture whose value does not change what a model computes.
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout"}
#: Those that are right at one value, beside the value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1.0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.sliding_window": (0,),
}
#: Fields of the configuration that transformers does not read from a GGUF file.
_SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_ROPE = ("rope.scaling.", "rope.scale_linear")
_FREQUENCIES = "rope_freqs.weight"
_SCALING = "rope.scaling."
#: Longest lengths that Llama 3's scaling is searched for: powers of two.
_LENGTHS = [1 << bits for bits in range(4, 21)]
_CONTROL, _USER_DEFINED = 3, 4
#: Control tokens that end a turn, as llama.cpp knows them. Not <|endoftext|>, which ends a
#: document: where no key names it, transformers and vLLM go on after it.
_ENDS = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>"),
    *("<|return|>", "<|call|>"),
}
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)


def _cased(suffix: str) -> str:
    """Words cut where upper case follows lower case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"


_LLAMA3 = rf"(?i:{_CONTRACTIONS})|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"(?i:{_CONTRACTIONS})|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = rf"{_cased('')}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = rf"{_cased(f'(?i:{_CONTRACTIONS})?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
#: GPT-2's own expression, which tokenizers has built in, alone or after single digits are cut out.
_GPT2, _DIGITS = "gpt2", "digits"
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"), _GPT2),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    # Its digits are cut out first as well, which changes the tokens of white space before a digit.
    # Runs, heads and figures exist for SmolLM2 as transformers converts it: it is left at that.
    "smollm": _GPT2,
}
#: Those that take a whole piece that is a token before they look at merges.
_WHOLE_PIECES = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "tekken",
}
#: Architectures whose SentencePiece tokenizers transformers has classes of its own for.
_GEMMA = ("gemma", "gemma2", "gemma3")
#: Keys that say nothing of how text becomes tokens, beside the ids of special tokens.
_SILENT = {
    *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.scores", "ggml.token_type", "ggml.merges"),
    *("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_sep_token", "ggml.add_space_prefix"),
    *("ggml.token_type_count", "chat_template", "chat_templates", "huggingface.json"),
}


def dequantised(gguf: Path) -> Path:
    """The directory of the converted model. Raises TargetError."""
    key = hashlib.sha256(f"{sha256_of([gguf])[gguf]} {_STORED} {_CONVERSION}".encode()).hexdigest()[
        :16
    ]
    final = cache_directory() / "targets" / f"{gguf.stem}-{_STORED}-{key}"
    if final.is_dir():
        return final
    notice("target", f"dequantising {gguf.name} to {_STORED}, once, into {final}")
    partial = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        with long_step("target", f"dequantising {gguf.name}"):
            _convert(gguf, partial)
        os.rename(partial, final)
    except OSError as error:
        if final.is_dir():  # another process was faster
            return final
        problem = f"cannot write the dequantised target: {error.strerror}"
        fix = "free some space or set run.cache_dir"
        raise TargetError(problem, where=str(final.parent), fix=fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _convert(gguf: Path, directory: Path) -> None:
    """Config, tokenizer, chat template and weights of a GGUF file, as `save_pretrained` writes."""
    _require("gguf", "accelerate")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    metadata = GgufMetadata(gguf)
    _check_keys(metadata)
    if not torch.cuda.is_available():  # accelerate would otherwise ask deepspeed for a device
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder, name = str(gguf.parent), gguf.name
    loader: Any = AutoModelForCausalLM
    options = {"dtype": getattr(torch, _STORED), "output_loading_info": True}
    try:
        model, info = loader.from_pretrained(
            folder,
            gguf_file=name,
            config=_converted_config(metadata),
            **options,
            **_dequantise_arguments(),
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except (MemoryError, TargetError):
        raise
    except Exception as error:  # metadata and tensors may disagree in any way
        problem = f"cannot be read as GGUF: {brief(error)}"
        fix = "use an architecture that transformers can dequantise, or its safetensors"
        raise TargetError(problem, where=str(gguf), fix=fix) from error
    if missing := sorted(info["missing_keys"]):
        metadata.refuse(f"has no tensor for {missing[0]}, which transformers would make up")
    model.config._name_or_path = ""
    _apply_metadata(metadata, model)
    model.save_pretrained(directory)
    if tokenizer.add_bos_token != _adds_bos(metadata):
        tokenizer.add_bos_token = _adds_bos(metadata)
    tokenizer.save_pretrained(directory)
    _apply_tokenizer(metadata, directory)
    _check_converted(metadata, directory)


def _dequantise_arguments() -> dict[str, object]:
    """transformers ≥ 5.18 asks for an explicit request to dequantise; earlier ones always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _require(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            problem = f"package {name!r} is needed to read GGUF files"
            raise MissingPackage(problem, where="target.source", fix="pip install 'eagle3[gguf]'")


class GgufMetadata:
    """The keys of a file by name, those of its architecture without the architecture's name."""

    def __init__(self, path: Path) -> None:
        """Raises TargetError for a file that cannot be read, or is one part of several."""
        from gguf import GGUFReader

        self.path, self.where = path, str(path)
        try:
            reader = GGUFReader(path)
            stored = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, KeyError, IndexError, OSError) as error:
            problem = f"cannot be read as GGUF: {(str(error).splitlines() or [''])[0]}"
            raise TargetError(problem, where=self.where, fix="download it again") from error
        fields: dict[str, Any] = stored
        parts = int(fields.get("split.count", 0))
        if parts > 1:
            problem = f"is one of {parts} parts of a model"
            fix = "join them with `llama-gguf-split --merge`, and name the whole file"
            raise TargetError(problem, where=self.where, fix=fix)
        self.architecture = str(fields.get("general.architecture"))
        prefix = f"{self.architecture}."
        self.tokenizer = {
            name.removeprefix("tokenizer."): value
            for name, value in fields.items()
            if name.startswith("tokenizer.")
        }
        self.model = {
            name.removeprefix(prefix): value
            for name, value in fields.items()
            if name.startswith(prefix)
        }
        general = ("general.", "tokenizer.", "GGUF.", "split.", "quantize.imatrix.", prefix)
        for name in fields:
            if not name.startswith(general):
                self.refuse(f"the key {name} is not of its architecture {self.architecture}")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        end, before = 0, ""
        for tensor in sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset)):
            if tensor.data_offset < end:
                self.refuse(f"the tensors {before} and {tensor.name} overlap")
            end, before = int(tensor.data_offset) + int(tensor.n_bytes), tensor.name

    def refuse(self, problem: str) -> NoReturn:
        raise TargetError(problem, where=self.where, fix=_FIX)


def _converted_config(gguf: GgufMetadata) -> Any:
    """The configuration that transformers makes of a file, with sizes that it leaves out."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(gguf.path.parent, gguf_file=gguf.path.name)
    read = _renamed(gguf, config).values()
    for name, field in _SIZES.items():
        if name in gguf.model and field not in read and hasattr(config, field):
            setattr(config, field, gguf.model[name])
    return config


def _apply_metadata(gguf: GgufMetadata, model: Any) -> None:
    """Give the converted `model` what transformers does not read. Raises TargetError."""
    config = model.config
    ends = _end_ids(gguf)
    if ends - {gguf.tokenizer.get("ggml.eos_token_id")}:  # as llama.cpp, which takes any of them
        model.generation_config.eos_token_id = sorted(ends)
    if config.model_type not in DECODED:
        _check_read(gguf, model)
    if _FREQUENCIES not in gguf.tensors and not any(each.startswith(_ROPE) for each in gguf.model):
        return
    has = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(each, dict) for each in has.values()):  # those of each type of layer
        named = next((each for each in gguf.model if each.startswith(_ROPE)), _FREQUENCIES)
        gguf.refuse(f"{named} is not applied to layers of {config.model_type}")
    factors = gguf.tensors[_FREQUENCIES].data if _FREQUENCIES in gguf.tensors else None
    size, positions = _head_dim(config), config.max_position_embeddings
    rope = _rope_parameters(
        gguf.model, factors, head_dim=size, positions=positions, where=gguf.where
    )
    if rope is not None:
        partial = {name: has[name] for name in ("partial_rotary_factor",) if name in has}
        config.rope_parameters = partial | rope
        try:
            type(config).from_dict(config.to_dict())
        except Exception:  # of huggingface_hub or transformers, by the family
            gguf.refuse(
                f"{rope['rope_type']} rotary scaling is not supported by {config.model_type}"
            )


def _end_ids(gguf: GgufMetadata) -> set[int]:
    """Those that end a reply: by their keys, and by their text, since many files have no such key
    but that of <|endoftext|>."""
    names = [f"ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {int(gguf.tokenizer[name]) for name in names if name in gguf.tokenizer}
    tokens, types = gguf.tokenizer.get("ggml.tokens", ()), gguf.tokenizer.get("ggml.token_type", ())
    named = {
        text: number
        for number, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and text in _ENDS
    }
    if "<|return|>" in named:  # of gpt-oss, whose messages within a reply end with <|end|>
        named.pop("<|end|>", None)
    return ends | set(named.values())


def _check_converted(gguf: GgufMetadata, directory: Path) -> None:
    """Compare the model in `directory` with the metadata of the file. Raises TargetError."""
    from transformers import AutoConfig, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(directory)
    for name, value in gguf.model.items():
        _check_key(gguf, config, name, value)
    if config.model_type in DECODED:
        _check_tensors(gguf, config)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    _check_tokens(gguf, config, tokenizer)
    _check_tokenizer(gguf, tokenizer)


def _check_key(gguf: GgufMetadata, config: Any, name: str, value: Any) -> None:
    """Raise TargetError unless a key's value is what the configuration has."""
    key = f"{gguf.architecture}.{name}"
    if name in _HARMLESS or name.startswith(_ROPE):
        return
    if name in _NEUTRAL and value in _NEUTRAL[name]:
        return
    attribute = _attribute(gguf, config, name)
    if attribute is None:
        gguf.refuse(f"{key}={_shown(value)} is not known here, and may change the model")
    has: Any
    if attribute == "head_dim":
        has = _head_dim(config)
    elif attribute == "rope_theta":
        rope = config.rope_parameters or {}
        has = rope.get("full_attention", rope).get("rope_theta")
    else:
        has = getattr(config, str(attribute), None)
    values = value if isinstance(value, list) else [value]
    if name == "attention.sliding_window" and value >= config.max_position_embeddings:
        return  # wider than any text
    if isinstance(has, list | tuple):
        equal = list(has) == values
    else:
        equal = all(_equal(has, each) for each in values)
    if not equal:
        gguf.refuse(f"{key}={_shown(value)}, but the converted model has {attribute}={has}")


def _attribute(gguf: GgufMetadata, config: Any, name: str) -> str | None:
    """The configuration's field that a key of the architecture becomes."""
    if name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        return "head_dim"
    if name == "attention.sliding_window":
        return "sliding_window"
    return _SIZES.get(name) or _renamed(gguf, config).get(name)


def _renamed(gguf: GgufMetadata, config: Any) -> dict[str, str]:
    """Keys of the architecture that transformers reads, and the fields that they become."""
    from transformers.integrations import ggml

    families: dict[str, dict[str, Any]] = getattr(ggml, "GGUF_CONFIG_MAPPING", {})
    both = {**families.get(config.model_type, {}), **families.get(gguf.architecture, {})}
    return {name: str(field) for name, field in both.items() if field}


def _check_tensors(gguf: GgufMetadata, config: Any) -> None:
    """Raise TargetError for a tensor that is in the file alone, or in the model alone."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    by_name = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    architecture = by_name.get(gguf.architecture, MODEL_ARCH.LLAMA)  # Mistral's names are Llama's
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = read_architecture(config, gguf.where).tensors or {}
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors}
    if missing := sorted(str(each) for each in known - gguf.tensors.keys()):
        gguf.refuse(f"has no tensor {missing[0]}, which a {config.model_type} has")
    surplus = gguf.tensors.keys() - known - {_FREQUENCIES}
    if surplus:
        name = min(surplus)
        gguf.refuse(f"{name} is not read by transformers' {config.model_type}")


def _check_read(gguf: GgufMetadata, model: Any) -> None:
    """Raise TargetError for a tensor that transformers' conversion of this family leaves out."""
    from transformers import modeling_gguf_pytorch_utils as conversion

    processor: Any = conversion.TENSOR_PROCESSORS.get(gguf.architecture, conversion.TensorProcessor)
    try:
        known = conversion.get_gguf_hf_weights_map(model, processor(config={}))
    except NotImplementedError as error:
        gguf.refuse(str(error).splitlines()[0])
    tied = {"output.weight"} if model.config.tie_word_embeddings else set()
    experts = {f"{name}.weight" for name in known}  # whose names there have no suffix
    if surplus := gguf.tensors.keys() - known.keys() - experts - {_FREQUENCIES} - tied:
        name, kind = min(surplus), model.config.model_type
        gguf.refuse(f"{name} is not read by transformers' {kind}")


def _check_tokens(gguf: GgufMetadata, config: Any, tokenizer: Any) -> None:
    tokens = gguf.tokenizer.get("ggml.tokens")
    if tokens is not None:
        ids = tokenizer.convert_tokens_to_ids(list(tokens))
        # Tokens of SentencePiece that a user defined stand there with spaces, of which the
        # normaliser makes "▁".
        spelt = tokenizer.convert_tokens_to_ids([token.replace(" ", "▁") for token in tokens])
        wrong = [at for at, either in enumerate(zip(ids, spelt, strict=True)) if at not in either]
        # A token that stands twice in the list has one id.
        wrong = [at for at in wrong if tokens.index(tokens[at]) == at]
        if wrong:
            at = wrong[0]
            gguf.refuse(f"token {at} is {tokens[at]!r}, the converted tokenizer gives it {ids[at]}")
    for name in ("bos", "eos"):
        stated = gguf.tokenizer.get(f"ggml.{name}_token_id")
        has = getattr(tokenizer, f"{name}_token_id"), getattr(config, f"{name}_token_id", None)
        if stated is not None and stated not in has:
            gguf.refuse(f"tokenizer.ggml.{name}_token_id={stated}, converted to {has[0]}")
    template = gguf.tokenizer.get("chat_template")
    if template is not None and tokenizer.chat_template != template:
        gguf.refuse("tokenizer.chat_template is not the converted tokenizer's")


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _equal(has: Any, value: Any) -> bool:
    if isinstance(has, float) or isinstance(value, float):
        number = isinstance(has, int | float)
        return number and abs(has - value) <= 1e-6 * max(abs(has), abs(value))
    return bool(has == value)


def _shown(value: Any) -> str:
    return str(value if not isinstance(value, list) else _first(value))[:60]


def _first(values: Iterable[Any]) -> str:
    return "[" + ", ".join(str(each) for each in list(values)[:4]) + ", …]"


def _rope_parameters(
    metadata: dict[str, Any], factors: Any | None, *, head_dim: int, positions: int, where: str
) -> dict[str, Any] | None:
    """What config.json has to say; None where plain rotary positions are right.

    `metadata` is by names without the architecture, `factors` the tensor [d/2] that frequencies are
    divided by. Raises TargetError for a scaling that transformers does not compute.
    """
    theta = float(metadata.get("rope.freq_base", 10000.0))
    scaled = _scaling(metadata, where)
    if factors is None:
        return None if scaled is None else {"rope_theta": theta, **scaled}
    factors = np.asarray(factors, dtype=np.float64).reshape(-1)
    if scaled is not None or len(factors) != head_dim // 2 or not (factors > 0).all():
        problem = f"{_FREQUENCIES} holds {len(factors)} factors for heads of {head_dim}"
        problem += f" beside rope.scaling.type={scaled['rope_type']}" if scaled else ""
        raise TargetError(f"{problem}: it cannot be applied", where=where, fix=_FIX)
    if np.allclose(factors, 1.0, rtol=1e-6, atol=0):
        return None
    known = _llama3(factors, theta, head_dim)
    return {"rope_theta": theta, **(known or _exact(factors, positions))}


def _scaling(metadata: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Of the keys, without theta. Raises TargetError for one that is not known."""
    scaling = {
        name.removeprefix(_SCALING): value
        for name, value in metadata.items()
        if name.startswith(_SCALING) and name != f"{_SCALING}finetuned"
    }
    kind = scaling.pop("type", None)
    factor = scaling.pop("factor", None)
    if (legacy := metadata.get("rope.scale_linear")) is not None:
        kind, factor = kind or "linear", factor if factor is not None else legacy
    length = scaling.pop("original_context_length", None)
    strength = scaling.pop("attn_factor", None), scaling.pop("yarn_attn_factor", None)
    extrapolation = scaling.pop("yarn_ext_factor", None)
    betas = {
        name: float(scaling.pop(f"yarn_{name}"))
        for name in ("beta_fast", "beta_slow")
        if f"yarn_{name}" in scaling
    }
    plain = all(each in (None, 1.0) for each in (*strength, extrapolation))
    if not scaling and plain:
        if kind in (None, "none") and not betas and factor in (None, 0.0, 1.0):
            return None
        if kind == "linear" and factor and not betas:
            # A factor of 1 turns no frequency.
            return None if factor == 1.0 else {"rope_type": "linear", "factor": float(factor)}
        if kind == "yarn" and factor and length:
            return {
                "rope_type": "yarn",
                "factor": float(factor),
                "original_max_position_embeddings": int(length),
                **betas,
            }
    named = {name: metadata[name] for name in metadata if name.startswith(("rope.scal",))}
    shown = ", ".join(f"{name}={value}" for name, value in sorted(named.items()))
    raise TargetError(f"{shown} cannot be applied", where=where, fix=_FIX)


def _llama3(factors: Any, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The parameters that give these factors to the precision of a float32, where there are any."""
    factor = float(factors.max())
    lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # of a whole turn
    for original in _LENGTHS:
        share = (original / lengths - 1.0) / (4.0 - 1.0)
        middle = 1 / ((1 - share) / factor + share)
        expected = np.where(
            lengths < original / 4.0, 1.0, np.where(lengths > original, factor, middle)
        )
        if np.allclose(factors, expected, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    return None


def _exact(factors: Any, positions: int) -> dict[str, Any]:
    """The factors as they are, for texts of every length."""
    listed = [float(each) for each in factors]
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": positions,
    }


def _apply_tokenizer(gguf: GgufMetadata, directory: Path) -> None:
    """Correct the `tokenizer.json` in `directory` where the file says something else."""
    path = directory / "tokenizer.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    before = json.dumps(tree)
    _correct_added(gguf, tree)
    for part, value in _expected(gguf, tree).items():
        owner, _, field = part.rpartition(".")
        (tree[owner] if owner else tree)[field] = value
    if json.dumps(tree) != before:
        path.write_text(json.dumps(tree, ensure_ascii=False, indent=2), encoding="utf-8")


def _check_tokenizer(gguf: GgufMetadata, tokenizer: Any) -> None:
    """Raise TargetError where a loaded tokenizer is not what `_apply_tokenizer` wrote."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    for part, value in _expected(gguf, tree).items():
        owner, _, field = part.rpartition(".")
        if (tree[owner] if owner else tree).get(field) != value:
            gguf.refuse(f"the {field} of the converted tokenizer is not the file's")
    tokens, added = gguf.tokenizer.get("ggml.tokens") or [], tokenizer.added_tokens_decoder
    if surplus := sorted(each for each in added if each >= len(tokens)):
        gguf.refuse(f"has {len(tokens)} tokens, transformers adds {added[surplus[0]].content!r}")
    for at, token, kind in _standing(gguf):
        if at not in added and not (token.isspace() and gguf.architecture in _GEMMA):
            gguf.refuse(f"token {at}, {token!r}, has type {kind}, but is cut into pieces in a text")
    first = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if first != (bos := _adds_bos(gguf)):
        gguf.refuse(f"tokenizer.ggml.add_bos_token={bos}, the converted tokenizer has {first}")


def _adds_bos(gguf: GgufMetadata) -> bool:
    """Whether a text that is no chat begins with the beginning-of-text token."""
    model, pre = gguf.tokenizer.get("ggml.model"), gguf.tokenizer.get("ggml.pre")
    default = model == "llama" or pre in _WHOLE_PIECES
    stated = bool(gguf.tokenizer.get("ggml.add_bos_token", default))
    return stated and "ggml.bos_token_id" in gguf.tokenizer


def _check_keys(gguf: GgufMetadata) -> None:
    """Raise TargetError for a kind of tokenizer, or a setting of one, that is not known here."""
    keys = gguf.tokenizer
    model, pre = keys.get("ggml.model"), keys.get("ggml.pre")
    if model not in ("gpt2", "llama"):
        gguf.refuse(f"tokenizer.ggml.model={model} is not known here, gpt2 and llama are")
    if model == "gpt2" and pre is None:
        gguf.refuse("has no tokenizer.ggml.pre, which says how text is split")
    if model == "gpt2" and pre not in _SPLITS:
        gguf.refuse(f"tokenizer.ggml.pre={pre} splits text in a way that is not known here")
    if model == "gpt2" and keys.get("ggml.add_space_prefix"):
        gguf.refuse("tokenizer.ggml.add_space_prefix=True is not applied to byte-level tokens")
    if keys.get("ggml.remove_extra_whitespaces"):
        gguf.refuse("tokenizer.ggml.remove_extra_whitespaces=True is not applied")
    known = _SILENT | {"ggml.remove_extra_whitespaces"}
    for name in keys:
        if name not in known and not name.endswith("_token_id") and "chat_template." not in name:
            gguf.refuse(f"tokenizer.{name} is not known here, and may change the tokens")


def _expected(gguf: GgufMetadata, tree: dict[str, Any]) -> dict[str, Any]:
    """Parts of tokenizer.json, and what the file says of them."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    whole: Any = Tokenizer(models.BPE())
    pre = gguf.tokenizer.get("ggml.pre")
    if gguf.tokenizer.get("ggml.model") == "gpt2":
        parts: list[Any] = []
        split = _SPLITS[str(pre)]
        if split in (_GPT2, _DIGITS):
            if split == _DIGITS:
                parts.append(pre_tokenizers.Digits(individual_digits=True))
            parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
        else:
            parts.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
            parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        one = len(parts) == 1
        whole.pre_tokenizer = parts[0] if one else pre_tokenizers.Sequence(parts)
        split_as = json.loads(whole.to_str())["pre_tokenizer"]
        # The normaliser is that of transformers' class for the family: a file has none.
        return {"pre_tokenizer": split_as, "model.ignore_merges": pre in _WHOLE_PIECES}
    if gguf.architecture in _GEMMA:
        return {}
    spelled = normalizers.Replace(" ", "▁")
    prefix = bool(gguf.tokenizer.get("ggml.add_space_prefix", True))
    steps = [normalizers.Prepend("▁"), spelled] if prefix else [spelled]
    whole.normalizer = normalizers.Sequence(steps)
    normalizer = json.loads(whole.to_str())["normalizer"]
    decoders = [each for each in tree["decoder"]["decoders"] if each["type"] != "Strip"]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoder = {**tree["decoder"], "decoders": decoders + strip}
    return {"normalizer": normalizer, "pre_tokenizer": None, "decoder": decoder}


def _correct_added(gguf: GgufMetadata, tree: dict[str, Any]) -> None:
    """The file's control and user-defined tokens stand for themselves, and no others are made up.

    transformers adds special tokens of its own, whose ids no row of the embedding has, and spells
    those of the file in bytes where they are not ASCII.
    """
    from tokenizers import AddedToken, pre_tokenizers

    tokens, vocabulary = gguf.tokenizer.get("ggml.tokens") or [], tree["model"]["vocab"]
    added = {each["id"]: each for each in tree["added_tokens"] if each["id"] < len(tokens)}
    byte_level = gguf.tokenizer.get("ggml.model") == "gpt2"
    for at, token, kind in _standing(gguf):
        if at in added or (gguf.architecture in _GEMMA and not byte_level):
            continue
        if token not in vocabulary and byte_level:
            spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            pieces = spelled.pre_tokenize_str(token)
            vocabulary.pop("".join(piece for piece, _ in pieces), None)
            vocabulary[token] = at
        whole: Any = AddedToken(token, normalized=False, special=kind == "control")
        added[at] = {"id": at, **_fields(whole)}
    if gguf.architecture == "phi3" and not byte_level:
        for each in added.values():  # of which a file says nothing
            each["rstrip"] = each["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    tree["added_tokens"] = [added[at] for at in sorted(added)]


def _fields(token: Any) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


def _standing(gguf: GgufMetadata) -> list[tuple[int, str, str]]:
    """Id, text and kind of the tokens that are never cut into pieces."""
    kinds = {_CONTROL: "control", _USER_DEFINED: "user-defined"}
    tokens = gguf.tokenizer.get("ggml.tokens") or []
    types = gguf.tokenizer.get("ggml.token_type") or []
    pairs = enumerate(zip(tokens, types, strict=False))
    return [(at, token, kinds[kind]) for at, (token, kind) in pairs if kind in kinds]
