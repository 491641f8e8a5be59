"""A target small enough to know exactly, decoded by the real operations, and tests of counts.

Shapes: V vocabulary, S = V² states (the last two tokens), B rows, N nodes, L emitted tokens.

The trees of a drafter depend on the state only, so all S of them are drafted once and every round
of every row takes the one of its state:

    forest   state 0   root ─┬─ a ─── c        round of row b   tree     forest[state[b]]
             state 1   root ─── b ─── a                         logits   target[state of each node]
             …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.tree import SamplingTensors, Tree

VOCABULARY = 6
STATES = VOCABULARY**2
#: Rows of a batch.
ROWS = 2**15
#: Position of the first emitted token. Not zero, so that an offset that is forgotten shows.
START = 1000
#: The last two tokens of every prompt.
FIRST_STATE = 8


@dataclass(frozen=True)
class Settings:
    """How one request samples; the same meaning as in `SamplingTensors`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Shape:
    """A dynamic tree: each step drafts `width` children of the `beam` best nodes before it."""

    steps: int
    width: int
    beam: int
    nodes: int


@dataclass(frozen=True)
class Forest:
    """One tree for every state."""

    tree: Tree  # S trees of N nodes
    states: Tensor  # [S, N]: the last two tokens at each node
    depth: int


def random_logits(seed: int, spread: float = 0.6) -> Tensor:
    """[S, V] float32: logits of the next token after each state."""
    return torch.randn(STATES, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def following(states: Tensor, tokens: Tensor) -> Tensor:
    """The state behind `tokens`."""
    return states % VOCABULARY * VOCABULARY + tokens


def plant(ops: TorchOps, drafter: Tensor, shape: Shape) -> Forest:
    """Draft a tree for every state as EAGLE-2 does; drafter [S, V] are the draft's logits."""
    states = torch.arange(STATES)[:, None]  # [S, M]: the nodes to expand
    scores, nodes = torch.zeros(STATES, 1), torch.full((STATES, 1), -1)
    drafted: list[tuple[Tensor, Tensor, Tensor]] = []
    count = 0
    for _ in range(shape.steps):
        step_scores, tokens = ops.propose(drafter[states].flatten(0, 1), shape.width)  # [S · M, W]
        tokens = tokens.view(STATES, -1)  # [S, M · W]
        cumulative = (scores[..., None] + step_scores.view(*scores.shape, -1)).flatten(1)
        drafted.append((tokens, nodes.repeat_interleave(shape.width, 1), cumulative))
        reached = following(states.repeat_interleave(shape.width, 1), tokens)
        scores, best = cumulative.topk(min(shape.beam, cumulative.shape[1]))
        nodes, states = count + best, reached.gather(1, best)
        count += tokens.shape[1]
    tokens, parents, totals = (torch.cat(column, 1) for column in zip(*drafted, strict=True))
    tree = ops.grow_tree(torch.arange(STATES) % VOCABULARY, tokens, parents, totals, shape.nodes)
    at = [torch.arange(STATES)]
    for node in range(1, tree.tokens.shape[1]):
        parent = torch.stack(at, 1).gather(1, tree.parents[:, node : node + 1])[:, 0]
        at.append(following(parent, tree.tokens[:, node]))
    return Forest(tree, torch.stack(at, 1), shape.steps)


def sampling_of(settings: tuple[Settings, ...], rows: int, first_seed: int) -> SamplingTensors:
    """Row b has settings b mod len(settings) and seed first_seed + b."""

    def column(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values).repeat(-(-rows // len(values)))[:rows]

    return SamplingTensors(
        column([each.temperature for each in settings]),
        column([each.top_p for each in settings]),
        column([each.top_k for each in settings]),
        torch.arange(first_seed, first_seed + rows),
    )


def blocks(sampling: SamplingTensors) -> Iterator[SamplingTensors]:
    """The rows in batches that a core's cache holds."""
    for first in range(0, len(sampling.seeds), ROWS):
        yield rows_of(sampling, slice(first, first + ROWS))


def rows_of(sampling: SamplingTensors, rows: slice | Tensor) -> SamplingTensors:
    """Some of the rows."""
    return SamplingTensors(
        sampling.temperature[rows], sampling.top_p[rows], sampling.top_k[rows], sampling.seeds[rows]
    )


def direct(ops: TorchOps, target: Tensor, sampling: SamplingTensors, length: int) -> Tensor:
    """Plain decoding: [B, L] tokens, each drawn from the target's logits."""
    states = torch.full_like(sampling.seeds, FIRST_STATE)
    emitted: list[Tensor] = []
    for position in range(START, START + length):
        emitted.append(ops.draw(target[states], sampling, torch.full_like(states, position)))
        states = following(states, emitted[-1])
    return torch.stack(emitted, 1)


def speculative(
    ops: TorchOps, target: Tensor, forest: Forest, sampling: SamplingTensors, length: int
) -> tuple[Tensor, Tensor]:
    """Rounds of draft, sample, verify: the first [B, L] tokens, and [B] rounds that they took."""
    rows = len(sampling.seeds)
    emitted = torch.full((rows, length + forest.depth), -1)  # a last round may run over L
    done, rounds = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    states = torch.full((rows,), FIRST_STATE)
    logits = target[forest.states]  # [S, N, V]
    while len(left := (done < length).nonzero()[:, 0]):
        grown = forest.tree
        tree = Tree(
            *(
                part[states[left]]
                for part in (grown.tokens, grown.parents, grown.tree_mask, grown.depth)
            )
        )
        own = rows_of(sampling, left)
        positions = START + done[left, None] + tree.depth
        predicted = ops.sample(logits[states[left]], tree, own, positions, forest.depth)
        accepted = ops.verify(tree, predicted, forest.depth)
        for step in range(forest.depth + 1):
            going = accepted.counts > step
            row, token = left[going], accepted.tokens[going, step]
            emitted[row, done[row] + step] = token
            states[row] = following(states[row], token)
        done[left] += accepted.counts
        rounds[left] += 1
    return emitted[:, :length], rounds


def next_token(logits: list[float], settings: Settings) -> list[float]:
    """Probabilities after temperature, top-k, then top-p, in fp64; equals stay or go together."""
    if settings.temperature == 0:
        return [float(index == logits.index(max(logits))) for index in range(len(logits))]
    weights = (torch.tensor(logits, dtype=torch.float64) / settings.temperature).softmax(0).tolist()
    if settings.top_k:
        last = sorted(weights, reverse=True)[min(settings.top_k, len(weights)) - 1]
        weights = [weight if weight >= last else 0.0 for weight in weights]
    nucleus, kept = settings.top_p * sum(weights), 0.0
    for least in sorted(set(weights), reverse=True):
        kept += least * weights.count(least)
        if kept >= nucleus:  # the token that crosses the limit, and its equals, are the last
            break
    weights = [weight if weight >= least else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def joint(target: Tensor, settings: Settings, length: int) -> Tensor:
    """[V^L] fp64: the probability of every sequence, the first token being the highest digit."""
    table = torch.tensor(
        [next_token(row, settings) for row in target.tolist()], dtype=torch.float64
    )  # [S, V]
    states, mass = torch.tensor([FIRST_STATE]), torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        mass = (mass[:, None] * table[states]).flatten()
        states = following(states[:, None], torch.arange(VOCABULARY)).flatten()
    return mass


def count_sequences(tokens: Tensor) -> Tensor:
    """tokens [B, L] → [V^L] how often each sequence occurs."""
    length = tokens.shape[1]
    codes = (tokens * VOCABULARY ** torch.arange(length - 1, -1, -1)).sum(1)
    return codes.bincount(minlength=VOCABULARY**length)


def p_value_exact(counts: Tensor, probabilities: Tensor) -> float:
    """G-test of goodness of fit: the chance of counts [K] as far from `probabilities` [K]."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    order = expected.argsort()
    return _chi_square_tail(
        *_pooled(torch.stack((counts[order].double(), expected[order])), expected[order], 10.0)
    )


def p_value_same(first: Tensor, second: Tensor) -> float:
    """G-test of two samples: the chance of counts [K] as far apart under one distribution."""
    total = (first + second).double()
    order = total.argsort()
    fraction = first.sum() / total.sum()
    observed = torch.stack((first, second))[:, order].double()
    expected = torch.stack((total * fraction, total * (1 - fraction)))[:, order]
    cells = _pooled(torch.cat((observed, expected)), total[order], 20.0)
    return _chi_square_tail(cells[:2], cells[2:])


def _pooled(columns: Tensor, size: Tensor, least: float) -> Tensor:
    """columns [R, K] sorted by `size`, the first ones summed: every cell has size ≥ least."""
    small = int((size < least).sum())
    while 0 < size[:small].sum() < least:
        small += 1
    return (
        torch.cat((columns[:, :small].sum(1, keepdim=True), columns[:, small:]), 1)
        if size[:small].sum() > 0
        else columns[:, small:]
    )


def _chi_square_tail(observed: Tensor, expected: Tensor) -> float:
    """Upper tail of G = 2 Σ observed · ln(observed / expected).

    Chi-square with one degree of freedom less than cells.
    """
    freedom = observed.shape[-1] - 1
    if freedom == 0:
        return 1.0
    statistic = 2 * torch.special.xlogy(observed, observed / expected).sum()
    return float(
        torch.special.gammaincc(
            torch.tensor(freedom / 2, dtype=torch.float64), statistic.clamp(min=0) / 2
        )
    )
