"""What trees of any shape would have accepted, from one run over some prompts.

What a trace keeps of a draft is where the target's own continuation stands in it. Candidates are
taken into a tree in order of their cumulative log-probability, so a tree of n nodes holds those of
*rank* below n - 1, and the continuation's ranks say how far it would have been accepted:

    the target says    c   a   f           nodes      2   3 … 5   6 … 15   16 …
    rank, by depth     1   4   14          accepted   0   1       2        3

Ranks depend on how many beams a draft has (k) and on how deep it goes (s); they are kept for every
k that is asked for and every s, and so the replay is exact, not an estimate. So are the ranks of
the best candidate of each depth, and how many candidates there are, which say what was proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.tree import WINDOW, root_only
from pipeline.decoder.request import Request
from pipeline.decoder.round import prefill_prompt, verify_and_commit
from pipeline.errors import DataError, TargetError
from pipeline.reports import RoundCounters
from pipeline.tuning.cost import open_batch

#: Rank of what was not drafted.
_NEVER = 1 << 30
#: Of each position.
_Drafts = list[Candidates]


@dataclass
class _TracedReply:
    """A reply, a stop token included, and how the text goes on: the round that a reply ends in may
    accept more than it takes."""

    stop_ids: frozenset[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0  # of the reply; 0 while it goes on

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if not self.length and (token in self.stop_ids or len(self.tokens) == self.limit):
            self.length = len(self.tokens)

    @property
    def beyond(self) -> int:
        """Tokens after its end; -1 before it."""
        return len(self.tokens) - self.length if self.length else -1

    @property
    def positions(self) -> int:
        """Its tokens but the last, for rounds begin at those."""
        return self.length - 1


@dataclass(frozen=True)
class Traces:
    """Where the target's own continuation stands in the drafts of T positions, by reply."""

    #: Positions of each reply: its tokens but the last, for nothing follows that one.
    lengths: tuple[int, ...]
    #: By beams, [T, D, D] int32: rank of the continuation's token d + 1 in a draft of s + 1 steps.
    ranks: Mapping[int, Tensor]
    #: By beams, [T, D, D] int32: rank of the best candidate of depth d + 1 in such a draft.
    best: Mapping[int, Tensor]
    #: By beams, [T, D] int64: candidates of a draft of s + 1 steps.
    sizes: Mapping[int, Tensor]
    #: [T, D] float32: `draft_margins` of the draft with the most beams.
    margins: Tensor
    #: Token ids of each reply, a stop token included.
    replies: tuple[tuple[int, ...], ...] = ()

    def covers(self, shape: TreeSection) -> bool:
        """Can this shape be replayed?"""
        return shape.top_k in self.ranks and shape.steps <= self.ranks[shape.top_k].shape[1]


@torch.inference_mode()
def trace(
    model: DecoderModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    shape: TreeSection,
    *,
    widths: Sequence[int],
    slots: int = 1,
    stop_ids: Sequence[int] = (),
) -> Traces:
    """Decode prompts greedily, `slots` at a time, and draft at every position of the replies.

    Drafts are made for each number of beams in `widths` up to shape.top_k, with shape.steps steps.
    The drafter must draft as deep itself. Raises DataError for prompts that cannot be run or that
    give no reply of two tokens, TargetError for NaN logits.
    """
    if shape.steps > drafter.depth:
        raise ValueError(f"shape has {shape.steps} steps, the drafter was made for {drafter.depth}")
    _check(model, prompts, new_tokens)
    shapes = {
        width: TreeSection(top_k=width, steps=shape.steps, nodes=WINDOW)
        for width in widths
        if width <= shape.top_k
    }
    lengths, texts, margins = list[int](), list[tuple[int, ...]](), list[Tensor]()
    traced: dict[int, list[list[Tensor]]] = {width: [] for width in shapes}
    for first in range(0, len(prompts), slots):
        some = prompts[first : first + slots]
        replies, drafts = _decode(model, drafter, some, new_tokens, shapes, frozenset(stop_ids))
        positions = [reply.positions for reply in replies]
        lengths += positions
        texts += [tuple(reply.tokens[: reply.length]) for reply in replies]
        if not any(positions):
            continue
        following = _continuations(replies, shape.steps).to(model.device)  # [B, P, D]
        leads = draft_margins(drafts[max(shapes)], following)  # [B, P, D]
        margins += [leads[row, :count] for row, count in enumerate(positions)]
        for width, drafted in drafts.items():
            by_row = (
                continuation_ranks(drafted, following),  # [B, P, D, D]
                *proposed_ranks(drafted, shape.steps),  # [B, P, D, D], [B, P, D]
            )
            for row, count in enumerate(positions):
                traced[width].append([part[row, :count] for part in by_row])
    if not any(lengths):
        raise DataError(
            "no reply is longer than its first token",
            where="prompts",
            fix="trace other prompts, or more of them",
        )
    joined = {
        width: [torch.cat(parts).cpu() for parts in zip(*rows, strict=True)]
        for width, rows in traced.items()
    }
    ranks, best, sizes = (
        {width: parts[index] for width, parts in joined.items()} for index in range(3)
    )
    return Traces(tuple(lengths), ranks, best, sizes, torch.cat(margins).cpu(), tuple(texts))


def replay(traces: Traces, shape: TreeSection) -> list[int]:
    """Rounds that greedy decoding with trees of this shape makes for each traced reply.

    Exact: every round is the one that the engine would make, whatever was drafted before it. Only
    where a token's states depend in the last bits on the batch or the tree around it may a near-tie
    between two candidates go the other way. Raises ValueError for a shape that the traces do not
    cover.
    """
    accepted = _in_tree(traces, traces.ranks, shape).tolist()  # [T]
    return [len(rounds) for rounds in _rounds(traces.lengths, accepted)]


def replay_counters(traces: Traces, shape: TreeSection) -> list[RoundCounters]:
    """What the engine would count for each traced reply; exact as `replay` is, and raises as it."""
    accepted = _in_tree(traces, traces.ranks, shape)  # [T]
    deepest = _in_tree(traces, traces.best, shape)  # [T]
    drafted = traces.sizes[shape.top_k][:, shape.steps - 1].clamp(max=shape.nodes - 1)  # [T]
    counters = []
    rounds_of = _rounds(traces.lengths, accepted.tolist())
    for length, rounds in zip(traces.lengths, rounds_of, strict=True):
        depths = deepest[rounds]  # [R]
        counters.append(
            RoundCounters(
                rounds=len(rounds),
                tokens=length,
                drafted=int(drafted[rounds].sum()),
                accepted_lengths=tuple(torch.bincount(accepted[rounds]).tolist()),
                proposed=tuple(
                    int((depths >= depth).sum())
                    for depth in range(1, 1 + max(depths.tolist(), default=0))
                ),
            )
        )
    return counters


def accepted_at(traces: Traces, shape: TreeSection) -> list[tuple[int, ...]]:
    """By reply, what a round that begins at each of its tokens but the last would accept."""
    every = _in_tree(traces, traces.ranks, shape)  # [T]
    return [tuple(some.tolist()) for some in torch.split(every, list(traces.lengths))]


def known_margins(traces: Traces) -> list[tuple[tuple[float, ...], ...]]:
    """By reply and token but the last, its margins without the zeros at the end; () where every
    draft has one beam, and so no second token."""
    if max(traces.ranks) == 1:
        return [()] * len(traces.lengths)
    last = (traces.margins > 0) * torch.arange(1, 1 + traces.margins.shape[1])  # [T, D]
    rows = zip(traces.margins.tolist(), last.amax(1).tolist(), strict=True)
    trimmed = (tuple(round(each, 3) for each in row[:count]) for row, count in rows)
    return [tuple(islice(trimmed, length)) for length in traces.lengths]


def _in_tree(traces: Traces, ranks: Mapping[int, Tensor], shape: TreeSection) -> Tensor:
    """How many of a chain of ranks the tree of each position holds [T]: a node's ancestors, and
    the best candidates of smaller depths, all have lower ranks."""
    if not traces.covers(shape):
        beams = sorted(traces.ranks)
        raise ValueError(f"traces hold {beams} beams, not {shape}; trace a wider and deeper shape")
    chain = ranks[shape.top_k][:, : shape.steps, shape.steps - 1]  # [T, steps]
    return (chain < shape.nodes - 1).sum(1)


def _rounds(lengths: Sequence[int], accepted: Sequence[int]) -> list[list[int]]:
    """The positions at which each reply's rounds begin."""
    replies, first = [], 0
    for length in lengths:
        position, rounds = first, []
        first += length
        while position < first:
            rounds.append(position)
            position += accepted[position] + 1
        replies.append(rounds)
    return replies


def acceptance(traces: Traces, shape: TreeSection) -> float:
    """τ over all traced replies with trees of this shape; exact as `replay` is."""
    return sum(traces.lengths) / sum(replay(traces, shape))


def _check(model: DecoderModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        request = Request(str(index), tuple(prompt), new_tokens, ())
        problem = request.problem(vocabulary=model.vocabulary, max_length=model.max_length)
        if problem is not None:
            raise DataError(problem.what, where=f"prompt {index}", fix=problem.fix)


def _decode(
    model: DecoderModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    shapes: Mapping[int, TreeSection],
    stop_ids: frozenset[int],
) -> tuple[list[_TracedReply], dict[int, _Drafts]]:
    """Greedy replies, and the drafts below each of their tokens."""
    beyond = max((shape.steps for shape in shapes.values()), default=0)
    # Drafted entries stand after the reply, and what a last round may accept beyond its end.
    entries = max(len(prompt) for prompt in prompts) + new_tokens + beyond + WINDOW
    batch, planes = open_batch(model, drafter, len(prompts), entries, emitted=1)
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor(prompt, device=model.device)
        prefill_prompt(model, planes, drafter, batch.rows(row, row + 1), tokens)
    replies = [_TracedReply(stop_ids, new_tokens) for _ in prompts]
    for reply, token in zip(replies, batch.emitted[:, 0].tolist(), strict=True):
        reply.append(token)
    drafts: dict[int, _Drafts] = {width: [] for width in shapes}
    while any(reply.beyond < beyond for reply in replies):
        if any(reply.beyond < 0 for reply in replies):
            for width, shape in shapes.items():
                drafts[width].append(drafter.candidates(batch, planes, shape))
        verify_and_commit(model, planes, drafter, batch, root_only(batch.roots), 0, sampling=False)
        for reply, token in zip(replies, batch.emitted[:, 0].tolist(), strict=True):
            reply.append(token)
    if any(token < 0 for reply in replies for token in reply.tokens[: reply.positions + 1]):
        fix = "check the target's weights and target.dtype"
        raise TargetError("the logits were NaN", where="target", fix=fix)
    return replies, drafts


def _continuations(replies: Sequence[_TracedReply], depth: int) -> Tensor:
    """The tokens that follow each token of each reply, or its end: [B, P, D].

    reply  a b c d | e f g      position of a   b c d e
                                            b   c d e f
                                            c   d e f g
    """
    end = max(reply.positions for reply in replies) + depth
    return torch.tensor([reply.tokens[1:end] for reply in replies]).unfold(1, depth, 1)


def continuation_ranks(drafts: _Drafts, following: Tensor) -> Tensor:
    """Ranks [B, P, D, D] of the continuations `following` [B, P, D] in drafts of D steps.

    Entry [.., d, s] is the rank of the token d + 1 after the position among the candidates of the
    first s + 1 steps. It counts the better ones; of equals the earlier is the better, as in
    `grow_tree`.
    """
    rows, positions, depth = following.shape
    targets = following.flatten(0, 1)  # [T, D], T = B·P
    ranks = targets.new_full((len(targets), depth, depth), _NEVER, dtype=torch.int32)
    stacked = [torch.stack(parts, dim=1) for parts in list(zip(*drafts, strict=True))[:3]]
    tokens, parents, scores = (part.flatten(0, 1) for part in stacked)  # each [T, C]
    index = torch.arange(tokens.shape[1], device=tokens.device)  # [C]
    steps = torch.arange(depth, device=tokens.device)  # [D]
    depths = drafts[0].depths  # [C]
    drafted_by = (depths[:, None] <= steps + 1).float()  # [C, D] candidates of s + 1 steps
    # The last candidate of the continuation, -1 the root, and whether it was drafted so far: [T,
    # 1].
    node = torch.full_like(targets[:, :1], -1)
    alive = torch.ones_like(node, dtype=torch.bool)
    for step in range(depth):
        follows = (parents == node) & (tokens == targets[:, step : step + 1])
        agrees = (depths == step + 1) & follows & alive  # [T, C]; of equal siblings the first
        agrees &= scores > -torch.inf  # such a one proposes nothing
        alive, node = agrees.any(1, keepdim=True), agrees.int().argmax(1, keepdim=True)
        score = scores.gather(1, node)
        better = (scores > score) | ((scores == score) & (index < node))  # [T, C]
        counted = (better.float() @ drafted_by).int()  # [T, D]
        ranks[:, step] = torch.where(alive & (steps >= step), counted, _NEVER)
    return ranks.view(rows, positions, depth, depth)


def draft_margins(drafts: _Drafts, following: Tensor) -> Tensor:
    """How clear each decision of a chain is along the continuations, in nats: [B, P, D].

    Entry d: by how much the likeliest token d + 1 leads, over the likeliest other where it is the
    continuation's, over the continuation's where it is not, or over the least likely child where
    that is not even drafted: a lower bound. After such a miss, and where nothing was drafted below
    the continuation, it is 0.
    """
    rows, positions, depth = following.shape
    targets = following.flatten(0, 1)  # [T, D], T = B·P
    stacked = [torch.stack(parts, dim=1) for parts in list(zip(*drafts, strict=True))[:3]]
    tokens, parents, scores = (part.flatten(0, 1) for part in stacked)  # each [T, C]
    node = torch.full_like(targets[:, :1], -1)
    alive = torch.ones_like(node, dtype=torch.bool)
    margins = scores.new_zeros(targets.shape)
    for step in range(depth):
        children = (parents == node) & (drafts[0].depths == step + 1) & (scores > -torch.inf)
        own = children & (tokens == targets[:, step : step + 1])  # [T, C]
        ours = scores.where(own, -torch.inf).amax(1)  # [T]
        best_other = scores.where(children & ~own, -torch.inf).amax(1)
        least = scores.where(children, torch.inf).amin(1)
        lead = (ours.where(own.any(1), least) - best_other).abs()
        decided = alive[:, 0] & (children.sum(1) > 1)
        margins[:, step] = lead.where(decided, 0.0)
        node = own.int().argmax(1, keepdim=True)
        alive &= decided[:, None] & (ours > best_other)[:, None]
    return margins.view(rows, positions, depth)


def proposed_ranks(drafts: _Drafts, depth: int) -> tuple[Tensor, Tensor]:
    """What drafts of D = `depth` steps propose: ranks of the best of each depth [B, P, D, D], as
    `continuation_ranks` has them, and numbers of candidates [B, P, D] of the first s + 1 steps."""
    scores = torch.stack([draft.scores for draft in drafts], dim=1)  # [B, P, C]
    rows, positions, count = scores.shape
    scores, depths = scores.flatten(0, 1), drafts[0].depths  # [T, C], [C]
    ranks = depths.new_full((len(scores), depth, depth), _NEVER, dtype=torch.int32)
    index = torch.arange(count, device=scores.device)  # [C]
    steps = torch.arange(depth, device=scores.device)  # [D]
    drafted_by = (depths[:, None] <= steps + 1).float()  # [C, D] candidates of s + 1 steps
    for step in range(depth):
        of_depth = scores.where(depths == step + 1, -torch.inf)
        score = of_depth.amax(1, keepdim=True)  # [T, 1]
        node = (of_depth == score).int().argmax(1, keepdim=True)  # of equals the first
        better = (scores > score) | ((scores == score) & (index < node))  # [T, C]
        counted = (better.float() @ drafted_by).int()  # [T, D]
        ranks[:, step] = torch.where((score > -torch.inf) & (steps >= step), counted, _NEVER)
    sizes = ((scores > -torch.inf).float() @ drafted_by).long()
    return ranks.view(rows, positions, depth, depth), sizes.view(rows, positions, depth)
