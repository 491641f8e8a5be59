"""What a script needs, from one place: configure and run stages, decode, read what a run holds.

    from pipeline.api import Request, load_config, open_engine, read_samples, read_states, run

Everything else under `pipeline` may move between versions.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline import runtime
from pipeline.config import DrafterSection, RunConfig, TreeSection, parse
from pipeline.config import load as load_config
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request, Statistics
from pipeline.drafters.registry import drafter_name, load_drafter
from pipeline.errors import Eagle3Error
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
    manifests = []
    for stage, *beside in config.in_turn(stages or STAGES):
        if beside:
            manifests += runtime.run_side_by_side(config, (stage, *beside))
        else:
            manifests.append(runtime.run(config, stage))
    return manifests


def open_engine(
    source: str,
    *,
    head: str | None = None,
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
    most tokens of one, prompt and reply; `device` and `dtype` are as in the configuration's
    `target`, and `chat_template` too, for a target that has none and without a head: with one, the
    template and its mode are those of the head's contract. Raises ConfigError, TargetError,
    HeadError, ContractMismatch.
    """
    weights = None
    if head is None:
        section = {"source": source, "chat_template": chat_template}
        target = open_target(parse({"target": section}, where="open_engine").target)
    else:
        weights, card = open_head(head)
        target = open_contracted_target(card.contract, source, where=f"head {head}")
    where = pick_device(device)
    model = DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=where,
        dtype=resolve_dtype(dtype, where),
        max_length=max_length,
    )
    named = drafter or DrafterSection(name=drafter_name(weights))
    factory = load_drafter(named, model, target, weights)
    drafting = factory(tree or TreeSection()) if factory else None
    return Engine(model, drafter=drafting, slots=slots), target.template()


def read_samples(run_uri: str) -> Iterator[Sample]:
    """The conversations of a finished synth stage, each shard's checksum compared first."""
    location = stage_location(run_uri, "synth")
    for shard in read_manifest(run_uri, "synth").shards:
        yield from read_shard_of_samples(location, shard)


def read_states(run_uri: str) -> Iterator[StatesSample]:
    """The states of a finished features stage, decoded to bf16, each sample's checksum compared."""
    location = stage_location(run_uri, "features")
    for shard in read_manifest(run_uri, "features").shards:
        reader = StatesReader(location, shard)
        for index in range(len(reader)):
            yield reader.sample(index)
