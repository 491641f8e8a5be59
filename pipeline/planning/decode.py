"""Decode plans: which drafter pays at which batch size B and context S; here on target.

A forward of n tokens a row takes the longer of what it reads and what it multiplies (the roofline
of Williams et al. 2009), from a config.json and the bandwidth and FLOP/s that the user states:

    bytes   weights (of experts, those that B · n tokens reach) + keys and values of B · (S + n)
    FLOPs   2 · active parameters · B · n + attention over S, of which windows hide a part

    S(γ) = τ · T_AR / (T_verify(γ + 1) + drafting(γ)),   τ = 1 + α + … + α^γ

for chains of γ tokens, each accepted with the stated probability α given that those before it were.
`pipeline.serve_eval.decode_plan` measures instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pydantic import Field

from pipeline.planning.targets import TargetShape
from pipeline.records import Record

#: Of weights, keys and values: 16 bits.
_WIDTH = 2
#: The longest chain that is tried.
MAX_CHAIN = 8
#: A head's draft vocabulary, and its MLP as a share of the target's.
_DRAFT_VOCABULARY = 32_000
_BLOCK, _BLOCK_LAYERS = 8, 2
_MARKOV_RANK = 256


class PlannedDecoding(Record):
    """One drafter at one batch size and context."""

    drafter: str
    batch: int  # B, requests side by side
    context: int  # S, tokens of each
    tree: dict[str, int]  # the fastest shape
    settings: dict[str, int] = Field({})  # what was picked beside it: budget, block_size
    acceptance_length: float  # τ
    speedup: float  # predicted, over plain decoding
    milliseconds: dict[str, float]  # t_ar, t_verify, t_draft (a step), t_extend, t_other
    measured_speedup: float | None = None
    measured_acceptance_length: float | None = None
    error: float | None = None  # of the predicted speedup, as a share of the measured one


class Crossing(Record):
    """Where a drafter begins to pay, or ceases to."""

    drafter: str
    batch: int
    context: float  # tokens at which the speedup passes 1
    pays_above: bool


class DecodePlan(Record):
    """What `eagle3 plan-decode --json` writes. Later versions add keys and rename none."""

    basis: str  # measured, or on paper
    machine: str
    target: str
    prompts: int  # whose acceptance was traced, at each context; 0 on paper
    new_tokens: int
    cells: tuple[PlannedDecoding, ...]
    crossings: tuple[Crossing, ...]  # inflection lengths


def crossings(cells: Sequence[PlannedDecoding]) -> tuple[Crossing, ...]:
    """Where the speedup of a drafter passes 1 at a batch size; straight lines between contexts."""
    passed = []
    for drafter, batch in dict.fromkeys((cell.drafter, cell.batch) for cell in cells):
        row = [cell for cell in cells if (cell.drafter, cell.batch) == (drafter, batch)]
        for left, right in pairwise(sorted(row, key=lambda cell: cell.context)):
            below, above = left.speedup - 1, right.speedup - 1
            if below * above < 0:
                share = below / (below - above)
                context = left.context + share * (right.context - left.context)
                passed.append(
                    Crossing(drafter=drafter, batch=batch, context=context, pays_above=above > 0)
                )
    return tuple(passed)


def chain_tau(alpha: float, steps: int) -> float:
    """τ of a chain of `steps` tokens, each accepted with probability alpha given those before."""
    return sum(alpha**position for position in range(steps + 1))


class MachineRates(NamedTuple):
    """What a machine sustains."""

    bandwidth: float  # bytes/s
    flops: float  # FLOP/s in 16 bits


class _Roofline(NamedTuple):
    """A model on a machine."""

    shape: TargetShape
    rates: MachineRates

    def seconds(self, rows: int, context: int, tokens: int) -> float:
        """The floor of a forward of `tokens` tokens a row after `context` entries."""
        shape, count = self.shape, rows * tokens
        cache = rows * (shape.mean_seen(context) + tokens) * shape.key_value_bytes
        operations = 2.0 * self._multiplied() * count + count * shape.attention_flops(context)
        return self.floor(_WIDTH * self._reached(count) + cache, operations)

    def layer_seconds(self, layers: int, vocabulary: int, rows: int, tokens: int) -> float:
        """Of so many dense layers like the target's, and logits over a vocabulary."""
        shape = self.shape
        queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
        layer = 2 * shape.hidden * (queries + keys) + 3 * shape.hidden * shape.intermediate
        parameters = layers * layer + vocabulary * shape.hidden
        return self.floor(_WIDTH * parameters, 2.0 * parameters * rows * tokens)

    def _multiplied(self) -> int:
        """Parameters that a token passes: not the embedding, of which it takes a row."""
        embedding = 0 if self.shape.tied else self.shape.vocabulary * self.shape.hidden
        return self.shape.active_parameters - embedding

    def _reached(self, tokens: int) -> float:
        """Parameters that are read: of experts those that some token is sent to, evenly drawn."""
        shape = self.shape
        if shape.experts is None:
            return self._multiplied()
        experts = shape.experts
        width = 3 * shape.hidden * experts.width * shape.layers  # of one expert, all layers
        held = experts.held * (1 - (1 - experts.active / experts.held) ** tokens)
        return self._multiplied() + (held - experts.active) * width

    def floor(self, read: float, operations: float) -> float:
        return max(read / self.rates.bandwidth, operations / self.rates.flops)


class _Case(NamedTuple):
    """A batch size and a context; what drafting costs there, by drafter.

    A drafter's method returns the seconds of the first proposal, of each further step, and of
    taking in what was accepted.
    """

    target: _Roofline
    draft: _Roofline | None  # standalone's
    batch: int
    context: int
    budget: int  # self_spec's

    def fastest_chain(self, name: str, alpha: float) -> PlannedDecoding:
        longest_chain = _LONGEST_CHAINS.get(name, MAX_CHAIN)
        chains = (self._chain(name, alpha, steps) for steps in range(1, longest_chain + 1))
        return max(chains, key=lambda each: each.speedup)

    def _chain(self, name: str, alpha: float, steps: int) -> PlannedDecoding:
        plain = self.target.seconds(self.batch, self.context, 1)
        verify = self.target.seconds(self.batch, self.context, steps + 1)
        first, step, extend = _DRAFTING.get(name, _Case.head)(self, steps)
        tau = chain_tau(alpha, steps)
        seconds = verify + first + (steps - 1) * step + extend
        times = {"t_ar": plain, "t_verify": verify, "t_draft": step, "t_extend": first + extend}
        return PlannedDecoding(
            drafter=name,
            batch=self.batch,
            context=self.context,
            tree={"top_k": 1, "steps": steps, "nodes": steps + 1},
            acceptance_length=tau,
            speedup=tau * plain / seconds,
            milliseconds={key: round(1e3 * each, 4) for key, each in times.items()},
        )

    def ngram(self, steps: int) -> tuple[float, float, float]:
        del steps
        return 0.0, 0.0, 0.0

    def self_spec(self, steps: int) -> tuple[float, float, float]:
        del steps
        step = self.target.seconds(self.batch, min(self.budget, self.context), 1)
        return step, step, 0.0

    def standalone(self, steps: int) -> tuple[float, float, float]:
        assert self.draft is not None
        step = self.draft.seconds(self.batch, self.context, 1)
        return 0.0, step, self.draft.seconds(self.batch, self.context, steps + 1)

    def block(self, steps: int) -> tuple[float, float, float]:
        vocabulary = self.target.shape.vocabulary
        block = self.target.layer_seconds(_BLOCK_LAYERS, vocabulary, self.batch, _BLOCK)
        return block, 0.0, self.target.layer_seconds(_BLOCK_LAYERS, 0, self.batch, steps + 1)

    def markov_block(self, steps: int) -> tuple[float, float, float]:
        block, _, extend = self.block(steps)
        parameters = _MARKOV_RANK * self.target.shape.vocabulary
        step = self.target.floor(_WIDTH * parameters, 2.0 * parameters * self.batch)
        return block + step, step, extend

    def head(self, steps: int) -> tuple[float, float, float]:
        step = self.target.layer_seconds(1, _DRAFT_VOCABULARY, self.batch, 1)
        return 0.0, step, self.target.layer_seconds(1, _DRAFT_VOCABULARY, self.batch, steps + 1)


#: Drafters that draft otherwise than by a head of one layer, and those of shorter chains.
_DRAFTING: dict[str, Callable[[_Case, int], tuple[float, float, float]]] = {
    "ngram": _Case.ngram,
    "self_spec": _Case.self_spec,
    "standalone": _Case.standalone,
    "dflash": _Case.block,
    "dspark": _Case.markov_block,
}
_LONGEST_CHAINS = {"dflash": _BLOCK - 1, "dspark": _BLOCK - 1}


def plan_on_paper(
    shape: TargetShape,
    rates: MachineRates,
    target: str,
    *,
    acceptance: Mapping[str, float],
    batches: Sequence[int],
    contexts: Sequence[int],
    budget: int,
    draft_shape: TargetShape | None = None,
) -> DecodePlan:
    """The fastest chain of each drafter named in `acceptance`, at its α.

    `budget` is self_spec's compressed cache in tokens, `draft_shape` the standalone drafter's.
    """
    roofline = _Roofline(shape, rates)
    draft = _Roofline(draft_shape, rates) if draft_shape else None
    cells = tuple(
        _Case(roofline, draft, batch, context, budget).fastest_chain(name, alpha)
        for name, alpha in acceptance.items()
        for context in contexts
        for batch in batches
    )
    stated = ", ".join(f"{name} {alpha:g}" for name, alpha in acceptance.items())
    return DecodePlan(
        basis=f"on paper: rooflines, α as stated ({stated}); nothing was measured",
        machine=f"{rates.bandwidth / 1e9:,.0f} GB/s, {rates.flops / 1e12:,.0f} TFLOP/s",
        target=target,
        prompts=0,
        new_tokens=0,
        cells=cells,
        crossings=crossings(cells),
    )


def parse_acceptance(text: str, known: Iterable[str]) -> dict[str, float]:
    """`eagle3=0.8,self_spec=0.9` → α by drafter. Raises ValueError."""
    alphas: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"unknown drafter {name!r}; see `eagle3 drafters`")
        alphas[name] = float(value)
        if not 0 <= alphas[name] < 1:
            raise ValueError(f"α of {name} is {value}, not in [0, 1)")
    return alphas
