"""What a target *is*: the facts that data, head and target must agree on."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from pipeline.config import TargetSection
from pipeline.errors import ConfigError, ContractMismatch, TargetError
from pipeline.records import TargetContract, digest
from pipeline.target.architecture import Architecture, read_architecture, read_config
from pipeline.target.files import fingerprint, sampled_fingerprint, weight_files
from pipeline.target.resolve import ResolvedTarget, resolve
from pipeline.target.weights import TargetWeights


def read_contract(
    target: TargetSection, resolved: ResolvedTarget, architecture: Architecture | None = None
) -> TargetContract:
    """The contract of a resolved target. Every byte of the weights is read once."""
    directory = resolved.directory
    where = f"target.source={resolved.source}"
    whole = read_config(directory, where)
    architecture = architecture or read_architecture(whole, where)
    config: Any = whole.get_text_config()
    files = weight_files(directory)
    weights = TargetWeights(directory, architecture)
    return TargetContract(
        source=resolved.source,
        revision=resolved.revision,
        fingerprint=fingerprint(files),
        sampled_fingerprint=sampled_fingerprint(files),
        dtype=weights.stored_dtype(),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        rope=json.loads(json.dumps(getattr(config, "rope_parameters", None) or {})),
        capture_layers=capture_layers(target, config.num_hidden_layers),
        tokenizer_hash=_tokenizer_hash(directory, where),
        chat_template_hash=_template_hash(directory, target.chat_template),
        chat_template=target.chat_template,
        chat_template_kwargs=dict(sorted(target.chat_template_kwargs.items())),
        parameters=weights.count_parameters(tied=bool(architecture.tied)),
    )


def recheck_weights(contract: TargetContract, *, where: str) -> str | None:
    """Why the target of a contract was not looked at: it is not on this machine.

    None: it is, and has the contract's weights. Nothing is downloaded. Raises ContractMismatch for
    other weights, and TargetError for a target that is damaged.
    """
    source = contract.source
    path, name = Path(source).expanduser(), source.removeprefix("package:")
    if name != source:
        if not name.isidentifier() or importlib.util.find_spec(name) is None:
            return f"{source} is not installed"
    elif not path.exists():
        return f"{source} is not on this machine"
    directory = path if path.is_dir() else resolve(TargetSection(source=source)).directory
    files = weight_files(directory)
    old = not contract.fingerprint.startswith("sha256:")
    has = sampled_fingerprint(files) if old else fingerprint(files)
    if has != contract.fingerprint:
        problem = f"made for a target whose weights are {contract.fingerprint[:23]}…"
        fix = "restore the target, or make the run again for this one under another run.uri"
        where = f"{where}: contract.fingerprint"
        raise ContractMismatch(f"{problem}, {source} now has {has[:23]}…", where=where, fix=fix)
    return None


def capture_layers(target: TargetSection, num_layers: int) -> tuple[int, int, int]:
    """Output indices of the low, middle and high aux layer; auto is [1, L//2-1, L-4].

    Raises ConfigError when a layer does not exist or the three are not ascending.
    """
    chosen = target.capture_layers
    low, middle, high = (1, num_layers // 2 - 1, num_layers - 4) if chosen == "auto" else chosen
    if not 0 <= low < middle < high < num_layers:
        wanted = f"three ascending layers of a target that has {num_layers} (0…{num_layers - 1})"
        problem = f"{[low, middle, high]} do not name {wanted}"
        fix = "choose three existing output indices, low to high"
        raise ConfigError(problem, where="target.capture_layers", fix=fix)
    return low, middle, high


def _tokenizer_hash(directory: Path, where: str) -> str:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        path = directory / name
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    problem = "has no tokenizer.json, tokenizer.model or vocab.json"
    fix = "save the tokenizer beside the weights with `save_pretrained`"
    raise TargetError(problem, where=where, fix=fix)


def _template_hash(directory: Path, given: str | None) -> str:
    """Hash of the chat template's text, given or wherever it is kept; "none" without one."""
    separate = directory / "chat_template.jinja"
    if separate.is_file() and given is None:
        return hashlib.sha256(separate.read_bytes()).hexdigest()
    settings = directory / "tokenizer_config.json"
    template = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    if given is not None and given != template:
        return hashlib.sha256(given.encode()).hexdigest()
    return digest(template) if template else "none"
