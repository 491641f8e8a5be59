"""τ on a few prompts of a report, kept with their token ids, and a server against it.

The comparison is paired: the same prompts, greedy, so that differences between prompts drop out.
A right server, with the same head, tree and target, takes as many rounds as the decoder did, up to
near-ties: two tokens whose probabilities its arithmetic cannot tell apart. It fails where its τ is
further away than `eval.server.tolerance` *and* the 95 % interval of the difference does not hold 0;
a few replies that parted at a near-tie fail neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from pipeline.config import TreeSection
from pipeline.metric_names import drafts_of
from pipeline.records import digest
from pipeline.reports import Estimate, GoldenFigure, GoldenPrompt, RoundCounters
from pipeline.serve_eval.acceptance import acceptance_figures, drawn_sums, estimate
from pipeline.serve_eval.live.servers import ToldRounds

#: Prompts that a report keeps, and the longest of them: a report stays readable.
_PROMPTS, _LONGEST = 16, 4096

_Value = TypeVar("_Value")


def golden_figure(
    prompts: Sequence[GoldenPrompt],
    *,
    head: str,
    target: str,
    drafter: str,
    tree: TreeSection,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> GoldenFigure | None:
    """Of some of `prompts`, evenly over them; None where nothing was decoded.

    `head` and `target` are fingerprints.
    """
    usable = [each for each in prompts if each.counters.rounds and len(each.prompt_ids) <= _LONGEST]
    chosen = evenly(usable, _PROMPTS)
    figures = acceptance_figures([each.counters for each in chosen], [each.id for each in chosen])
    if figures is None:
        return None
    return GoldenFigure(
        head_fingerprint=head,
        target_fingerprint=target,
        drafter=drafter,
        tree=tree.model_dump(),
        temperature=0.0,
        max_new_tokens=max_new_tokens,
        stop_ids=tuple(stop_ids),
        prompts_digest=prompts_digest([each.prompt_ids for each in chosen]),
        acceptance_length=figures.acceptance_length,
        prompts=tuple(chosen),
    )


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over token ids."""
    return digest([list(each) for each in prompts])


def evenly(values: Sequence[_Value], most: int) -> list[_Value]:
    """At most `most` of them, spread over all."""
    count = min(most, len(values))
    return [values[index * len(values) // count] for index in range(count)]


class PairedTau(NamedTuple):
    """τ of a server and of the decoder on the same prompts."""

    prompts: int
    server: float
    decoder: Estimate
    difference: Estimate  # server - decoder

    def differs(self, tolerance: float) -> bool:
        """By more than the tolerance, and by more than prompts explain."""
        beyond = abs(self.difference.value) > tolerance * self.decoder.value
        return beyond and not self.difference.low <= 0 <= self.difference.high

    @property
    def text(self) -> str:
        """Both, and how far apart they are."""
        apart = self.difference
        interval = f"95 % interval {apart.low:+.3f} to {apart.high:+.3f}"
        return (
            f"τ is {self.server:.3f} against {self.decoder.value:.3f} of the decoder on the same "
            f"{self.prompts} prompts (difference {apart.value:+.3f}, {interval})"
        )


def compare(
    told: Mapping[str, ToldRounds], expected: Mapping[str, RoundCounters], *, drafts_only: bool
) -> PairedTau | None:
    """On the prompts, by id, that both have; None without any.

    `drafts_only`: the server counts as vLLM does, rounds with a draft, each uncut.
    """
    names = [name for name in told if name in expected and expected[name].rounds]
    if not names:
        return None
    rows = []
    for name in names:
        ours = expected[name]
        drafts = drafts_of(ours)
        decoder = (drafts, drafts + ours.accepted_tokens) if drafts_only else _taken(ours)
        rows.append((told[name].rounds, told[name].tokens, *decoder))
    sums = drawn_sums(np.array(rows, float), names)  # [1 + DRAWS, 4]
    server, decoder_tau = sums[:, 1] / sums[:, 0], sums[:, 3] / np.maximum(sums[:, 2], 1)
    difference = estimate(server - decoder_tau, len(names))
    return PairedTau(len(names), float(server[0]), estimate(decoder_tau, len(names)), difference)


def _taken(counters: RoundCounters) -> tuple[int, int]:
    return counters.rounds, counters.tokens


def parted(
    replies: Mapping[str, Sequence[int]], golden: GoldenFigure
) -> tuple[list[str], list[str]]:
    """Prompts whose replies came back as token ids, and those of them that differ from the
    decoder's, end tokens aside."""
    known = [each for each in golden.prompts if each.id in replies]
    stops = set(golden.stop_ids)

    def open_end(ids: Sequence[int]) -> list[int]:
        return list(ids[:-1]) if ids and ids[-1] in stops else list(ids)

    differing = [
        each.id for each in known if open_end(replies[each.id]) != open_end(each.reply_ids)
    ]
    return [each.id for each in known], differing
