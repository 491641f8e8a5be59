"""What a target *is*: the facts that data, head and target must agree on."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from pipeline.config import TargetSection
from pipeline.errors import ConfigError, TargetError
from pipeline.records import TargetContract, digest
from pipeline.target.resolve import ResolvedTarget, content_fingerprint


def read_contract(target: TargetSection, resolved: ResolvedTarget) -> TargetContract:
    """The contract of a resolved target. Reads headers and sampled blocks, no whole weights."""
    from transformers import AutoConfig

    directory = resolved.directory
    where = f"target.source={resolved.source}"
    try:
        config: Any = AutoConfig.from_pretrained(directory).get_text_config()
    except (ValueError, OSError, KeyError) as error:
        raise TargetError(
            f"config.json cannot be read: {str(error).splitlines()[0]}",
            where=where,
            fix="use a causal language model that transformers knows",
        ) from error
    weights = sorted(directory.glob("*.safetensors"))
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return TargetContract(
        source=resolved.source,
        revision=resolved.revision,
        fingerprint=digest([[path.name, content_fingerprint(path)] for path in weights]),
        dtype=target.dtype,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        rope=json.loads(json.dumps(config.rope_parameters or {})),
        capture_layers=capture_layers(target, config.num_hidden_layers),
        tokenizer_hash=_tokenizer_hash(directory, where),
        chat_template_hash=_template_hash(directory),
        chat_template_kwargs=dict(sorted(target.chat_template_kwargs.items())),
        parameters=sum(_count(path, skip_head=tied) for path in weights),
    )


def capture_layers(target: TargetSection, num_layers: int) -> tuple[int, int, int]:
    """Output indices of the low, middle and high aux layer; auto is [1, L//2-1, L-4].

    Raises ConfigError when a layer does not exist or the three are not ascending.
    """
    chosen = target.capture_layers
    low, middle, high = (1, num_layers // 2 - 1, num_layers - 4) if chosen == "auto" else chosen
    if not 0 <= low < middle < high < num_layers:
        raise ConfigError(
            f"{[low, middle, high]} do not name three ascending layers of a target that has {num_layers} (0…{num_layers - 1})",
            where="target.capture_layers",
            fix="choose three existing output indices, low to high",
        )
    return low, middle, high


def _tokenizer_hash(directory: Path, where: str) -> str:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        path = directory / name
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    raise TargetError(
        "has no tokenizer.json, tokenizer.model or vocab.json",
        where=where,
        fix="save the tokenizer beside the weights with `save_pretrained`",
    )


def _template_hash(directory: Path) -> str:
    """Hash of the chat template's text, wherever it is kept; "none" without one."""
    separate = directory / "chat_template.jinja"
    if separate.is_file():
        return hashlib.sha256(separate.read_bytes()).hexdigest()
    settings = directory / "tokenizer_config.json"
    template = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    return digest(template) if template else "none"


def _count(path: Path, *, skip_head: bool) -> int:
    """Parameters in a safetensors file, from its header alone."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__" or (skip_head and name == "lm_head.weight"):
            continue
        elements = 1
        for extent in tensor["shape"]:
            elements *= extent
        total += elements
    return total
