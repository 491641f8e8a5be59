"""Acceptance with the chains and trees that servers draft, exact, from one wide run.

Every position of some replies is drafted once, as wide and as deep as any of the shapes asks for;
what a shape accepts is then read off, without another forward: see `pipeline.tuning.trace`. A
record's name has SGLang's order:

    5/4/8   --speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8
            tree: {steps: 5, top_k: 4, nodes: 8}, the root being one of the nodes in both
    5/1/6   a chain of five drafted tokens: num_speculative_tokens 5 of vLLM
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeline.config import EvalSection, TreeSection
from pipeline.console import long_step, notice
from pipeline.decoder.drafter import DrafterFactory
from pipeline.decoder.ops.tree import WINDOW
from pipeline.errors import ConfigError, DataError
from pipeline.reports import GoldenPrompt, RoundCounters, ShapeAcceptance
from pipeline.serve_eval.intervals import acceptance_figures
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.questions import Question, evenly
from pipeline.tuning.trace import accepted_at, known_margins, replay_counters, trace

#: Replies traced together, fewer where their keys and values would be more entries than these.
_SLOTS = 8
_ENTRIES = 32_768


class ReplayedReply(NamedTuple):
    """A greedy reply, and what the decoder's rounds do for it with every shape, by name."""

    token_ids: tuple[int, ...]
    counters: dict[str, RoundCounters]
    #: What a round that begins at each token but the last accepts.
    accepted_at: dict[str, tuple[int, ...]]
    #: `draft_margins` of a chain that begins there; () where they are not known.
    margins: tuple[tuple[float, ...], ...]


class ReplayedShapes(NamedTuple):
    """Records in the order of the configuration, the report's own tree last; and why others, by
    name, are not among them."""

    shapes: tuple[ShapeAcceptance, ...]
    left_out: dict[str, str]
    replies: dict[str, ReplayedReply]  # by prompt; with chains of every depth that was drafted


def replay_shapes(
    own: Comparison, questions: Sequence[Question], stop_ids: Sequence[int], section: EvalSection
) -> ReplayedShapes:
    """Of `eval.shapes` and the tree that is measured, on the first turns of at most
    `eval.shape_prompts` prompts, evenly over `questions`."""
    first = [question for question in questions if question.turn == 1]
    chosen = evenly(first, section.shape_prompts)
    if not section.shapes or not chosen:
        return ReplayedShapes((), {}, {})
    shapes = list(dict.fromkeys((*section.shapes, own.tree)))
    reasons = {shape: _obstacle(own.alone, shape) for shape in shapes}
    left_out = {shape.label: reason for shape, reason in reasons.items() if reason}
    for name, reason in left_out.items():
        notice("eval", f"shape {name} is left out: {reason}")
    drafted = [shape for shape in shapes if not reasons[shape]]
    replies: dict[str, ReplayedReply] = {}
    with long_step("eval", f"trying {len(drafted)} shapes on {len(chosen)} prompts"):
        for group in _together(drafted):
            for name, reply in replay_group(
                own, chosen, stop_ids, section.max_new_tokens, group
            ).items():
                earlier = replies.get(name, reply)
                replies[name] = ReplayedReply(
                    earlier.token_ids,
                    earlier.counters | reply.counters,
                    earlier.accepted_at | reply.accepted_at,
                    earlier.margins or reply.margins,
                )
    records = (_record(shape, replies, own=shape == own.tree) for shape in drafted)
    return ReplayedShapes(tuple(each for each in records if each), left_out, replies)


def slots_for(questions: Sequence[Question], new_tokens: int) -> int:
    """How many are traced together: a trace allocates for the longest in every slot."""
    entries = new_tokens + max(len(question.context) for question in questions)
    return min(_SLOTS, max(1, _ENTRIES // entries))


def _obstacle(factory: DrafterFactory, shape: TreeSection) -> str:
    """Why such a drafter does not draft this shape; nothing where it does."""
    if factory.costly and shape.steps > max(factory.depths):
        return f"every step is a forward of a whole model; at most {max(factory.depths)} are tried"
    try:
        factory(shape)
    except ConfigError as error:
        return error.problem
    return ""


def _together(shapes: Sequence[TreeSection]) -> list[list[TreeSection]]:
    """Groups that one draft covers: as many steps as any, as wide as any, within a mask."""
    groups: list[list[TreeSection]] = []
    for shape in shapes:
        for group in groups:
            steps, top_k = _widest([*group, shape])
            if (steps - 1) * top_k <= WINDOW:
                group.append(shape)
                break
        else:
            groups.append([shape])
    return groups


def _widest(shapes: Sequence[TreeSection]) -> tuple[int, int]:
    return max(shape.steps for shape in shapes), max(shape.top_k for shape in shapes)


def _record(
    shape: TreeSection, replies: Mapping[str, ReplayedReply], *, own: bool
) -> ShapeAcceptance | None:
    """None where no reply took a round."""
    counters = {
        name: reply.counters[shape.label]
        for name, reply in replies.items()
        if shape.label in reply.counters
    }
    figures = acceptance_figures(list(counters.values()), list(counters))
    if figures is None:
        return None
    return ShapeAcceptance(name=shape.label, own=own, **shape.model_dump(), acceptance=figures)


def replay_group(
    own: Comparison,
    questions: Sequence[Question],
    stop_ids: Sequence[int],
    new_tokens: int,
    shapes: Sequence[TreeSection],
) -> dict[str, ReplayedReply]:
    """With shapes that one draft covers, and, where a chain is among them, chains of every depth up
    to that of the deepest shape; {} where every reply ends with its first token."""
    steps, top_k = _widest(shapes)
    widest = TreeSection(steps=steps, top_k=top_k, nodes=WINDOW)
    widths = sorted({shape.top_k for shape in shapes})
    try:
        traces = trace(
            own.model,
            own.alone(widest),
            [question.context for question in questions],
            new_tokens,
            widest,
            widths=widths,
            slots=slots_for(questions, new_tokens),
            stop_ids=stop_ids,
        )
    except DataError:
        return {}
    chains = [TreeSection.chain(depth) for depth in range(1, steps + 1)] if 1 in widths else []
    replies = {
        question.request_id: ReplayedReply(ids, {}, {}, leads)
        for question, ids, leads in zip(
            questions, traces.replies, known_margins(traces), strict=True
        )
    }
    for shape in dict.fromkeys((*shapes, *chains)):
        parts = replay_counters(traces, shape), accepted_at(traces, shape)
        for reply, counters, accepted in zip(replies.values(), *parts, strict=True):
            reply.counters[shape.label] = counters
            reply.accepted_at[shape.label] = accepted
    return replies


def with_replay(prompt: GoldenPrompt, reply: ReplayedReply) -> GoldenPrompt:
    """The prompt, and what the replay of its reply knows."""
    return prompt.model_copy(
        update={
            "shapes": prompt.shapes | reply.counters,
            "accepted_at": prompt.accepted_at | reply.accepted_at,
            "chain_margins": reply.margins or prompt.chain_margins,
        }
    )
