"""The run's configuration: one section a stage, frozen, strict, documented where declared.

    config = load("configs/demo.yaml", ["synth.max_prompts=200"])

`load` reads the YAML, applies `section.key=value` overrides, rejects unknown keys with the nearest
known one, and returns a frozen `RunConfig`. "auto" values that depend only on the machine are
resolved here; those that depend on the target by the stage, which writes them to its manifest.
Each key is documented below its declaration; `eagle3 schema` prints the same text.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.config.credentials import refuse_credentials, texts
from pipeline.config.drafter import (
    ALL_SETTINGS,
    DRAFTER_GROUP,
    DRAFTERS,
    HEAD_GROUP,
    BlockDrafterSection,
    DrafterSection,
    DsparkDrafterSection,
    Eagle3DrafterSection,
    NgramSection,
    SelfSpecSection,
    StandaloneSection,
)
from pipeline.config.evaluation import EvalSection, RivalSection
from pipeline.config.run import (
    OLD,
    SCRATCH,
    EngineSection,
    FeaturesSection,
    RefreshSection,
    RunConfig,
    RunSection,
    TargetSection,
    cache_directory,
    cpu_kernels,
    is_launched,
    keep_freed_memory,
    local_rank,
    prepare_process,
    rank,
    store_retry_seconds,
    store_timeout_seconds,
    take_settings,
    world_size,
)
from pipeline.config.section import BatchTrees, Section, TreeSection, tree_labels
from pipeline.config.server import OWNER, LiveServerSection, ServeSection
from pipeline.config.synth import (
    DlpSection,
    GeneratorSection,
    PiiSection,
    QualitySection,
    RecognizerSpec,
    SourceSpec,
    SynthSection,
)
from pipeline.config.train import HeadSection, TrainSection
from pipeline.documents import LARGEST_YAML, BrokenDocument, parse_yaml, read_file
from pipeline.errors import ConfigError

__all__ = [
    "DRAFTERS",
    "DRAFTER_GROUP",
    "HEAD_GROUP",
    "OLD",
    "OWNER",
    "SCRATCH",
    "BatchTrees",
    "BlockDrafterSection",
    "DlpSection",
    "DrafterSection",
    "DsparkDrafterSection",
    "Eagle3DrafterSection",
    "EngineSection",
    "EvalSection",
    "FeaturesSection",
    "GeneratorSection",
    "HeadSection",
    "LiveServerSection",
    "NgramSection",
    "PiiSection",
    "QualitySection",
    "RecognizerSpec",
    "RefreshSection",
    "RivalSection",
    "RunConfig",
    "RunSection",
    "Section",
    "SelfSpecSection",
    "ServeSection",
    "SourceSpec",
    "StandaloneSection",
    "SynthSection",
    "TargetSection",
    "TrainSection",
    "TreeSection",
    "cache_directory",
    "cpu_kernels",
    "is_launched",
    "keep_freed_memory",
    "load",
    "local_rank",
    "overridden",
    "parse",
    "prepare_process",
    "rank",
    "store_retry_seconds",
    "store_timeout_seconds",
    "take_settings",
    "tree_labels",
    "world_size",
]

#: What pydantic appends to a key that may be of one type or another.
_ALTERNATIVE = re.compile(r"^(constrained-|literal\[|tuple\[|list\[|dict\[|(int|float|str|bool)$)")


def load(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    force: bool = False,
    shard: str | None = None,
) -> RunConfig:
    """Read, override, check and freeze. Raises ConfigError with file, key and fix."""
    tree = _read_yaml(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    if force:
        _apply_override(tree, "run.force=true")
    if shard is not None:
        _apply_override(tree, f"run.shard={json.dumps(shard)}")
    return parse(tree, where=str(path))


def overridden(tree: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """A nested mapping with `section.key=value` laid over it. Raises ConfigError."""
    for override in overrides:
        _apply_override(tree, override)
    return parse(tree, where="command line")


def parse(tree: dict[str, Any], *, where: str = "config") -> RunConfig:
    """Validate a nested mapping."""
    refuse_credentials(tree, where)
    for key, text in texts(tree):
        if "\0" in text:  # no path, address or command line holds one
            fix = "correct the escape in the quoted text"
            raise ConfigError("holds a null character", where=f"{where}: {key}", fix=fix)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, where) from None
    threads = config.run.threads or len(os.sched_getaffinity(0))
    return config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(read_file(path, most=LARGEST_YAML))
    except FileNotFoundError:
        raise ConfigError(
            "no such file", where=str(path), fix="pass an existing YAML file with -c"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error}",
            where=str(path),
            fix="pass a readable UTF-8 YAML file with -c",
        ) from None
    except BrokenDocument as error:
        where = f"{path}:{error.line}" if error.line else str(path)
        where += f": {error.key}" if error.key else ""
        fix = "correct that line" if error.line else "correct the file"
        raise ConfigError(error.problem, where=where, fix=fix) from None
    if not isinstance(tree, dict):
        known = ", ".join(RunConfig.model_fields)
        raise ConfigError(
            "must be a mapping of sections",
            where=str(path),
            fix=f"start from configs/demo.yaml; sections are {known}",
        )
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts) or re.search(r"\s|://", key.strip()):
        beginning = "".join(re.findall(r"^[a-z_.]+", override))  # what follows may be a key
        raise ConfigError(
            "not of the form section.key=value",
            where=f"override {beginning}…",
            fix="write for example synth.max_prompts=200",
        )
    try:
        value = parse_yaml(text)
    except BrokenDocument as error:
        problem = "the value is not valid YAML" if error.is_syntax else str(error)
        fix = "quote the value" if error.is_syntax else "correct the value"
        raise ConfigError(problem, where=f"override {key}", fix=fix) from None
    node = tree
    for part in parts[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                f"{part!r} is not a section",
                where=f"override {key}",
                fix="name a section and one of its keys",
            )
        node = child
    node[parts[-1]] = value


def _explain(error: ValidationError, where: str) -> ConfigError:
    """The first problem pydantic found, as one line with a suggestion."""
    first, whole = error.errors()[0], [str(part) for part in error.errors()[0]["loc"]]
    depth = next((at for at, part in enumerate(whole) if _ALTERNATIVE.match(part)), len(whole))
    location = whole[:depth]
    dotted = ".".join(location)
    if first["type"] == "extra_forbidden":
        known = list(_fields_at(location[:-1]))
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
        return ConfigError(f"unknown key {location[-1]!r}", where=f"{where}: {dotted}", fix=fix)
    if first["type"] == "missing" and location == whole:
        return ConfigError(
            "required but not set", where=f"{where}: {dotted}", fix=f"add {dotted}: …"
        )
    if first["type"] == "model_type":
        problem, fix = _not_a_section(location, first["input"])
        return ConfigError(problem, where=f"{where}: {dotted}", fix=fix)
    same = [_said(each) for each in error.errors() if each["loc"][:depth] == first["loc"][:depth]]
    said = " or ".join(dict.fromkeys(same)) if location != whole else _said(first)
    if isinstance(first["input"], dict) and "; " in said:  # of a section, whose text is no advice
        problem, _, fix = said.partition("; ")
        return ConfigError(problem, where=f"{where}: {dotted}" if dotted else where, fix=fix)
    shown = f", got {first['input']!r}" if _may_be_shown(location, first["input"]) else ""
    return ConfigError(f"{said}{shown}", where=f"{where}: {dotted}", fix=_describe(location))


def _not_a_section(location: list[str], value: Any) -> tuple[str, str]:
    """Problem and fix of a value where a section's keys should stand."""
    fields, dotted = _fields_at(location), ".".join(location)
    own = {name: field for name, field in fields.items() if field is not ALL_SETTINGS.get(name)}
    required = [name for name, field in own.items() if field.is_required()]
    if value is None:
        fix = f"write {{{required[0]}: …}}" if required else "leave it out or write {}"
        return "is empty", fix
    meant = "enabled" if isinstance(value, bool) else (required or ["name"])[0]
    shown = _may_be_shown(location, value)
    if shown and isinstance(value, bool | str) and meant in own:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, bool) else value
        is_listed = any(part.isdigit() for part in location)  # which no override names
        fix = f"{{{meant}: {text}}}" if is_listed else f"{dotted}.{meant}={text}"
        return f"{value!r} is not a mapping of its keys", f"write {fix}"
    problem = f"{value!r} is not a mapping of its keys" if shown else "is not a mapping of its keys"
    return problem, f"write {{key: value}}; known keys here: {', '.join(fields)}"


#: pydantic's words for types of Python → those for what a file holds.
_IN_A_FILE = {"tuple_type": "Input should be a list", "dict_type": "Input should be a mapping"}


def _said(error: ErrorDetails) -> str:
    """pydantic's words, or those of our own check alone."""
    return _IN_A_FILE.get(error["type"], error["msg"].removeprefix("Value error, "))


def _may_be_shown(location: list[str], value: Any) -> bool:
    """Not whole sections, and nothing where people put keys by mistake."""
    fields = (_fields_at(location[:at]).get(part) for at, part in enumerate(location))
    return not isinstance(value, dict) and all(field.repr for field in fields if field)


def _fields_at(location: list[str]) -> dict[str, Any]:
    model: Any = RunConfig
    parts = iter(location)
    for part in parts:
        if part.isdigit():
            continue
        field = model.model_fields.get(part) if model else None
        if field is None:
            return {}
        model = _section_in(field.annotation)
        if get_origin(field.annotation) is dict:
            next(parts, None)  # a key of the mapping
    if model is None:
        return {}
    return dict(model.model_fields) | (ALL_SETTINGS if model is DrafterSection else {})


def _section_in(annotation: Any) -> type[Section] | None:
    """The Section inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in get_args(annotation):
        section = _section_in(argument)
        if section is not None:
            return section
    return None


def _describe(location: list[str]) -> str:
    """The field's own description: what a correct value means."""
    for depth in range(len(location), 0, -1):
        field = _fields_at(location[: depth - 1]).get(location[depth - 1])
        if field is not None:
            return " ".join(str(field.description).split())
    return "see configs/demo.yaml"
