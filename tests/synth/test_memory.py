"""The bundled decoder when memory runs out: half the slots, and then an error to try again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import SourceSpec, SynthSection, TargetSection
from pipeline.decoder.engine import OFFLINE_PREFILL_TOKENS, Engine
from pipeline.decoder.graphs import RoundLauncher
from pipeline.errors import OutOfMemory
from pipeline.records import Prompt, Sample
from pipeline.synth.generate.conversations import ConversationRunner, ConversationScheduler
from pipeline.synth.generate.local import LocalBackend, open_local
from pipeline.target.open import open_target
from pipeline.target.parallel import Group
from tests.conftest import QUESTIONS
from tests.synth.server import ServedTarget

SECTION = SynthSection(
    sources=(SourceSpec(source="unused"),), max_new_tokens=24, max_prompt_tokens=400
)


@pytest.fixture(scope="module")
def served(tiny_target: Path) -> ServedTarget:
    return ServedTarget(tiny_target)


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Rounds of more rows than that fail, as on a device that holds no more."""
    rounds: list[int] = []

    def limit(most: int) -> list[int]:
        launcher = RoundLauncher.launcher

        def limited(self: RoundLauncher, rows: int, **options: Any) -> Any:
            rounds.append(rows)
            if rows > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return launcher(self, rows, **options)

        monkeypatch.setattr(RoundLauncher, "launcher", limited)
        return rounds

    return limit


def converse(served: ServedTarget, slots: int) -> list[Sample]:
    runner = ConversationRunner(SECTION, served.template, seed=4, name="")
    prompts = [
        Prompt(sample_id=str(at), source="ours", license="MIT", category="c", turns=(text, "More."))
        for at, text in enumerate(QUESTIONS[:9])
    ]
    parts = [("a", prompts[:5]), ("b", prompts[5:])]
    batches = ConversationScheduler(runner, parts).run(
        LocalBackend(Engine(served.model, slots=slots))
    )
    return [s for batch in sorted(batches, key=lambda batch: batch.name) for s in batch.samples]


def test_half_the_slots_give_the_same_replies(
    served: ServedTarget,
    room_for: Callable[[int], list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = converse(served, 4)
    rounds = room_for(2)
    assert converse(served, 4) == expected and len(expected) == 9
    assert sum(rows > 2 for rows in rounds) == 1, "it failed once"
    said = capsys.readouterr().out
    assert said.count("out of memory with synth.batch_size=4: goes on with 2") == 1


def test_as_many_prompt_tokens_are_read_at_a_time_as_offline(tiny_target: Path) -> None:
    """With half the slots too."""
    section = TargetSection.model_validate({"source": str(tiny_target), "device": "cpu"})
    backend = LocalBackend(open_local(SECTION, open_target(section), Group()))
    assert backend._engine.prefill_tokens == OFFLINE_PREFILL_TOKENS
    slots = backend._engine.slots
    backend._halve_slots()
    halved = backend._engine
    assert (halved.slots, halved.prefill_tokens) == (slots // 2, OFFLINE_PREFILL_TOKENS)


@pytest.mark.parametrize("slots", [4, 1])
def test_half_the_slots_that_are_too_many_end_the_stage(
    slots: int, served: ServedTarget, room_for: Callable[[int], list[int]]
) -> None:
    room_for(min(slots - 1, 1))
    with pytest.raises(OutOfMemory, match=r"synth\.batch_size: out of memory with") as ended:
        converse(served, slots)
    assert ended.value.exit_code == 75
