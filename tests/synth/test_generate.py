"""Conversations: exact ids, spans and context, with a real template and scripted replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from pipeline.config import SourceSpec, SynthSection
from pipeline.decoder.request import Request
from pipeline.errors import DataError, TargetError
from pipeline.records import Prompt, Sample, SamplingOverride
from pipeline.synth.audit import audit_mask, count_tokens, show_sample
from pipeline.synth.generate.backend import GeneratorBackend, NextRequest, Reply
from pipeline.synth.generate.conversations import (
    ConversationRunner,
    ConversationScheduler,
    PromptBatch,
)
from pipeline.target.template import ChatTemplate, load_template
from tests.conftest import CHATML


@pytest.fixture(scope="module")
def template(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, source="tiny", system_prompt=None)


class Script:
    """Gives each request the next reply, last request first, and remembers what was asked."""

    batch_invariant = True

    def __init__(
        self,
        template: ChatTemplate,
        replies: Sequence[tuple[str, Literal["stop", "length"]] | Reply],
    ) -> None:
        self._template, self._replies = template, list(replies)
        self.asked: list[Request] = []

    def generate(self, next_request: NextRequest) -> Iterator[Reply]:
        while (first := next_request()) is not None:
            requests = [first, *iter(next_request, None)]
            self.asked += requests
            given = [(request, self._replies.pop(0)) for request in requests]
            for request, reply in reversed(given):
                yield self._reply(request, reply)

    def _reply(
        self, request: Request, reply: tuple[str, Literal["stop", "length"]] | Reply
    ) -> Reply:
        if isinstance(reply, Reply):
            return replace(reply, request_id=request.request_id)
        text, reason = reply
        end = self._template.stop_ids if reason == "stop" else ()
        return Reply(request.request_id, (*self._template.encode(text), *end), reason)


def runner(settings: SynthSection, template: ChatTemplate) -> ConversationRunner:
    return ConversationRunner(settings, template, seed=0, name="g")


def run_batch(
    runner: ConversationRunner, backend: GeneratorBackend, prompts: Sequence[Prompt]
) -> PromptBatch:
    [batch] = ConversationScheduler(runner, [("batch", prompts)]).run(backend)
    return batch


def converse(
    runner: ConversationRunner, backend: GeneratorBackend, prompts: Sequence[Prompt]
) -> tuple[list[Sample], Counter[str]]:
    """One batch: its samples, and the rejected by reason."""
    batch = run_batch(runner, backend, prompts)
    return batch.samples, batch.rejected


def section(**options: Any) -> SynthSection:
    return SynthSection(
        sources=(SourceSpec(source="unused"),),
        max_new_tokens=16,
        **{"max_prompt_tokens": 200, **options},
    )


def prompts(*conversations: tuple[str, ...]) -> list[Prompt]:
    return [
        Prompt(sample_id=str(index), source="s", license="MIT", category="c", turns=turns)
        for index, turns in enumerate(conversations)
    ]


def supervised_texts(sample: Sample, template: ChatTemplate) -> list[str]:
    return [
        template.text(sample.token_ids[span.start : span.end], special=True)
        for span in sample.supervised
    ]


def test_two_turns_get_replies_in_their_own_context(template: ChatTemplate) -> None:
    script = Script(
        template, [("4", "stop"), ("6", "stop"), ("because", "stop"), ("so it is", "stop")]
    )
    samples, rejected = converse(
        runner(section(), template), script, prompts(("2+2?", "why?"), ("3+3?", "really?", "third"))
    )
    assert not rejected
    whole = (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nbecause<|im_end|>"
    )
    assert template.text(samples[0].token_ids, special=True) == whole
    assert supervised_texts(samples[0], template) == ["4<|im_end|>", "because<|im_end|>"]
    assert supervised_texts(samples[1], template) == ["6<|im_end|>", "so it is<|im_end|>"], (
        "max_turns is 2"
    )
    said = [message.content for message in samples[1].messages]
    assert said == ["3+3?", "6", "really?", "so it is"]
    assert script.asked[2].prompt_ids == samples[0].token_ids[: samples[0].supervised[1].start], (
        "turn 2 reads exactly what was generated in turn 1"
    )
    assert (
        samples[0].finish_reason == "stop" and len({request.seed for request in script.asked}) == 4
    )


def test_a_cut_off_reply_is_kept_and_gets_no_further_turn(template: ChatTemplate) -> None:
    script = Script(template, [("and so on and", "length")])
    [sample], _ = converse(runner(section(), template), script, prompts(("tell me", "more")))
    assert (
        supervised_texts(sample, template) == ["and so on and"] and sample.finish_reason == "length"
    )
    assert len(sample.messages) == 2 and sample.supervised[0].end == len(sample.token_ids)


def test_long_prompts_are_counted_and_long_conversations_end_early(template: ChatTemplate) -> None:
    first = len(template.start("2+2?"))
    script = Script(template, [("4", "stop")])
    asked = prompts(("2+2?", "why?"), ("a question that is far too long to be read by anyone",))
    samples, rejected = converse(
        runner(section(max_prompt_tokens=first + 4), template), script, asked
    )
    assert rejected == {"prompt_too_long": 1} and len(samples) == 1
    assert len(samples[0].supervised) == 1 and samples[0].finish_reason == "stop"


def test_short_replies_are_counted(template: ChatTemplate) -> None:
    script = Script(template, [("", "stop"), ("a longer reply", "stop")])
    samples, rejected = converse(
        runner(section(min_new_tokens=2), template), script, prompts(("a",), ("b",))
    )
    assert [sample.sample_id for sample in samples] == ["1"] and rejected == {"too_short": 1}


def test_the_system_prompt_is_read_and_recorded(tiny_target: Path) -> None:
    template = load_template(tiny_target, source="tiny", system_prompt="Be kind.")
    settings = section().model_copy(update={"system_prompt": "Be kind."})
    [sample], _ = converse(
        runner(settings, template), Script(template, [("ok", "stop")]), prompts(("hi",))
    )
    assert sample.messages[0].role == "system" and template.text(
        sample.token_ids, special=True
    ).startswith("<|im_start|>system\nBe kind.")


def test_the_audit_refuses_samples_without_or_with_only_supervised_tokens(
    template: ChatTemplate,
) -> None:
    [sample], _ = converse(
        runner(section(), template), Script(template, [("ok", "stop")]), prompts(("hi",))
    )
    audit_mask([sample], where="shard")
    audit_mask([], where="shard")
    with pytest.raises(DataError, match="shard: none of the"):
        audit_mask([sample.model_copy(update={"supervised": ()})], where="shard")
    everything = sample.supervised[0].model_copy(update={"start": 0})
    with pytest.raises(DataError, match="shard: all of the"):
        audit_mask([sample.model_copy(update={"supervised": (everything,)})], where="shard")


def test_the_shown_sample_marks_what_is_supervised(
    template: ChatTemplate, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.console.on_terminal", lambda: True)
    [sample], _ = converse(
        runner(section(), template), Script(template, [("[red]ok", "stop")]), prompts(("hi",))
    )
    show_sample(sample, lambda ids: template.text(tuple(ids), special=True))
    shown = capsys.readouterr().out
    supervised, total = count_tokens([sample])
    assert f"{supervised} of {total} tokens" in shown and "[red]ok<|im_end|>" in shown, (
        "replies are no markup"
    )


def test_a_record_s_system_prompt_takes_the_place_of_the_run_s(tiny_target: Path) -> None:
    template = load_template(tiny_target, source="tiny", system_prompt="Be kind.")
    settings = section(system_prompt="Be kind.")
    [prompt] = prompts(("hi", "and?"))
    own = prompt.model_copy(update={"system": "Be brief."})
    script = Script(template, [("ok", "stop"), ("yes", "stop")])
    [sample], _ = converse(runner(settings, template), script, [own])
    text = template.text(sample.token_ids, special=True)
    assert (
        text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
        and "kind" not in text
        and text.count("Be brief.") == 1
    )
    assert sample.messages[0].content == "Be brief." and len(sample.supervised) == 2


def test_a_source_s_sampling_takes_the_place_of_the_run_s(template: ChatTemplate) -> None:
    one, other = prompts(("a",), ("b",))
    greedy = other.model_copy(update={"sampling": SamplingOverride(temperature=0.0)})
    script = Script(template, [("ok", "stop"), ("ok", "stop")])
    samples, _ = converse(
        runner(section(temperature=0.7, top_k=5), template), script, [one, greedy]
    )
    assert [(request.temperature, request.top_k) for request in script.asked] == [
        (0.7, 5),
        (0.0, 5),
    ]
    assert [sample.sampling.temperature for sample in samples] == [0.7, 0.0]


def test_cut_off_replies_can_be_dropped(template: ChatTemplate) -> None:
    script = Script(
        template, [("and so on", "length"), ("4", "stop"), ("because of the", "length")]
    )
    [sample], rejected = converse(
        runner(section(on_length="drop"), template), script, prompts(("tell me",), ("2+2?", "why?"))
    )
    assert rejected == {"length": 1} and supervised_texts(sample, template) == ["4<|im_end|>"]
    assert len(sample.token_ids) == sample.supervised[0].end and sample.finish_reason == "stop", (
        "the question without a reply is gone too"
    )
    assert [message.content for message in sample.messages] == ["2+2?", "4"]


def test_rejected_replies_are_counted_and_earlier_turns_stay(template: ChatTemplate) -> None:
    script = Script(
        template,
        [
            Reply("", rejected="remote:timeout"),
            ("4", "stop"),
            Reply("", rejected="remote:not_text"),
        ],
    )
    batch = run_batch(
        runner(section(), template), script, prompts(("tell me", "more"), ("2+2?", "why?"))
    )
    assert batch.rejected == {"remote:timeout": 1} and batch.ended == {"remote:not_text": 1}
    assert [supervised_texts(sample, template) for sample in batch.samples] == [["4<|im_end|>"]]


def test_re_tokenised_replies_say_so(template: ChatTemplate) -> None:
    stop = template.stop_ids
    script = Script(
        template,
        [
            Reply("", (*template.encode("4"), *stop), exact=False),
            Reply("", (*template.encode("6"), *stop)),
        ],
    )
    samples, _ = converse(runner(section(), template), script, prompts(("2+2?",), ("3+3?",)))
    assert [sample.generator for sample in samples] == ["g, re-tokenised", "g"]


def test_a_target_that_cannot_reply_stops_the_run(template: ChatTemplate) -> None:
    script = Script(template, [Reply("", error=("logits were NaN", "check the weights"))])
    with pytest.raises(TargetError, match="prompt 0 of s: logits were NaN"):
        converse(runner(section(), template), script, prompts(("hi",)))


@pytest.mark.parametrize("across", [True, False])
def test_batches_are_the_same_in_whatever_order_they_finish(
    template: ChatTemplate, across: bool
) -> None:
    class Slots:
        """Three requests at a time; the youngest gets its reply first, which is its seed."""

        batch_invariant = True

        def __init__(self) -> None:
            self.together: set[frozenset[str]] = set()

        def generate(self, next_request: NextRequest) -> Iterator[Reply]:
            in_flight: list[Request] = []
            while True:
                while len(in_flight) < 3 and (request := next_request()) is not None:
                    in_flight.append(request)
                if not in_flight:
                    return
                batches = frozenset(request.request_id.split("/")[0] for request in in_flight)
                self.together.add(batches)
                request = in_flight.pop()
                text = template.encode(str(request.seed))
                yield Reply(request.request_id, (*text, *template.stop_ids))

    conversations = prompts(*((f"{index}?", "why?") for index in range(7)))
    batches = [
        (name, conversations[start : start + 3]) for name, start in (("a", 0), ("b", 3), ("c", 6))
    ]
    slots = Slots()
    given = [*batches, ("none", [])]
    scheduler = ConversationScheduler(runner(section(), template), given, across_shards=across)
    finished = {batch.name: batch for batch in scheduler.run(slots)}
    assert set(finished) == {"a", "b", "c", "none"} and not finished["none"].samples
    samples = [sample for name in "abc" for sample in finished[name].samples]
    assert [sample.sample_id for sample in samples] == [str(index) for index in range(7)]
    assert any(len(names) > 1 for names in slots.together) == across
    alone = [converse(runner(section(), template), Slots(), [one])[0][0] for one in conversations]
    assert alone == samples


def test_a_conversation_ends_where_the_template_would_cut_its_reasoning(
    tiny_target: Path, tmp_path: Path
) -> None:
    """As templates of reasoning models do: what was thought is only shown in the last turn."""
    forgetful = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}",
    )
    template = load_template(
        with_template(tiny_target, tmp_path, forgetful), source="tiny", system_prompt=None
    )
    assert template.stops_after_reply() is None
    script = Script(template, [("<think>hm</think>4", "stop"), ("plain", "stop"), ("so", "stop")])
    batch = run_batch(
        runner(section(), template), script, prompts(("2+2?", "why?"), ("3+3?", "why?"))
    )
    assert [len(sample.supervised) for sample in batch.samples] == [1, 2] and batch.ended == {
        "template_rewrites": 1,
        "complete": 1,
    }


def test_a_conversation_ends_where_another_stop_token_ended_the_reply(
    template: ChatTemplate, tiny_target: Path
) -> None:
    other = template.encode("?")[0]
    twofold = ChatTemplate(template._tokenizer, source="tiny", stop_ids=(other, *template.stop_ids))
    assert twofold.end_of_turn == template.stop_ids[0]
    script = Script(twofold, [Reply("", (*twofold.encode("4"), other))])
    batch = run_batch(runner(section(), twofold), script, prompts(("2+2?", "why?")))
    assert batch.ended == {"other_stop_token": 1} and batch.samples[0].finish_reason == "stop"


def with_template(target: Path, folder: Path, template: str) -> Path:
    """The target's tokenizer with another chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
