"""The bundled decoder as a backend, plain or with an earlier head of the same target."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pipeline.config import SynthSection
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.request import Completion
from pipeline.eagle3.checkpoint import HEAD_FILES, load_head
from pipeline.records import Arithmetic
from pipeline.store.location import Location, as_directory
from pipeline.synth.generate.backend import NextRequest, Reply
from pipeline.target.arithmetic import decoder_arithmetic
from pipeline.target.open import Target


class LocalBackend:
    """Requests over the engine's slots."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def batch_invariant(self) -> bool:
        """True with our own CPU kernels, which add in a fixed order."""
        return isinstance(self._engine.model.ops, CpuOps)

    @property
    def arithmetic(self) -> Arithmetic:
        """Of the engine's backend."""
        model = self._engine.model
        return decoder_arithmetic(model.ops, model.dtype, model.device)

    def generate(self, next_request: NextRequest) -> Iterator[Reply]:
        """Replies as they are finished. With no request left, those in flight end first."""
        while (first := next_request()) is not None:
            for completion in self._engine.generate(chain((first,), iter(next_request, None))):
                yield _reply(completion)


def open_local(section: SynthSection, target: Target) -> LocalBackend:
    """The target over the section's slots, drafting with `synth.head` when there is one."""
    model = DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=target.device,
        dtype=target.dtype,
        max_length=section.max_prompt_tokens + section.max_new_tokens,
    )
    if section.head is None:
        return LocalBackend(Engine(model, slots=section.batch_size))
    with as_directory(Location(section.head), HEAD_FILES) as folder:
        head, _ = load_head(folder, expected=target.contract)
    drafter = Eagle3Drafter(head, model, section.tree)
    return LocalBackend(Engine(model, drafter=drafter, slots=section.batch_size))


def _reply(completion: Completion) -> Reply:
    if completion.finish_reason == "error":
        assert completion.error is not None
        return Reply(completion.request_id, error=(completion.error.what, completion.error.fix))
    return Reply(completion.request_id, completion.token_ids, completion.finish_reason)
