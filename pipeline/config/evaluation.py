"""Evaluation: what drafts, on which prompts, at which loads, and beside what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.drafter import DrafterSection
from pipeline.config.section import Place, Section, TreeOrAuto, TreeSection
from pipeline.config.server import LiveServerSection
from pipeline.config.synth import EvaluationSet

#: Ways of decoding that a report has anyway.
_RESERVED = ("speculative", "plain", "hf")


#: Chains as vLLM and SGLang draft them, and trees of SGLang's documentation.
SERVERS_SHAPES = tuple(
    TreeSection(steps=steps, top_k=top_k, nodes=nodes)
    for steps, top_k, nodes in (
        *((3, 1, 4), (5, 1, 6), (7, 1, 8)),
        *((5, 4, 8), (7, 4, 8), (8, 8, 64)),
    )
)


class RivalSection(Section):
    """What is compared with the report's own drafter."""

    name: str = Field(min_length=1)
    """How the report calls it."""
    head: Place | None = None
    """Head directory, or hub:org/name, for a trained drafter."""
    drafter: DrafterSection = DrafterSection()
    """What drafts."""
    tree: TreeSection | None = TreeSection()
    """Its draft tree. None: the report's own, also where that is auto."""

    @model_validator(mode="after")
    def _is_settled(self) -> RivalSection:
        if self.drafter.is_open:
            raise ValueError("a rival's budget cannot be auto; give a number of entries")
        if self.drafter.name == "none":
            raise ValueError("plain decoding is measured anyway; leave it out")
        self.drafter.check_head(self.head)
        return self


class LoadSection(Section):
    """Closed-loop load on our own decoder: as a request ends, the next begins."""

    concurrency: tuple[int, ...] = ()
    """Requests at a time, a point of each curve: 1, 4, 16. (): no load is measured."""
    temperatures: tuple[float, ...] = Field((0.0,), min_length=1)
    """A pair of curves for each; above 0 replies are drawn by seed."""
    modes: dict[str, dict[str, str | int | float | bool]] = Field({})
    """A pair of curves for each name: variables of the chat template over the report's own, such as
    {thinking: {enable_thinking: true}, direct: {enable_thinking: false}}. {}: the report's own."""
    contexts: tuple[int, ...] = ()
    """A pair of curves for each: prompts are filled up to so many tokens with others of theirs, or
    cut to their last ones. (): prompts as they are."""
    requests: int | None = Field(None, gt=0)
    """At each point. None: four times the concurrency, and no fewer than there are prompts."""

    @model_validator(mode="after")
    def _can_be_run(self) -> LoadSection:
        if any(count < 1 for count in self.concurrency):
            raise ValueError("concurrency holds a number below 1; leave it out")
        if any(length < 1 for length in self.contexts):
            raise ValueError("contexts holds a number below 1; leave it out")
        if any(temperature < 0 for temperature in self.temperatures):
            raise ValueError("temperatures holds a number below 0; leave it out")
        return self


class EvalSection(Section):
    """Acceptance and speed of a head."""

    head: Place | None = None
    """Head directory, or hub:org/name; None takes the run's own, where the drafter needs one."""
    prompts: str | None = None
    """JSONL file with `turns`; replaces `sources` when set."""
    sources: tuple[EvaluationSet, ...] = ()
    """Evaluation prompts."""
    drafter: DrafterSection = DrafterSection()
    """What drafts; plain decoding is measured beside it."""
    max_prompts: int | None = Field(None, gt=0)
    """At most this many prompts, drawn evenly over categories."""
    max_turns: int = Field(1, gt=0)
    """Turns decoded per prompt, each in the context of the target's own earlier replies."""
    max_new_tokens: int = Field(64, gt=0)
    """Length limit of one reply."""
    tree: TreeOrAuto = TreeSection()
    """Draft tree. auto: time this machine, try the head on a few prompts, and take the fastest
    shape for each batch size."""
    hf_prompts: int = Field(8, ge=0)
    """Prompts also timed with Hugging Face `generate`, spread over categories."""
    system_prompt: str | None = None
    """System message; None keeps the template's own default, as in synth."""
    chat_template_kwargs: dict[str, str | int | float | bool] = Field({})
    """Variables of the chat template over the target's, such as a mode of synth.mix."""
    shapes: tuple[TreeSection, ...] = SERVERS_SHAPES
    """Trees whose acceptance is replayed, exactly, from one run over some of the prompts, beside
    that of `tree`: by default what servers use. []: none."""
    shape_prompts: int = Field(16, gt=0)
    """At most so many prompts for `shapes`, evenly over those measured. Every position of their
    replies is drafted once for each top_k, as deep as the deepest shape."""

    parallel: Literal["none", "tensor"] = "none"
    """tensor: split every layer of target and head over the processes of a launcher, which decode
    together, for a target that fits no single device (`torchrun --nproc-per-node N -m pipeline.cli
    eval …`)."""

    compare: tuple[RivalSection, ...] = ()
    """Other heads, drafters or trees that decode the same prompts in the same turns; the report has
    the differences, paired by prompt."""
    load: LoadSection = LoadSection()
    """Speed with several requests at a time."""

    server: LiveServerSection = LiveServerSection()
    """A running server to evaluate; part of no hash."""

    @model_validator(mode="after")
    def _has_something_to_measure(self) -> EvalSection:
        if self.drafter.name == "none":
            raise ValueError(
                "drafter none is what every drafter is compared with; choose another "
                "(`eagle3 drafters`)"
            )
        if self.drafter.is_open and self.tree != "auto":
            raise ValueError(
                "drafter.budget=auto is picked together with the tree; "
                "set tree to auto, or budget to a number of entries"
            )
        if self.head is not None:
            self.drafter.check_head(self.head)
        if self.parallel == "tensor" and self.load.concurrency:
            raise ValueError(
                "load.concurrency lets requests arrive by the clock, which several processes do "
                "not share; leave it out, or set parallel to none"
            )
        names = [rival.name for rival in self.compare]
        if len({*names, *_RESERVED}) < len(names) + len(_RESERVED):
            reserved = ", ".join(sorted(_RESERVED))
            raise ValueError(f"compare has a name twice, or one of {reserved}; choose others")
        return self
