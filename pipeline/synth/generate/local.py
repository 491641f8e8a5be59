"""The bundled decoder as a backend, plain or with an earlier head of the same target."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from itertools import chain

import torch

from pipeline.config import DrafterSection, SynthSection
from pipeline.console import notice
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.engine import OFFLINE_PREFILL_TOKENS, Engine
from pipeline.decoder.leading import LeadingEngine, engine_among
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.cpu.ops import CpuOps
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.decoder.request import Completion, Request
from pipeline.drafters.registry import drafter_name, load_drafter
from pipeline.errors import OutOfMemory, brief, is_out_of_memory
from pipeline.heads.registry import open_head
from pipeline.records import Arithmetic
from pipeline.synth.generate.backend import NextRequest, Reply
from pipeline.target.arithmetic import decoder_arithmetic
from pipeline.target.open import Target
from pipeline.target.parallel import Group, require_several


class LocalBackend:
    """Requests over the engine's slots; over half of them once memory has run out."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._slots = engine, engine.slots

    @property
    def batch_invariant(self) -> bool:
        """True with our own CPU kernels, which add in a fixed order."""
        return isinstance(self._engine.model.ops, CpuOps)

    @property
    def arithmetic(self) -> Arithmetic:
        """Of the engine's backend."""
        model = self._engine.model
        return decoder_arithmetic(model.ops, model.dtype, model.device)

    def close(self) -> None:
        """Let the other processes of the engine go."""
        if isinstance(self._engine, LeadingEngine):
            self._engine.close()

    def generate(self, next_request: NextRequest) -> Iterator[Reply]:
        """Replies as they are finished. With no request left, those in flight end first.

        Raises OutOfMemory when half the slots are too many as well.
        """
        unanswered: dict[str, Request] = {}  # by request id
        again: deque[Request] = deque()

        def take() -> Request | None:
            request = again.popleft() if again else next_request()
            if request is not None:
                unanswered[request.request_id] = request
            return request

        while True:
            try:
                for reply in self._replies(take):
                    del unanswered[reply.request_id]
                    yield reply
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._say_out_of_memory(error)
            # Now that the error, and with it what the engine held, is gone.
            self._halve_slots()
            again.extend(unanswered.values())
            unanswered.clear()

    def _replies(self, next_request: NextRequest) -> Iterator[Reply]:
        while (first := next_request()) is not None:
            for completion in self._engine.generate(chain((first,), iter(next_request, None))):
                yield _reply(completion)

    def _say_out_of_memory(self, error: Exception) -> None:
        slots, alone = self._engine.slots, self._engine.model.group is None
        if slots < self._slots or slots == 1 or not alone:
            problem = f"out of memory with {slots} of {self._slots} slots: {brief(error)}"
            fix = "lower it, free memory, or ask servers of the target; finished shards are kept"
            raise OutOfMemory(problem, where="synth.batch_size", fix=fix) from error
        text = f"out of memory with synth.batch_size={slots}: goes on with {slots // 2}"
        notice("synth", text, batch_size=slots // 2)

    def _halve_slots(self) -> None:
        engine = self._engine
        model, drafter, slots = engine.model, engine.drafter, engine.slots // 2
        budget = engine.prefill_tokens
        del self._engine, engine
        gc.collect()
        torch.cuda.empty_cache()
        self._engine = Engine(model, drafter=drafter, slots=slots, prefill_tokens=budget)


def open_local(section: SynthSection, target: Target, processes: Group) -> Engine:
    """This process's engine over the section's slots, drafting as `synth.drafter` and `synth.head`
    say. Raises ConfigError where the target is to be split and this process is alone."""
    require_several(processes, section.parallel, stage="synth")
    with processes.all_or_raise():
        model = DecoderModel.load(
            target.directory,
            target.contract.capture_layers,
            device=target.device,
            dtype=target.dtype,
            max_length=section.max_prompt_tokens + section.max_new_tokens,
            group=TensorGroup.of(processes),
        )
        drafter = _drafter(section, model, target)
    slots, budget = section.slots(target.device.type), OFFLINE_PREFILL_TOKENS
    return engine_among(processes, model, drafter=drafter, slots=slots, prefill_tokens=budget)


def _drafter(section: SynthSection, model: DecoderModel, target: Target) -> Drafter | None:
    head = None
    if section.head is not None:
        head, _ = open_head(section.head, expected=target.contract)
    named = section.drafter or DrafterSection(name=drafter_name(head))
    factory = load_drafter(named, model, target, head)
    return factory(section.tree) if factory else None


def _reply(completion: Completion) -> Reply:
    assert completion.finish_reason != "abort", "nobody aborts these"
    if completion.finish_reason == "error":
        assert completion.error is not None
        return Reply(completion.request_id, error=(completion.error.what, completion.error.fix))
    return Reply(completion.request_id, completion.token_ids, completion.finish_reason)
