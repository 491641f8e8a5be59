"""A server's text is encoded after its prompt, as it was generated."""

from __future__ import annotations

import pytest

from pipeline.decoder.request import Request
from pipeline.synth.generate.servers import ServerReply, TokenIdReader
from pipeline.target.template import ChatTemplate
from tests.target.tokenizers import KINDS

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|user|>\n' + m.content + eos_token + '\n' }}"
    "{% endfor %}{{ '<|im_start|>\n' }}"
)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_read_in_the_context_of_its_prompt(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = TEMPLATE
    template = ChatTemplate(tokenizer, source=kind)
    prompt, end = template.start("What is 1 plus 4?"), tokenizer.eos_token_id
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1 plus 4?"}], tokenize=False
    )
    whole = tokenizer(rendered + "It is 4.", add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt)] == prompt, "as the model that continues the prompt would say it"
    said = tokenizer.decode(whole)[len(tokenizer.decode(prompt)) :]  # as servers write it
    reader = TokenIdReader(template, vocabulary=len(tokenizer))
    request = Request("a", tuple(prompt), 20, template.stop_ids)
    reply = reader.reply(request, ServerReply(said, "stop"))
    assert reply.rejected is None and reply.token_ids == (*whole[len(prompt) :], end)


def test_text_that_melts_into_its_prompt_is_rejected() -> None:
    tokenizer = KINDS["byte-level"]()
    tokenizer.chat_template = TEMPLATE
    template = ChatTemplate(tokenizer, source="melts")
    prompt = template.encode("Wha")
    assert template.encode("What")[: len(prompt)] != prompt
    reader = TokenIdReader(template, vocabulary=len(tokenizer))
    request = Request("a", tuple(prompt), 20, template.stop_ids)
    assert reader.reply(request, ServerReply("t", "stop")).rejected == "remote:not_aligned"
