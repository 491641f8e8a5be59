"""Acceptance under the names of other tools, as they define them: from counters alone.

vLLM         `SpecDecodingStats` (v1/spec_decode/metrics.py), and what `vllm bench serve` saves
SGLang       `meta_info` of a reply (managers/tokenizer_manager.py)
SPEED-Bench  `specbench_results.json` of NVIDIA's specdec_bench (metrics/specbench.py)

Each differs from τ in what it counts; docs/evaluation.md compares them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from pipeline.records import Record
from pipeline.reports.acceptance import RoundCounters


class VllmNames(Record):
    """All requests together.

    vLLM counts no draft for a round without a drafted token, and not its bonus token; the last
    round of a reply counts with all that it accepted.
    """

    num_drafts: int
    """Rounds with at least one drafted token."""
    num_draft_tokens: int
    """Drafted tokens that were verified."""
    num_accepted_tokens: int
    """Drafted tokens that were accepted; no bonus tokens."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """Entry k - 1: rounds that accepted position k."""
    spec_decode_acceptance_rate: float
    """Accepted over drafted tokens, in per cent."""
    spec_decode_acceptance_length: float
    """1 + accepted tokens over drafts."""
    spec_decode_per_position_acceptance_rates: tuple[float, ...]
    """Accepted at each position over drafts."""

    @classmethod
    def of(cls, counters: Sequence[RoundCounters]) -> VllmNames:
        """Counters of any number of requests."""
        total = RoundCounters.total(counters)
        drafts, accepted = total.drafts, total.accepted_tokens
        return cls(
            num_drafts=drafts,
            num_draft_tokens=total.drafted,
            num_accepted_tokens=accepted,
            num_accepted_tokens_per_pos=total.accepted,
            spec_decode_acceptance_rate=100 * _share(accepted, total.drafted),
            spec_decode_acceptance_length=1 + _share(accepted, drafts),
            spec_decode_per_position_acceptance_rates=tuple(
                _share(count, drafts) for count in total.accepted
            ),
        )


class SglangNames(Record):
    """All requests together; of a single one, what its reply says.

    The length counts prefill's token, which no round made.
    """

    spec_verify_ct: int
    """Rounds, those without a drafted token too."""
    spec_accept_length: float
    """Tokens of replies, prefill's included, over rounds."""
    spec_accept_rate: float
    """Accepted over drafted tokens, from 0 to 1."""
    spec_num_proposed_drafts: int
    """Drafted tokens that were verified."""
    spec_num_correct_drafts: int
    """Drafted tokens that were accepted."""
    spec_correct_drafts_histogram: tuple[int, ...]
    """Entry n: rounds that accepted n drafted tokens."""

    @classmethod
    def of(cls, counters: Sequence[RoundCounters]) -> SglangNames:
        """Counters of any number of requests."""
        decoded = [each for each in counters if each.rounds]
        total = RoundCounters.total(decoded)
        return cls(
            spec_verify_ct=total.rounds,
            spec_accept_length=_share(total.tokens + len(decoded), total.rounds),
            spec_accept_rate=_share(total.accepted_tokens, total.drafted),
            spec_num_proposed_drafts=total.drafted,
            spec_num_correct_drafts=total.accepted_tokens,
            spec_correct_drafts_histogram=total.accepted_lengths,
        )


class SpeedBenchNames(Record):
    """A request is a prompt with all its turns: its mean round, then means of those.

    SPEED-Bench leaves out the last round of a turn, which the end of a reply cuts. Counters do not
    know which one that was: here it counts uncut.
    """

    Request_AL: dict[str, float]
    """Mean tokens a round of each prompt, by its id."""
    Category_AL: dict[str, float]
    """Mean of Request_AL over the prompts of a category."""
    Average_AL: float
    """Mean of Request_AL over all prompts."""

    @classmethod
    def of(
        cls, counters: Sequence[RoundCounters], prompts: Sequence[str], categories: Sequence[str]
    ) -> SpeedBenchNames:
        """Counters of requests, with the prompt and the category of each."""
        turns: defaultdict[str, list[RoundCounters]] = defaultdict(list)
        category_of = dict(zip(prompts, categories, strict=True))
        for each, prompt in zip(counters, prompts, strict=True):
            if each.rounds:
                turns[prompt].append(each)
        by_prompt = {prompt: _mean_round(each) for prompt, each in turns.items()}
        by_category: defaultdict[str, list[float]] = defaultdict(list)
        for prompt, length in by_prompt.items():
            by_category[category_of[prompt]].append(length)
        return cls(
            Request_AL=by_prompt,
            Category_AL={name: fmean(each) for name, each in sorted(by_category.items())},
            Average_AL=fmean(by_prompt.values()) if by_prompt else 0.0,
        )


class OtherNames(Record):
    """The same acceptance as each tool would print it."""

    vllm: VllmNames
    """As vLLM's log and `vllm bench serve` print it."""
    sglang: SglangNames
    """As `meta_info` of SGLang's replies holds it."""
    speed_bench: SpeedBenchNames
    """As SPEED-Bench's specbench_results.json holds it."""


def _mean_round(counters: Sequence[RoundCounters]) -> float:
    """Mean tokens of a round, each with all that it accepted and the bonus token."""
    total = RoundCounters.total(counters)
    return 1 + _share(total.accepted_tokens, total.rounds)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
