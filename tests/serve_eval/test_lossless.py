"""Every question's verdict counts, whatever the questions are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pipeline.config import TargetSection, parse
from pipeline.decoder.engine import Engine
from pipeline.decoder.request import Completion, Request
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.records import Prompt
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.questions import first_question
from pipeline.target.open import open_target
from tests.heads.conftest import head, shape

__all__ = ["head", "shape"]


class FirstIsWrong(Comparison):
    """A decoder that changes one reply when it drafts: that of the first question."""

    def engine(self, *, speculative: bool, slots: int = 1, **settings: Any) -> Engine:
        engine = super().engine(speculative=speculative, slots=slots, **settings)

        class Wrong:
            def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
                asked = list(requests)
                for done in engine.generate(asked):
                    is_first = speculative and done.request_id == asked[0].request_id
                    yield replace(done, token_ids=(0, *done.token_ids)) if is_first else done

        return cast(Engine, Wrong())


def test_questions_of_one_name_hide_no_difference(tiny_target: Path, head: Eagle3Head) -> None:
    """Sources and ids may hold slashes."""
    config = parse({"target": {"source": str(tiny_target), "dtype": "float32", "device": "cpu"}})
    target = open_target(TargetSection(source=str(tiny_target)))
    template = target.template()
    questions = [
        first_question(
            Prompt(sample_id=name, source=source, license="MIT", category="c", turns=(turn,)),
            template,
        )
        for source, name, turn in [
            ("c/a", "b", "What is 1?"),
            ("c", "a/b", "Say more."),
            *[("c", str(at), f"What is {at} plus 2?") for at in range(2)],
        ]
    ]
    assert questions[0].request_id == questions[1].request_id
    settings: dict[str, Any] = {"dtype": torch.float32, "max_length": 128}
    right = Comparison(config, target, head, template, **settings)
    assert right.check_lossless(questions) == [True] * 4
    wrong = FirstIsWrong(config, target, head, template, **settings)
    assert wrong.check_lossless(questions) == [False, True, True, True]


def test_draws_are_checked_at_the_temperature_that_was_asked(
    tiny_target: Path, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by a seed of its own; greedy replies would be lossless where draws are not."""
    config = parse({"target": {"source": str(tiny_target), "dtype": "float32", "device": "cpu"}})
    target = open_target(TargetSection(source=str(tiny_target)))
    template, asked = target.template(), list[Request]()
    generate = Engine.generate

    def recorded(engine: Engine, requests: Iterable[Request]) -> Iterator[Completion]:
        asked.extend(each := list(requests))
        return generate(engine, each)

    monkeypatch.setattr(Engine, "generate", recorded)
    own = Comparison(config, target, head, template, dtype=torch.float32, max_length=128)
    prompt = Prompt(sample_id="0", source="s", license="MIT", category="c", turns=("What is 1?",))
    questions = [first_question(prompt, template)] * 3
    assert own.check_lossless(questions, 0.8) == [True] * 3
    assert [(each.temperature, each.seed) for each in asked] == [(0.8, at) for at in range(3)] * 2
