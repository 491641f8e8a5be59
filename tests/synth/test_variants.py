"""Several ways to ask in one run, and conversations with tools: who is asked how, exact ids, masks.

Replies come from a script, so that the target calls a tool where a test wants it to.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import SynthSection
from pipeline.errors import TemplateError
from pipeline.prompts.records import to_prompt
from pipeline.records import Message, Prompt, Sample, SamplingOverride
from pipeline.synth.filters import apply_steps, first_of_its_kind
from pipeline.synth.generate.conversations import (
    ConversationRunner,
    ConversationScheduler,
    PromptBatch,
)
from pipeline.target.template import ChatTemplate, load_template
from tests.conftest import CHATML
from tests.synth.test_generate import Script, supervised_texts

THINKING = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
WITH_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + CHATML
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture
def plain(tiny_target: Path) -> ChatTemplate:
    return load_template(tiny_target, source="tiny", system_prompt=None)


def with_template(template: ChatTemplate, text: str) -> ChatTemplate:
    template._tokenizer.chat_template = text
    return template


def section(**options: Any) -> SynthSection:
    return SynthSection.model_validate(
        {"sources": [{"source": "x"}], "max_new_tokens": 80, "max_prompt_tokens": 900, **options}
    )


def runner(settings: SynthSection, template: ChatTemplate) -> ConversationRunner:
    return ConversationRunner(settings, template, seed=3, name="g")


def converse(
    settings: SynthSection, template: ChatTemplate, prompts: list[Prompt], *replies: str
) -> PromptBatch:
    script = Script(template, [(reply, "stop") for reply in replies])
    [batch] = ConversationScheduler(runner(settings, template), [("batch", prompts)]).run(script)
    return batch


def asked(number: int, **fields: Any) -> Prompt:
    shared = {"source": "s", "license": "MIT", "category": "c", "turns": ("Why?",)}
    return Prompt.model_validate({"sample_id": str(number), **shared, **fields})


def with_tools(*messages: tuple[str, str], tools: Any = (WEATHER,)) -> Prompt:
    record = {
        "messages": [{"role": role, "content": content} for role, content in messages],
        "tools": list(tools) if isinstance(tools, tuple) else tools,
        "license": "MIT",
    }
    return to_prompt(record, where="here", sample_id="0", source="s")


MIX = [
    {"name": "plain", "share": 3},
    {"name": "thinking", "chat_template_kwargs": {"enable_thinking": True}},
    {"name": "terse", "share": 2, "system_prompt": "Be brief.", "sampling": {"temperature": 0.9}},
]


def test_a_mix_asks_each_part_of_the_prompts_in_its_own_way(plain: ChatTemplate) -> None:
    template, prompts = with_template(plain, THINKING), [asked(number) for number in range(600)]
    settings = section(mix=MIX, temperature=0.2)
    samples = converse(settings, template, prompts, *["so"] * 600).samples
    counts = Counter(sample.variant for sample in samples)
    for name, share in (("plain", 300), ("thinking", 100), ("terse", 200)):
        assert abs(counts[name] - share) < 50
    of = {sample.variant: sample for sample in samples}
    texts = {name: template.text(sample.token_ids, special=True) for name, sample in of.items()}
    assert "<think>so" in texts["thinking"] and "<think>" not in texts["plain"] + texts["terse"]
    assert texts["terse"].startswith("<|im_start|>system\nBe brief.")
    assert of["terse"].messages[0] == Message(role="system", content="Be brief.")
    assert of["plain"].messages[0].role == "user"
    temperatures = {name: sample.sampling.temperature for name, sample in of.items()}
    assert temperatures == {"plain": 0.2, "thinking": 0.2, "terse": 0.9}
    assert all(text.startswith("so") for s in samples for text in supervised_texts(s, template))


def test_who_is_asked_how_depends_on_nothing_but_the_prompt(plain: ChatTemplate) -> None:
    template, settings = with_template(plain, THINKING), section(mix=MIX)
    prompts = [asked(number) for number in range(40)]

    def variants(given: list[Prompt]) -> dict[str, str | None]:
        samples: list[Sample] = converse(settings, template, given, *["so"] * len(given)).samples
        return {sample.sample_id: sample.variant for sample in samples}

    assert variants(prompts) == variants(prompts[::-1])
    assert variants(prompts[30:]).items() <= variants(prompts).items()


def test_a_source_and_a_record_have_the_last_word(plain: ChatTemplate) -> None:
    mix = [{"name": "warm", "system_prompt": "Be kind.", "sampling": {"temperature": 0.9}}]
    own = asked(1, system="Be exact.", sampling=SamplingOverride(temperature=0.1))
    [sample] = converse(section(mix=mix), plain, [own], "so").samples
    assert sample.messages[0].content == "Be exact." and sample.sampling.temperature == 0.1


def test_unknown_variables_and_names_that_come_twice_are_refused(plain: ChatTemplate) -> None:
    odd = section(mix=[{"name": "a", "chat_template_kwargs": {"reasoning": True}}])
    with pytest.raises(TemplateError, match=r"synth\.mix\.a\.chat_template_kwargs\.reasoning"):
        runner(odd, plain)
    with pytest.raises(ValueError, match="two variants of one name"):
        section(mix=[{"name": "a"}, {"name": "a"}])


def test_a_tools_answer_is_read_and_not_supervised(plain: ChatTemplate) -> None:
    template = with_template(plain, WITH_TOOLS)
    prompt = with_tools(
        ("system", "Help."),
        ("user", "Weather in Oslo?"),
        ("assistant", "of another model"),
        ("tool", '{"celsius": 4}'),
        ("tool", '{"wind": 2}'),
        ("assistant", "of another model"),
        ("user", "Thanks!"),
    )
    assert prompt.turns == ("Weather in Oslo?", '{"celsius": 4}\n{"wind": 2}', "Thanks!")
    assert prompt.tool_turns == (1,) and json.loads(prompt.tools or "") == [WEATHER]
    batch = converse(section(max_turns=3), template, [prompt], CALL, "4 °C.", "Any time.")
    [sample] = batch.samples
    text = template.text(sample.token_ids, special=True)
    assert text.startswith('tools: [{"type"') and "of another model" not in text
    assert '<|im_start|>tool\n{"celsius": 4}\n{"wind": 2}<|im_end|>' in text
    assert supervised_texts(sample, template) == [
        f"{reply}<|im_end|>" for reply in (CALL, "4 °C.", "Any time.")
    ]
    roles = [message.role for message in sample.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert sample.tools == prompt.tools and batch.ended == {"complete": 1}


def test_tools_have_transformers_ids_whatever_the_order_of_their_keys(plain: ChatTemplate) -> None:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}, "hour": {}}}
    function = {"name": "wetter", "description": "Wie heiß?", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    template, messages = with_template(plain, WITH_TOOLS), [("user", "Heiß?")]
    expected = template._tokenizer.apply_chat_template(
        [{"role": "user", "content": "Heiß?"}], tools=tools, add_generation_prompt=True
    )["input_ids"]
    for written in (tools, json.dumps(tools), list(map(json.dumps, tools))):
        [sample] = converse(
            section(), template, [with_tools(*messages, tools=written)], "Ja."
        ).samples
        assert list(sample.token_ids[: len(expected)]) == expected
    backwards = [dict(reversed(tools[0].items()))]
    same = [with_tools(*messages, tools=each) for each in (tools, backwards)]
    assert same[0].tools != same[1].tools
    assert apply_steps(same, [first_of_its_kind()]) == (same[:1], {"duplicate": 1})


def test_a_target_that_calls_no_tool_gets_no_answer_of_one(plain: ChatTemplate) -> None:
    template = with_template(plain, WITH_TOOLS)
    prompt = with_tools(("user", "Weather in Oslo?"), ("tool", "4"))
    batch = converse(section(), template, [prompt], "I cannot know.")
    assert len(batch.samples[0].supervised) == 1 and batch.ended == {"no_tool_call": 1}


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather", True),  # noqa: RUF001
        ('<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"a":1}', True),
        ('<|tool_call|>[{"name": "weather"}]', True),
        ('<|START_ACTION|>[{"tool_name": "weather", "parameters": {}}]<|END_ACTION|>', True),
        ('[weather(city="Oslo"), weather(city="Rome")]', True),
        ("[See here](https://x.org) (a list)", False),
        ("Call weather(city) [or not].", False),
    ],
)
def test_calls_of_todays_formats_are_known(plain: ChatTemplate, reply: str, calls: bool) -> None:
    template = with_template(plain, WITH_TOOLS)
    prompt = with_tools(("user", "Weather?"), ("tool", "4"))
    batch = converse(section(), template, [prompt], reply, "4.")
    assert batch.ended == {"complete" if calls else "no_tool_call": 1}


@pytest.mark.parametrize(
    "answer",
    ['[{"type": "file", "name": "a.txt"}]', '{"type": "text", "text": "4 C", "isError": true}'],
)
def test_a_tools_answer_may_be_any_json(answer: str) -> None:
    assert with_tools(("user", "Why?"), ("tool", answer)).turns == ("Why?", answer)


def test_tools_that_a_template_does_not_show_are_counted(plain: ChatTemplate) -> None:
    prompts = [with_tools(("user", "Weather?")), asked(1)]
    batch = converse(section(), plain, prompts, "so")
    assert batch.rejected == {"tools_not_in_template": 1} and len(batch.samples) == 1


def test_tools_as_text_and_messages_of_tools_without_any() -> None:
    messages = (("user", "Weather?"), ("tool", "4"), ("user", "Thanks"))
    assert with_tools(*messages, tools=json.dumps([WEATHER])).tools == with_tools(*messages).tools
    bare = with_tools(*messages, tools=None)
    assert bare.turns == ("Weather?", "Thanks") and bare.tools is None and not bare.tool_turns


@pytest.mark.parametrize("tools", ["[{'name': {1, 2}}]", [{"name": "\ud800"}]])
def test_tools_that_no_file_can_hold_are_refused(tools: Any) -> None:
    with pytest.raises(Exception, match="here: tools: cannot be written as JSON"):
        with_tools(("user", "Weather?"), tools=tools)


@pytest.mark.parametrize("tools", ["weather", [1], {"name": "weather"}])
def test_what_is_no_list_of_tools_is_refused(tools: Any) -> None:
    with pytest.raises(Exception, match="here: tools: is not a list of tools"):
        with_tools(("user", "Weather?"), tools=tools)
