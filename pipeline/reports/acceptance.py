"""What rounds did for every request, and acceptance that is derived from it.

RoundCounters      of a request: counted by the engine or reported by a server, never derived
AcceptanceFigures  of a group of requests: derived from counters alone

And under the names of other tools, as they define them, from counters alone. Each differs from τ in
what it counts; docs/evaluation.md compares them:

vLLM         `SpecDecodingStats` (v1/spec_decode/metrics.py), and what `vllm bench serve` saves
SGLang       `meta_info` of a reply (managers/tokenizer_manager.py)
SPEED-Bench  `specbench_results.json` of NVIDIA's specdec_bench (metrics/specbench.py)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from statistics import fmean
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from pipeline.records import Record

_Value = TypeVar("_Value")
#: None, which older reports write as {}.
OrNone = Annotated[_Value | None, BeforeValidator(lambda value: value or None)]


class RoundCounters(Record):
    """What the rounds of one request drafted and accepted; prefill's token is in none of it.

    drafted      accepted    position  1  2  3        accepted tokens   0  1  2  3
    a b c        a b         proposed  2  2  1        accepted_lengths  1  0  1  0
    d e          none        accepted  1  1  0
    """

    rounds: int
    """Rounds of the decoder, each a draft and a verification, or a plain forward."""
    tokens: int
    """Tokens taken from rounds, bonus included; the last round may be cut by a stop or a limit."""
    drafted: int
    """Drafted tokens that were verified: all nodes of the trees but the roots."""
    accepted_lengths: tuple[int, ...]
    """Entry n: rounds that accepted n drafted tokens; a last round counts uncut."""
    proposed: tuple[int, ...]
    """Entry k - 1: rounds with a drafted token at position k."""

    @model_validator(mode="after")
    def _adds_up(self) -> RoundCounters:
        accepted = self.accepted
        if sum(self.accepted_lengths) != self.rounds:
            raise ValueError("accepted_lengths does not add up to rounds")
        if len(accepted) > len(self.proposed) or any(
            count > offered for count, offered in zip(accepted, self.proposed, strict=False)
        ):
            raise ValueError("a position is accepted more often than it was proposed")
        return self

    @classmethod
    def total(cls, counters: Iterable[RoundCounters]) -> RoundCounters:
        """Of all requests together."""
        each = list(counters)
        return cls(
            rounds=sum(one.rounds for one in each),
            tokens=sum(one.tokens for one in each),
            drafted=sum(one.drafted for one in each),
            accepted_lengths=_added(one.accepted_lengths for one in each),
            proposed=_added(one.proposed for one in each),
        )

    @property
    def accepted(self) -> tuple[int, ...]:
        """Entry k - 1: rounds that accepted position k, and so all before it."""
        reached = list(accumulate(reversed(self.accepted_lengths[1:])))[::-1]
        while reached and not reached[-1]:
            reached.pop()
        return tuple(reached)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.accepted)

    @property
    def drafts(self) -> int:
        """Rounds with a drafted token."""
        return self.proposed[0] if self.proposed else 0

    @property
    def acceptance_length(self) -> float:
        """τ; 0 without rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0


def _added(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Entry by entry; shorter rows end in zeros."""
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


class Estimate(Record):
    """A figure and its 95 % interval, by drawing prompts with replacement."""

    value: float
    """The figure over all requests."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""


class AcceptanceFigures(Record):
    """Acceptance of a group of requests."""

    requests: int
    """Those with rounds."""
    rounds: int
    """Of all of them."""
    acceptance_length: Estimate
    """τ: Σ tokens / Σ rounds; a long reply counts for more."""
    request_acceptance_length: Estimate
    """Mean over requests of each one's tokens / rounds."""
    conditional: tuple[Estimate, ...]
    """α_k, k = 1…: position k accepted, of the rounds that accepted k - 1."""
    joint: tuple[Estimate, ...]
    """Position k = 1… accepted, of all rounds."""
    accept_rate: float
    """Accepted / drafted tokens; 0 where nothing was drafted."""


class ShapeAcceptance(Record):
    """Acceptance with trees of one shape, greedy, on some prompts' first turns."""

    name: str
    """steps/top_k/nodes: the order of SGLang's steps, topk and num_draft_tokens."""
    own: bool
    """Whether it is the tree of the report."""
    steps: int
    """Draft depth."""
    top_k: int
    """Beams a step; 1 is a chain."""
    nodes: int
    """Tokens verified at once, root included."""
    acceptance: AcceptanceFigures
    """Of the replies it was tried on."""


class PromptResult(Record):
    """One request: a turn of a prompt."""

    id: str
    """SOURCE/ID of the prompt, followed by #TURN from the second turn on."""
    category: str
    """Of the prompt."""
    source: str = ""
    """Data set of the prompt."""
    turn: int = 1
    """Number of the turn, from 1."""
    context_tokens: int = 0
    """Tokens before the reply, templates included."""
    context_digest: str = ""
    """Of these tokens: 16 digits of a SHA-256."""
    finish_reason: str = ""
    """Why the reply ended: stop, length, or what a server says."""
    rounds: int
    """Rounds of the reply."""
    tokens: int
    """Tokens of the reply."""
    acceptance_length: float
    """τ of this reply."""
    tokens_per_second: dict[str, float]
    """Decoding rate by way: speculative, plain, hf."""
    ttft_seconds: dict[str, float] = Field({})
    """Admitted or sent to first token, by way of decoding."""
    tpot_seconds: dict[str, float] = Field({})
    """Mean time of a token after the first, by way of decoding."""
    counters: RoundCounters | None = None
    """None in a report from before they existed, or where a server reports none."""
    identical_fp32: bool | None
    """Whether speculative and plain decoding in fp32 gave the same tokens; None: not checked."""

    @property
    def prompt(self) -> str:
        """The id of the prompt that it is a turn of: that of its first turn."""
        return self.id.removesuffix(f"#{self.turn}") if self.turn > 1 else self.id


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
