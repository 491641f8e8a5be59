"""What a script needs, from one place: configure and run stages, decode, read what a run holds.

    from pipeline.api import Request, load_config, open_engine, read_samples, read_states, run

Everything else under `pipeline` may move between versions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from pipeline import runtime
from pipeline.config import DrafterSection, RunConfig, Section, TreeSection, parse
from pipeline.config import load as load_config
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request, Statistics
from pipeline.drafters.registry import drafter_name, load_drafter
from pipeline.errors import ConfigError, Eagle3Error
from pipeline.heads.registry import open_head
from pipeline.records import STAGES, Manifest, Sample, Stage
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.samples import read_samples as read_shard_of_samples
from pipeline.store.states import StatesReader, StatesSample
from pipeline.target.arithmetic import pick_device, resolve_dtype
from pipeline.target.open import open_contracted_target, open_target
from pipeline.target.template import ChatTemplate

__all__ = [
    "ChatTemplate",
    "Completion",
    "DrafterSection",
    "Eagle3Error",
    "Engine",
    "Manifest",
    "Request",
    "RunConfig",
    "Sample",
    "StatesSample",
    "Statistics",
    "TreeSection",
    "load_config",
    "open_engine",
    "read_samples",
    "read_states",
    "run",
]


def run(config: RunConfig, *stages: Stage) -> list[Manifest]:
    """Run stages of `config` in the order given, by default all four; finished ones are kept.

    Raises Eagle3Error for whatever the user can fix.
    """
    if unknown := [stage for stage in stages if stage not in STAGES]:
        fix = f"name some of {', '.join(STAGES)}"
        raise ConfigError(f"{unknown[0]!r} is not a stage", where="run: stages", fix=fix)
    manifests = []
    for stage, *beside in config.in_turn(stages or STAGES):
        if beside:
            manifests += runtime.run_side_by_side(config, (stage, *beside))
        else:
            manifests.append(runtime.run(config, stage))
    return manifests


def open_engine(
    source: str | os.PathLike[str],
    *,
    head: str | os.PathLike[str] | None = None,
    drafter: DrafterSection | None = None,
    tree: TreeSection | None = None,
    slots: int = 1,
    max_length: int = 2048,
    device: str = "auto",
    dtype: str = "auto",
    chat_template: str | None = None,
) -> tuple[Engine, ChatTemplate]:
    """The decoder on a target (as `target.source`), with the head at a directory or URI if given,
    or another `drafter`.

    `tree` is the draft tree's shape, `slots` the requests decoded side by side, `max_length` the
    most tokens of one, prompt and reply; `device` (or one GPU, `cuda:1`) and `dtype` are as in the
    configuration's `target`, and `chat_template` too, for a target that has none and without a
    head: with one, the template and its mode are those of the head's contract. Raises ConfigError,
    TargetError, HeadError, ContractMismatch.
    """
    _check_sizes(slots=(slots, 1), max_length=(max_length, 2))
    _check_type(DrafterSection, "DrafterSection(name=…)", drafter=drafter)
    _check_type(TreeSection, "TreeSection(top_k=…, steps=…, nodes=…)", tree=tree)
    # A configuration has all GPUs that its process sees; here one of them can be meant.
    one = isinstance(device, str) and re.fullmatch(r"cuda:[0-9]+", device)
    keys = {"source": _text(source), "device": "cuda" if one else device, "dtype": dtype}
    keys["chat_template"] = chat_template
    section = parse({"target": keys}, where="open_engine").target
    weights = None
    if head is None:
        target = open_target(section)
    else:
        weights, card = open_head(_text(head))
        target = open_contracted_target(card.contract, section.source, where=f"head {head}")
    where = pick_device(device if one else section.device)
    model = DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=where,
        dtype=resolve_dtype(section.dtype, where),
        max_length=max_length,
    )
    named = drafter or DrafterSection(name=drafter_name(weights))
    factory = load_drafter(named, model, target, weights)
    drafting = factory(tree or TreeSection()) if factory else None
    return Engine(model, drafter=drafting, slots=slots), target.template()


def _text(path: Any) -> Any:
    """A path as text; what is neither is refused by name where it is read."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _check_sizes(**sizes: tuple[Any, int]) -> None:
    """Of each argument its value, and the least that it may be."""
    for name, (value, least) in sizes.items():
        if type(value) is not int or value < least:
            problem, fix = f"{value!r} is not a number of at least {least}", "pass an int"
            if type(value) is int:
                fix = f"set it to {least} or more"
            raise ConfigError(problem, where=f"open_engine: {name}", fix=fix)


def _check_type(section: type[Section], example: str, **values: object) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, section):
            problem = f"{value!r} is not a {section.__name__}"
            fix = f"pass {example} of pipeline.api, or leave it out"
            raise ConfigError(problem, where=f"open_engine: {name}", fix=fix)


def read_samples(run_uri: str | os.PathLike[str]) -> Iterator[Sample]:
    """The conversations of a finished synth stage, each shard's checksum compared first."""
    uri = _text(run_uri)
    location = stage_location(uri, "synth")
    for shard in read_manifest(uri, "synth").shards:
        yield from read_shard_of_samples(location, shard)


def read_states(run_uri: str | os.PathLike[str]) -> Iterator[StatesSample]:
    """The states of a finished features stage, decoded to bf16, each sample's checksum compared."""
    uri = _text(run_uri)
    location = stage_location(uri, "features")
    for shard in read_manifest(uri, "features").shards:
        reader = StatesReader(location, shard)
        for index in range(len(reader)):
            yield reader.sample(index)
