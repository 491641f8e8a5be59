"""Chat templates by strangers: bounded time and memory, no way out, errors name the file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import TargetSection
from pipeline.errors import TargetError, TemplateError
from pipeline.target import rendering
from pipeline.target.open import open_template
from tests.conftest import CHATML

#: Template → what is said of it.
COSTLY = {
    "{{ 'a' * 10 ** 10 }}": "takes more than 512 MiB of memory",
    "{% set n = namespace(s='ab') %}{% for _ in range(60) %}{% set n.s = n.s * 2 %}{% endfor %}": (
        "takes more than 512 MiB of memory"
    ),
    "{{ '%10000000000d' % 1 }}": "takes more than 512 MiB of memory",
    "{{ '{:>10000000000}'.format('') }}": "takes more than 512 MiB of memory",
    "{{ 'a' | center(10 ** 10) }}": "takes more than 512 MiB of memory",
    "{{ 'a'.ljust(10 ** 10) }}": "takes more than 512 MiB of memory",
    "{{ ([0] * 10 ** 11) | length }}": "takes more than 512 MiB of memory",
    "{{ 'a' * 10 ** 7 }}": "writes 10,000,000 characters for",
    "{% for m in messages %}{{ m.content * 2000000 }}{% endfor %}": "writes 12,000,000 characters",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": (
        "takes more than 1 seconds"
    ),
    "{{ 9 ** (9 ** 9) }}": "takes more than 1 seconds",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}": (
        "takes more than 1 seconds"
    ),
}
FORBIDDEN = {
    "{{ range(10 ** 9) | list }}": "Range too big",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "access to attribute '__class__'",
    "{{ messages.__init__.__globals__ }}": "unsafe",
    "{{ ''['__cla' ~ 'ss__'] }}{{ (''|attr('__class__')).x }}": "unsafe",
    "{{ cycler.__init__.__globals__.os.system('true') }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ '{0.__class__.__init__}'.format(messages) }}": "renders an empty text",
    "{% include 'secrets' %}": "no loader",
    "{% import '/etc/passwd' as x %}": "no loader",
    "{% extends 'x' %}": "no loader",
    "{{ raise_exception('x' * 10000) }}": "xxx",
    "{{ messages | map('random') | list }}": "No filter named 'random'",
    "{{ [1, 2, 3] | random }}": "No filter named 'random'",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{{ messages | map(attribute='content') }}": "writes an address of memory",
    "{{ '\\ud800' }}": "surrogates not allowed",
    "{" * 10_000: "cannot be rendered",
    "{{ " + "(" * 3_000 + "1" + ")" * 3_000 + " }}": "cannot be rendered",
    "{{ " + "-" * 30_000 + "1 }}": "cannot be rendered",
}


Refusal = Callable[[str], TargetError]


@pytest.fixture
def refusal(target_copy: Path, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    monkeypatch.setattr(rendering, "SECONDS", 1)

    def refusal(template: str) -> TargetError:
        (target_copy / "chat_template.jinja").write_text(template, encoding="utf-8")
        before = time.monotonic()
        with pytest.raises(TargetError) as caught:
            open_template(TargetSection(source=str(target_copy)))
        assert time.monotonic() - before < 30
        assert str(caught.value).startswith(
            f"target.source={target_copy}, chat_template.jinja: the chat template "
        )
        return caught.value

    return refusal


@pytest.mark.parametrize(("template", "problem"), COSTLY.items(), ids=range(len(COSTLY)))
def test_a_costly_template_is_stopped(refusal: Refusal, template: str, problem: str) -> None:
    """Not a TemplateError, which would be one record's: the run stops."""
    error = refusal(template)
    assert not isinstance(error, TemplateError)
    assert problem in error.problem


@pytest.mark.parametrize(("template", "problem"), FORBIDDEN.items(), ids=range(len(FORBIDDEN)))
def test_a_template_does_not_get_out(refusal: Refusal, template: str, problem: str) -> None:
    error = refusal(template)
    assert isinstance(error, TemplateError)
    assert problem in error.problem


def test_a_costly_second_turn_stops_too(target_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 1)
    late = "{% if messages | length > 2 %}{{ 'a' * 10 ** 10 }}{% endif %}" + CHATML
    (target_copy / "chat_template.jinja").write_text(late)
    template = open_template(TargetSection(source=str(target_copy)))
    ids = template.start("Hi")
    with pytest.raises(TargetError, match="takes more than 512 MiB"):
        template.count_tokens(["Hi", "Why?"])
    assert template.start("Hi") == ids, "the next rendering starts another process"


def test_a_variable_does_not_replace_the_template(target_copy: Path) -> None:
    """`chat_template` is an argument of transformers' function, too."""
    (target_copy / "chat_template.jinja").write_text("{# chat_template tokenize #}" + CHATML)
    section = TargetSection(
        source=str(target_copy), chat_template_kwargs={"chat_template": "owned {{ messages }}"}
    )
    with pytest.raises(TemplateError, match="chat_template"):
        open_template(section)
