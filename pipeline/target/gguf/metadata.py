"""Whether all that a GGUF file says of its model is in the one that transformers made of it.

    apply_metadata(path, model)        before it is saved: rotary scaling, further end ids
    check_converted(path, directory)   after: every key and tensor is in the config and tokenizer

A key of the architecture or a tensor that nothing here knows is refused: it may change the maths.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import TargetError
from pipeline.target.architecture import DECODED
from pipeline.target.gguf.rope import FREQUENCIES, rope_parameters
from pipeline.target.gguf.tokenizer import check_tokenizer

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


class GgufMetadata:
    """The keys of a file by name, those of its architecture without the architecture's name."""

    def __init__(self, path: Path) -> None:
        """Raises TargetError for a file that is none, or one part of several."""
        from gguf import GGUFReader

        self.where = str(path)
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

    def refuse(self, problem: str) -> NoReturn:
        raise TargetError(problem, where=self.where, fix=_FIX)


def read_converted_config(path: Path) -> Any:
    """The configuration that transformers makes of a file, with sizes that it leaves out."""
    from transformers import AutoConfig

    gguf = GgufMetadata(path)
    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    read = _renamed(gguf, config).values()
    for name, field in _SIZES.items():
        if name in gguf.model and field not in read and hasattr(config, field):
            setattr(config, field, gguf.model[name])
    return config


def apply_metadata(path: Path, model: Any) -> None:
    """Give the converted `model` what transformers does not read. Raises TargetError."""
    gguf, config = GgufMetadata(path), model.config
    names = [f"ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {int(gguf.tokenizer[name]) for name in names if name in gguf.tokenizer}
    if len(ends) > 1:  # as llama.cpp, which ends a reply with any of them
        model.generation_config.eos_token_id = sorted(ends)
    if config.model_type not in DECODED:
        _check_read(gguf, model)
    if FREQUENCIES not in gguf.tensors and not any(each.startswith(_ROPE) for each in gguf.model):
        return
    has = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(each, dict) for each in has.values()):  # those of each type of layer
        named = next((each for each in gguf.model if each.startswith(_ROPE)), FREQUENCIES)
        gguf.refuse(f"{named} is not applied to layers of {config.model_type}")
    factors = gguf.tensors[FREQUENCIES].data if FREQUENCIES in gguf.tensors else None
    size, positions = _head_dim(config), config.max_position_embeddings
    rope = rope_parameters(
        gguf.model, factors, head_dim=size, positions=positions, where=gguf.where
    )
    if rope is not None:
        partial = {name: has[name] for name in ("partial_rotary_factor",) if name in has}
        config.rope_parameters = partial | rope
        try:
            type(config).from_dict(config.to_dict())
        except Exception:  # of huggingface_hub or transformers, by the family
            gguf.refuse(f"{rope['rope_type']} rotary scaling is none of {config.model_type}'s")


def check_converted(path: Path, directory: Path) -> None:
    """Compare the model in `directory` with the metadata of the file. Raises TargetError."""
    from transformers import AutoConfig, AutoTokenizer

    gguf = GgufMetadata(path)
    config: Any = AutoConfig.from_pretrained(directory)
    for name, value in gguf.model.items():
        _check_key(gguf, config, name, value)
    if config.model_type in DECODED:
        _check_tensors(gguf, config)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    _check_tokenizer(gguf, config, tokenizer)
    check_tokenizer(gguf, tokenizer)


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
    from gguf import MODEL_ARCH, get_tensor_name_map

    from pipeline.target.architecture import read_architecture

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    if config.model_type != "llama":
        arch = {"mistral": "LLAMA"}.get(config.model_type, config.model_type.upper())
        names = get_tensor_name_map(MODEL_ARCH[arch], config.num_hidden_layers)
    tensors = read_architecture(config, gguf.where).tensors or {}
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors}
    if missing := sorted(str(each) for each in known - gguf.tensors.keys()):
        gguf.refuse(f"has no tensor {missing[0]}, which a {config.model_type} has")
    surplus = gguf.tensors.keys() - known - {FREQUENCIES}
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
    if surplus := gguf.tensors.keys() - known.keys() - experts - {FREQUENCIES} - tied:
        name, kind = min(surplus), model.config.model_type
        gguf.refuse(f"{name} is not read by transformers' {kind}")


def _check_tokenizer(gguf: GgufMetadata, config: Any, tokenizer: Any) -> None:
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
