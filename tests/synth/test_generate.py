"""Conversations: exact ids, spans and context, with the tiny target's real template and scripted replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from pipeline.config import SourceSpec, SynthSection
from pipeline.decoder.request import Completion, Request, Statistics
from pipeline.errors import DataError
from pipeline.records import Prompt, Sample
from pipeline.synth.audit import audit_mask, count_tokens, show_sample
from pipeline.synth.generate import Generator
from pipeline.target.template import ChatTemplate, load_template


@pytest.fixture(scope="module")
def template(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, source="tiny", system_prompt=None)


class Script:
    """Answers each request with the next reply, last request first, and remembers what was asked."""

    def __init__(self, template: ChatTemplate, replies: Sequence[tuple[str, Literal["stop", "length"]]]) -> None:
        self._template, self._replies = template, list(replies)
        self.asked: list[Request] = []

    def __call__(self, requests: Sequence[Request]) -> Iterator[Completion]:
        self.asked += requests
        given = [(request, self._replies.pop(0)) for request in requests]
        for request, (text, reason) in reversed(given):
            end = self._template.stop_ids if reason == "stop" else ()
            ids = (*self._template._encode(text), *end)
            yield Completion(request.id, ids, reason, Statistics())


def section(**options: int) -> SynthSection:
    return SynthSection(sources=(SourceSpec(source="unused"),), max_new_tokens=16, **{"max_prompt_tokens": 200, **options})


def prompts(*conversations: tuple[str, ...]) -> list[Prompt]:
    return [Prompt(id=str(index), source="s", license="MIT", category="c", turns=turns) for index, turns in enumerate(conversations)]


def supervised_texts(sample: Sample, template: ChatTemplate) -> list[str]:
    return [template.text(sample.token_ids[span.start : span.end], special=True) for span in sample.supervised]


def test_two_turns_are_answered_in_their_own_context(template: ChatTemplate) -> None:
    script = Script(template, [("4", "stop"), ("6", "stop"), ("because", "stop"), ("so it is", "stop")])
    samples, rejected = Generator(section(), template, script, seed=0, name="g").converse(prompts(("2+2?", "why?"), ("3+3?", "really?", "third")))
    assert not rejected
    whole = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nbecause<|im_end|>"
    assert template.text(samples[0].token_ids, special=True) == whole
    assert supervised_texts(samples[0], template) == ["4<|im_end|>", "because<|im_end|>"]
    assert supervised_texts(samples[1], template) == ["6<|im_end|>", "so it is<|im_end|>"], "max_turns is 2"
    assert [message.content for message in samples[1].messages] == ["3+3?", "6", "really?", "so it is"]
    assert script.asked[2].prompt_ids == samples[0].token_ids[: samples[0].supervised[1].start], "turn 2 reads exactly what was generated in turn 1"
    assert samples[0].finish_reason == "stop" and len({request.seed for request in script.asked}) == 4


def test_a_cut_off_reply_is_kept_and_gets_no_further_turn(template: ChatTemplate) -> None:
    script = Script(template, [("and so on and", "length")])
    [sample], _ = Generator(section(), template, script, seed=0, name="g").converse(prompts(("tell me", "more")))
    assert supervised_texts(sample, template) == ["and so on and"] and sample.finish_reason == "length"
    assert len(sample.messages) == 2 and sample.supervised[0].end == len(sample.token_ids)


def test_long_prompts_are_counted_and_long_conversations_end_early(template: ChatTemplate) -> None:
    first = len(template.start("2+2?"))
    script = Script(template, [("4", "stop")])
    generator = Generator(section(max_prompt_tokens=first + 4), template, script, seed=0, name="g")
    samples, rejected = generator.converse(prompts(("2+2?", "why?"), ("a question that is far too long to be read by anyone",)))
    assert rejected == {"prompt_too_long": 1} and len(samples) == 1
    assert len(samples[0].supervised) == 1 and samples[0].finish_reason == "stop"


def test_short_replies_are_counted(template: ChatTemplate) -> None:
    script = Script(template, [("", "stop"), ("a longer reply", "stop")])
    samples, rejected = Generator(section(min_new_tokens=2), template, script, seed=0, name="g").converse(prompts(("a",), ("b",)))
    assert [sample.prompt_id for sample in samples] == ["1"] and rejected == {"too_short": 1}


def test_the_system_prompt_is_read_and_recorded(tiny_target: Path) -> None:
    template = load_template(tiny_target, source="tiny", system_prompt="Be kind.")
    settings = section().model_copy(update={"system_prompt": "Be kind."})
    [sample], _ = Generator(settings, template, Script(template, [("ok", "stop")]), seed=0, name="g").converse(prompts(("hi",)))
    assert sample.messages[0].role == "system" and template.text(sample.token_ids, special=True).startswith("<|im_start|>system\nBe kind.")


def test_the_audit_refuses_samples_without_or_with_only_supervised_tokens(template: ChatTemplate) -> None:
    [sample], _ = Generator(section(), template, Script(template, [("ok", "stop")]), seed=0, name="g").converse(prompts(("hi",)))
    audit_mask([sample], where="shard")
    audit_mask([], where="shard")
    with pytest.raises(DataError, match="shard: none of the"):
        audit_mask([sample.model_copy(update={"supervised": ()})], where="shard")
    everything = sample.supervised[0].model_copy(update={"start": 0})
    with pytest.raises(DataError, match="shard: all of the"):
        audit_mask([sample.model_copy(update={"supervised": (everything,)})], where="shard")


def test_the_shown_sample_marks_what_is_supervised(template: ChatTemplate, capsys: pytest.CaptureFixture[str]) -> None:
    [sample], _ = Generator(section(), template, Script(template, [("[red]ok", "stop")]), seed=0, name="g").converse(prompts(("hi",)))
    show_sample(sample, lambda ids: template.text(tuple(ids), special=True))
    shown = capsys.readouterr().out
    supervised, total = count_tokens([sample])
    assert f"{supervised} of {total} tokens" in shown and "[red]ok<|im_end|>" in shown, "replies are no markup"
