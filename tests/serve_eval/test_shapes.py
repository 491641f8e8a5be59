"""Shapes of servers, replayed: what the engine itself counts with each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig, TargetSection, TreeSection, parse
from pipeline.decoder.engine import Engine
from pipeline.decoder.request import Request
from pipeline.errors import ConfigError
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.records import Prompt
from pipeline.reports import RoundCounters
from pipeline.serve_eval import shapes
from pipeline.serve_eval.intervals import acceptance_figures
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.questions import Question, first_question
from pipeline.serve_eval.shapes import ReplayedShapes, replay_shapes, slots_for
from pipeline.target.open import open_target
from pipeline.tuning.trace import trace
from tests.heads.conftest import head, shape

__all__ = ["head", "shape"]

NEW_TOKENS = 24
NAMES = ["3/1/4", "5/1/6", "7/1/8", "5/4/8", "7/4/8", "8/8/64"]


def _config(tiny_target: Path, **section: Any) -> RunConfig:
    target = {"source": str(tiny_target), "dtype": "float32", "device": "cpu"}
    return parse({"target": target, "eval": {"max_new_tokens": NEW_TOKENS, **section}})


def _open(
    tiny_target: Path, config: RunConfig, head: Eagle3Head | None, prompts: int = 5
) -> tuple[Comparison, list[Question], tuple[int, ...]]:
    target = open_target(TargetSection(source=str(tiny_target)))
    template = target.template()
    texts = [f"What is {at} plus {at * at}? " * (1 + at) for at in range(prompts)]
    questions = [
        first_question(
            Prompt(sample_id=str(at), source="s", license="MIT", category="c", turns=(text,)),
            template,
        )
        for at, text in enumerate(texts)
    ]
    longest = NEW_TOKENS + max(len(question.context) for question in questions)
    own = Comparison(config, target, head, template, dtype=torch.float32, max_length=longest)
    return own, questions, template.stop_ids


def _counted(
    own: Comparison, questions: list[Question], stop_ids: tuple[int, ...], shape: TreeSection
) -> list[RoundCounters]:
    """What the engine counts for each question."""
    engine = Engine(own.model, drafter=own.factory(shape), slots=2)
    requests = [
        Request(question.request_id, question.context, NEW_TOKENS, stop_ids)
        for question in questions
    ]
    done = {each.request_id: each.statistics.counters() for each in engine.generate(requests)}
    return [done[request.request_id] for request in requests]


@pytest.mark.parametrize("name", ["eagle3", "ngram"])
def test_replayed_figures_are_the_engines(tiny_target: Path, head: Eagle3Head, name: str) -> None:
    tree = {"top_k": 10, "steps": 6, "nodes": 12}  # too wide for the draft of 8 steps
    config = _config(tiny_target, drafter={"name": name}, tree=tree)
    own, questions, stop_ids = _open(tiny_target, config, head if name == "eagle3" else None)
    replayed = replay_shapes(own, questions, stop_ids, config.eval)
    assert [each.name for each in replayed.shapes] == [*NAMES, "6/10/12"]
    assert [each.own for each in replayed.shapes] == [False] * 6 + [True]
    assert replayed.left_out == {}
    prompts = [question.request_id for question in questions]
    for each in replayed.shapes:
        shape = TreeSection(steps=each.steps, top_k=each.top_k, nodes=each.nodes)
        counted = _counted(own, questions, stop_ids, shape)
        assert each.acceptance == acceptance_figures(counted, prompts)
    rates = {each.acceptance.accept_rate for each in replayed.shapes}
    assert len(rates) > 3, "else any shape's figures would do"


def test_servers_shapes_are_without_a_lookup(
    tiny_target: Path, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server looks up beside a head. With the lookup, which `tree: auto` traces, figures are
    other ones, and the engine's too."""
    config = _config(tiny_target, drafter={"lookup": {}}, shapes=[{"steps": 3, "top_k": 4}])
    own, questions, stop_ids = _open(tiny_target, config, head)
    prompts = [question.request_id for question in questions]
    of_the_head = replay_shapes(own, questions, stop_ids, config.eval)
    assert [each.own for each in of_the_head.shapes] == [False, True]
    without = _config(tiny_target)
    alone, *_ = _open(tiny_target, without, head)
    monkeypatch.setattr(Comparison, "alone", property(lambda self: self.factory))
    of_both = replay_shapes(own, questions, stop_ids, config.eval)
    for each, other in zip(of_the_head.shapes, of_both.shapes, strict=True):
        shape = TreeSection(steps=each.steps, top_k=each.top_k, nodes=each.nodes)
        for replayed, comparison in ((each, alone), (other, own)):
            counted = _counted(comparison, questions, stop_ids, shape)
            assert replayed.acceptance == acceptance_figures(counted, prompts)
        assert each.acceptance.accept_rate != other.acceptance.accept_rate


def test_a_share_of_the_prompts_is_tried_and_later_turns_are_not(
    tiny_target: Path, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tiny_target, shape_prompts=2, shapes=[{"steps": 2, "top_k": 2, "nodes": 4}])
    own, questions, stop_ids = _open(tiny_target, config, head)
    later = Question("s/0#2", "c", questions[0].context, "s", 2)
    traced: list[Any] = []

    def recording(*arguments: Any, **named: Any) -> Any:
        traced.append(arguments[2])
        return trace(*arguments, **named)

    monkeypatch.setattr(shapes, "trace", recording)
    replayed = replay_shapes(own, [questions[0], later, *questions[1:]], stop_ids, config.eval)
    (first, second) = replayed.shapes
    assert (first.name, second.name, second.own) == ("2/2/4", "5/4/16", True)
    shape = TreeSection(steps=2, top_k=2, nodes=4)
    chosen = [questions[0], questions[2]]
    assert traced == [[question.context for question in chosen]], "once, for both shapes"
    counted = _counted(own, chosen, stop_ids, shape)
    assert first.acceptance == acceptance_figures(counted, ["s/0", "s/2"])
    none = config.eval.model_copy(update={"shapes": ()})
    assert replay_shapes(own, questions, stop_ids, none) == ReplayedShapes((), {}, {})


def test_shapes_that_a_drafter_cannot_draft_are_named(
    tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = {"name": "self_spec", "budget": 128, "kv": "streaming"}
    tree = {"top_k": 1, "steps": 2, "nodes": 3}
    config = _config(tiny_target, drafter=drafter, tree=tree)
    own, questions, stop_ids = _open(tiny_target, config, None, prompts=2)
    replayed = replay_shapes(own, questions, stop_ids, config.eval)
    assert [each.name for each in replayed.shapes] == ["3/1/4", "2/1/3"]
    assert list(replayed.left_out) == NAMES[1:]
    assert "forward of a whole model; at most 4" in replayed.left_out["5/1/6"]
    printed = capsys.readouterr()
    assert "shape 8/8/64 is left out" in printed.err + printed.out


def test_long_contexts_are_traced_a_few_at_a_time() -> None:
    short, long = (Question(str(tokens), "c", (1,) * tokens) for tokens in (100, 16_000))
    assert slots_for([short, short], 64) == 8
    assert slots_for([short, long], 64) == 2 and slots_for([long], 17_000) == 1


def test_shapes_have_numbers() -> None:
    with pytest.raises(ConfigError, match="auto is only supported"):
        parse({"target": {"source": "x"}, "eval": {"shapes": ["auto"]}})
