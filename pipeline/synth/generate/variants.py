"""The ways in which a run asks: `synth.mix`, or one alone.

shares   2 concise │ 1 thinking │ 1 warm        a number drawn from each prompt's source and id
         0 ─────────────── 0.5 ─────── 0.75 ─── 1       falls into one of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeline.config import SynthSection
from pipeline.records import SamplingOverride
from pipeline.target.template import ChatTemplate

_DRAWS = 2**32


@dataclass(frozen=True)
class Variant:
    """How a part of the prompts is asked. Its name is None where there is no mix."""

    name: str | None
    share: float
    system_prompt: str | None
    template: ChatTemplate
    sampling: SamplingOverride | None


def variants_of(section: SynthSection, template: ChatTemplate) -> tuple[Variant, ...]:
    """Of a run whose own template is `template`. Raises TemplateError for unknown variables."""
    if not section.mix:
        return (Variant(None, 1.0, section.system_prompt, template, None),)
    return tuple(
        Variant(
            spec.name,
            spec.share,
            spec.system_prompt or section.system_prompt,
            template.varied(
                system_prompt=spec.system_prompt,
                kwargs=spec.chat_template_kwargs,
                where=f"synth.mix.{spec.name}",
            ),
            spec.sampling,
        )
        for spec in section.mix
    )


def pick(variants: Sequence[Variant], drawn: int) -> Variant:
    """By shares, evenly over many numbers `drawn`."""
    ends = list(accumulate(variant.share for variant in variants))
    at = drawn % _DRAWS / _DRAWS * ends[-1]
    return next(variant for variant, end in zip(variants, ends, strict=True) if at < end)
