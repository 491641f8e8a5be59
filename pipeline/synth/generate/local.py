"""The bundled decoder as a generator, plain or with an earlier head of the same target."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from pipeline.config import RunConfig
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.request import Completion
from pipeline.eagle3.checkpoint import HEAD_FILES, load_head
from pipeline.records import TargetContract
from pipeline.store.fetch import as_directory
from pipeline.store.location import Location
from pipeline.synth.generate.conversations import Reply, Take
from pipeline.synth.select import synth_section
from pipeline.target.load import pick_device


class LocalAnswer:
    """Requests over the engine's slots."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def ignores_neighbours(self) -> bool:
        """Whether a reply is the same bit for bit whatever is computed beside it: our own CPU kernels add in a fixed order."""
        return isinstance(self._engine.model.ops, CpuOps)

    def __call__(self, take: Take) -> Iterator[Reply]:
        """Replies as they are finished. When `take` has none left, what is under way ends first."""
        while (first := take()) is not None:
            for completion in self._engine.generate(chain((first,), iter(take, None))):
                yield _reply(completion)


def open_local(config: RunConfig, directory: Path, contract: TargetContract) -> LocalAnswer:
    """The target over the section's slots, drafting with `synth.head` when there is one."""
    section = synth_section(config)
    model = DecoderModel.load(
        directory,
        contract.capture_layers,
        device=pick_device(config.target.device),
        dtype=getattr(torch, contract.dtype),
        max_length=section.max_prompt_tokens + section.max_new_tokens,
    )
    if section.head is None:
        return LocalAnswer(Engine(model, slots=section.batch_size))
    with as_directory(Location(section.head), HEAD_FILES) as folder:
        head, _ = load_head(folder, expected=contract)
    return LocalAnswer(
        Engine(model, drafter=Eagle3Drafter(head, model, section.tree), slots=section.batch_size)
    )


def _reply(completion: Completion) -> Reply:
    if completion.finish_reason == "error":
        assert completion.error is not None
        return Reply(completion.request_id, error=(completion.error.what, completion.error.fix))
    return Reply(completion.request_id, completion.token_ids, completion.finish_reason)
