"""What trees of any shape would have accepted, from one run over some prompts.

What a trace keeps of a draft is where the target's own continuation stands in it. Candidates are
taken into a tree in order of their cumulative log-probability, so a tree of n nodes holds those of
*rank* below n - 1, and the continuation's ranks say how far it would have been accepted:

    the target says    c   a   f           nodes      2   3 … 5   6 … 15   16 …
    rank, by depth     1   4   14          accepted   0   1       2        3

Ranks depend on how many beams a draft has (k) and on how deep it goes (s); they are kept for every
k that is asked for and every s, and so the replay is exact, not an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.drafters.base import Drafter
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.request import Request
from pipeline.decoder.round import advance, read_prompt
from pipeline.decoder.tree import WINDOW, root_only
from pipeline.errors import DataError, TargetError
from pipeline.tuning.cost import open_batch

#: Rank of what was not drafted.
_NEVER = 1 << 30

#: Of each position.
_Drafts = list[Candidates]


@dataclass(frozen=True)
class Traces:
    """Where the target's own continuation stands in the drafts of T positions, by reply."""

    #: Positions of each reply: its tokens but the last, for nothing follows that one.
    lengths: tuple[int, ...]
    #: By beams, [T, D, D] int32: rank of the continuation's token d + 1 in a draft of s + 1 steps.
    ranks: Mapping[int, Tensor]

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
    lengths: list[int] = []
    ranks: dict[int, list[Tensor]] = {width: [] for width in shapes}
    for first in range(0, len(prompts), slots):
        some = prompts[first : first + slots]
        replies, drafts = _decode(model, drafter, some, new_tokens, shapes, frozenset(stop_ids))
        positions = [len(reply) - 1 for reply in replies]
        lengths += positions
        if not any(positions):
            continue
        following = _continuations(replies, shape.steps).to(model.device)  # [B, P, D]
        for width, drafted in drafts.items():
            by_row = continuation_ranks(drafted, following)  # [B, P, D, D]
            ranks[width] += [by_row[row, :count] for row, count in enumerate(positions)]
    if not any(lengths):
        raise DataError(
            "no reply is longer than its first token",
            where="prompts",
            fix="trace other prompts, or more of them",
        )
    return Traces(tuple(lengths), {width: torch.cat(parts).cpu() for width, parts in ranks.items()})


def replay(traces: Traces, shape: TreeSection) -> list[int]:
    """Rounds that greedy decoding with trees of this shape makes for each traced reply.

    Exact: every round is the one that the engine would make, whatever was drafted before it. Only
    where a token's states depend in the last bits on the batch or the tree around it may a near-tie
    between two candidates go the other way. Raises ValueError for a shape that the traces do not
    cover.
    """
    if not traces.covers(shape):
        beams = sorted(traces.ranks)
        raise ValueError(f"traces hold {beams} beams, not {shape}; trace a wider and deeper shape")
    ranks = traces.ranks[shape.top_k][:, : shape.steps, shape.steps - 1]  # [T, steps]
    # A node's ancestors all have lower ranks.
    accepted = (ranks < shape.nodes - 1).sum(1).tolist()  # [T]
    rounds, first = [], 0
    for length in traces.lengths:
        position, count = first, 0
        first += length
        while position < first:
            position += accepted[position] + 1
            count += 1
        rounds.append(count)
    return rounds


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
) -> tuple[list[list[int]], dict[int, _Drafts]]:
    """Greedy replies, a stop token included, and the drafts below each of their tokens."""
    # Drafted entries stand behind the reply.
    entries = max(len(prompt) for prompt in prompts) + new_tokens + WINDOW
    batch, planes = open_batch(model, drafter, len(prompts), entries, emitted=1)
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor(prompt, device=model.device)
        read_prompt(model, planes, drafter, batch.rows(row, row + 1), tokens)
    replies = [[token] for token in batch.emitted[:, 0].tolist()]
    drafts: dict[int, _Drafts] = {width: [] for width in shapes}
    for _ in range(new_tokens - 1):
        if all(reply[-1] in stop_ids for reply in replies):
            break
        for width, shape in shapes.items():
            drafts[width].append(drafter.candidates(batch, planes, shape))
        advance(model, planes, drafter, batch, root_only(batch.roots), 0, sampling=False)
        for reply, token in zip(replies, batch.emitted[:, 0].tolist(), strict=True):
            if (
                reply[-1] not in stop_ids
            ):  # rows that have ended go on, and what they emit is dropped
                reply.append(token)
    if any(token < 0 for reply in replies for token in reply):
        fix = "check the target's weights and target.dtype"
        raise TargetError("the logits were NaN", where="target", fix=fix)
    return replies, drafts


def _continuations(replies: Sequence[Sequence[int]], depth: int) -> Tensor:
    """The tokens that follow each token of each reply: [B, P, D], -1 beyond the end.

    reply  a b c d        position of a   b c d -1
                                      b   c d -1 -1
                                      c   d -1 -1 -1
    """
    longest = max(map(len, replies)) - 1 + depth
    padded = [[*reply[1:], *[-1] * (longest - len(reply))] for reply in replies]
    return torch.tensor(padded).unfold(1, depth, 1)  # of [B, P + D - 1]


def continuation_ranks(drafts: _Drafts, following: Tensor) -> Tensor:
    """Ranks [B, P, D, D] of the continuations `following` [B, P, D] in drafts of D steps.

    Entry [.., d, s] is the rank of the token d + 1 behind the position among the candidates of the
    first s + 1 steps. It counts the better ones; of equals the earlier is the better, as in
    `grow_tree`.
    """
    rows, positions, depth = following.shape
    wanted = following.flatten(0, 1)  # [T, D], T = B·P
    ranks = wanted.new_full((len(wanted), depth, depth), _NEVER, dtype=torch.int32)
    stacked = [torch.stack(parts, dim=1) for parts in list(zip(*drafts, strict=True))[:3]]
    tokens, parents, scores = (part.flatten(0, 1) for part in stacked)  # each [T, C]
    index = torch.arange(tokens.shape[1], device=tokens.device)  # [C]
    steps = torch.arange(depth, device=tokens.device)  # [D]
    depths = drafts[0].depths  # [C]
    drafted_by = (depths[:, None] <= steps + 1).float()  # [C, D] candidates of s + 1 steps
    # The last candidate of the continuation, -1 the root, and whether it was drafted so far: [T,
    # 1].
    node = torch.full_like(wanted[:, :1], -1)
    alive = torch.ones_like(node, dtype=torch.bool)
    for step in range(depth):
        follows = (parents == node) & (tokens == wanted[:, step : step + 1])
        agrees = (depths == step + 1) & follows & alive  # [T, C]; of equal siblings the first
        agrees &= scores > -torch.inf  # such a one proposes nothing
        alive, node = agrees.any(1, keepdim=True), agrees.int().argmax(1, keepdim=True)
        own = scores.gather(1, node)
        better = (scores > own) | ((scores == own) & (index < node))  # [T, C]
        counted = (better.float() @ drafted_by).int()  # [T, D]
        ranks[:, step] = torch.where(alive & (steps >= step), counted, _NEVER)
    return ranks.view(rows, positions, depth, depth)
