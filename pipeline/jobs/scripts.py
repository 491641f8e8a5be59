"""Shell scripts from templates: every value is quoted for the shell, or left out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import resources
from typing import Any


def write_script(template: str, **values: Any) -> str:
    """The template's text; its filters `quoted` and `words` quote a value and a command."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": _quoted, "words": _words}
    source = resources.files("pipeline.jobs").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(values)


def _quoted(value: object) -> str:
    return shlex.quote(str(value))


def _words(command: Sequence[str]) -> str:
    return shlex.join(command)
