"""What a draft is made of: heads that propose, the rows that beams continue, and candidates.

Draft step s = 1…steps-1 reads k tokens of depth s; each sees all L committed entries, then its own
ancestors among the drafted ones:

    entries   0 … L-1 | depth 1: k | depth 2: k | …      k beams a step, written anew every round
    bits                0 … k-1      k … 2k-1            of the mask
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack, Packed, entry_slots


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A head's weights; Vd is the size of its vocabulary."""

    embedding: Tensor  # [V, H] the target's
    embed_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    stack: LayerStack  # one layer or several, and the norm before lm_head
    lm_head: Packed  # [Vd, H], or a VocabularySlice
    target_ids: Tensor  # [Vd]
    norm_output: bool  # the next step reads the output as lm_head does
    rotary: tuple[Tensor, Tensor]  # cos, sin [S, d]
    norm_before_residual: bool = False  # the first layer adds to the normed hidden
    sliding_window: int = 0  # entries that a query sees, its own included; 0: all


class Candidates(NamedTuple):
    """All that a draft proposes, C candidates a row, parents before children.

    Where candidates of a depth have a number of beams k of their own, the first k have depth 1, and
    after them every depth has k · k, k for each of its beams, best first.
    """

    tokens: Tensor  # [B, C] target token ids
    parents: Tensor  # [B, C] the candidate that each continues, -1 for the root
    scores: Tensor  # [B, C] cumulative log-probabilities, float32; never above the parent's
    depths: Tensor  # [C] from 1 on


class DraftNoise(NamedTuple):
    """What the target's draws after the roots will add to its logits, for B rows: a draft that adds
    it too proposes what the target is about to draw (docs/decoder.md, "Losslessness")."""

    weights: Tensor  # [B] float32 by which the noise is multiplied; 0 is greedy
    seeds: Tensor  # [B]
    positions: Tensor  # [B] where drafted tokens of depth 1 will stand

    def deeper(self, depth: int) -> DraftNoise:
        """Of tokens so much deeper."""
        return self._replace(positions=self.positions + depth) if depth else self

    def by_depth(self, depths: int) -> DraftNoise:
        """Of each of the first `depths` depths of every row: [B · depths]."""
        weights, seeds = (each.repeat_interleave(depths) for each in self[:2])
        positions = self.positions[:, None] + torch.arange(depths, device=seeds.device)
        return DraftNoise(weights, seeds, positions.flatten())


class DraftedRows(NamedTuple):
    """Where the beams of B rows stand: after `seq_lens` entries of `block_table`."""

    rotary: tuple[Tensor, Tensor]  # cos, sin [S, d]
    block_table: Tensor  # [B, P]
    seq_lens: Tensor  # [B] entries that all beams see
    positions: Tensor  # [B] of the drafted tokens of depth 1
    sliding_window: int = 0  # entries that a beam sees, its own included; 0: all
    noise: DraftNoise | None = None  # None: all rows are greedy


class ProposalHead(NamedTuple):
    """What turns normed outputs into proposed tokens."""

    lm_head: Packed  # [Vd, H], or a VocabularySlice
    target_ids: Tensor | None  # [Vd]; None: rows of lm_head are target ids


#: Tokens [B · k], hidden [B · k, H], metadata → what lm_head reads, and the next step's hidden.
BeamStep = Callable[[Tensor, Tensor, AttentionMetadata], tuple[Tensor, Tensor]]


def join_marginals(scores: Tensor, tokens: Tensor) -> Candidates:
    """What the marginals of D depths propose: a branch is as likely as the product of its tokens.

    scores, tokens [B, D, k] are the best k of each depth, best first. Beams are the k likeliest
    branches of their depth, and all of one depth are continued by the same k tokens:

        depth 1   a -0.1   b -2.5        depth 2   a c -0.4   a d -1.6   b c -2.8   b d -4.0
        depth 2   c -0.3   d -1.5

    So the best of the candidates are the best branches of all, as DDTree (arXiv:2604.12989) takes
    them from a heap, as long as no depth has more than k tokens, or continued branches, among them.
    """
    steps, k = scores.shape[1:]
    score, chosen = scores[:, 0], list[Tensor]()  # of the beams [B, k]
    cumulative, every = [score], [tokens[:, 0]]
    for depth in range(1, steps):
        if depth > 1:
            best = torch.sort(cumulative[-1], dim=-1, descending=True, stable=True).indices[:, :k]
            chosen.append(best)
            score = cumulative[-1].gather(1, best)
        cumulative.append((score[:, :, None] + scores[:, depth, None]).flatten(1))  # [B, k · k]
        every.append(tokens[:, depth, None].expand(-1, k, -1).flatten(1))
    parents, depths = candidate_parents(chosen, every, k), beam_depths(steps, k, scores.device)
    return Candidates(torch.cat(every, 1), parents, torch.cat(cumulative, 1), depths)


@cache
def beam_depths(steps: int, k: int, device: torch.device) -> Tensor:
    """Depths [C] of the candidates of `steps` steps of k beams."""
    deeper = torch.arange(2, steps + 1, device=device).repeat_interleave(k * k)
    return torch.cat((torch.ones(k, dtype=torch.int64, device=device), deeper))


def beam_metadata(
    drafted_rows: DraftedRows, steps: int, k: int
) -> tuple[list[AttentionMetadata], Tensor]:
    """Metadata, but for the masks, of draft steps of k beams; bits [steps, B, k] of entries."""
    rotary, block_table, seq_lens, first, sliding, _ = drafted_rows
    rows = len(seq_lens)
    drafted, depths, bits, starts = _beam_constants(rows, steps, k, seq_lens.device)
    if steps == 0:
        return [], bits
    slot_mapping = entry_slots(block_table, seq_lens[:, None] + drafted)  # [B, W]
    # Contiguous: kernels read by address, and where a dimension is 1 the result would be a view:
    # strided for one beam, with stride 0 for one row.
    slot_mapping = slot_mapping.view(rows, steps, k).transpose(0, 1).flatten(1).contiguous()
    positions = (first[:, None] + depths).expand(-1, -1, k).flatten(1).contiguous()
    first_seen = None
    if sliding:  # counted in entries, of which `seq_lens` is the first drafted one
        entries = (seq_lens[:, None] + depths).expand(-1, -1, k).flatten(1)
        first_seen = (entries + (1 - sliding)).clamp(min=0).contiguous()  # [steps, B · k]
    metadata = [
        AttentionMetadata(
            rotary=rotary,
            positions=positions[step],
            slot_mapping=slot_mapping[step],
            block_table=block_table,
            seq_lens=seq_lens,
            cu_seqlens_q=starts,
            max_query_len=k,
            mask=None,
            first_seen=None if first_seen is None else first_seen[step],
        )
        for step in range(steps)
    ]
    return metadata, bits


@cache
def _beam_constants(
    rows: int, steps: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `steps` draft steps of k beams a row: drafted entries [W], step by step; depths [steps, 1,
    1]; bits of the entries [steps, B, k], one step of zeros for none; where rows start [B + 1]."""
    drafted = torch.arange(steps * k, device=device)
    depths = torch.arange(steps, device=device)[:, None, None]
    bits = (1 << drafted).view(steps, 1, k).expand(-1, rows, -1).contiguous()
    if steps == 0:
        bits = torch.zeros(1, rows, k, dtype=torch.int64, device=device)
    return drafted, depths, bits, torch.arange(0, rows * k + 1, k, device=device)


def candidate_parents(best: list[Tensor], tokens: list[Tensor], k: int) -> Tensor:
    """The candidate [B, C] that each of `tokens` continues, -1 for the root.

    The first k continue the root, the next k · k those k, and then k · k each the best [B, k] of
    the k · k before them.
    """
    root, first, starts = _parent_constants(len(tokens[0]), len(best), k, tokens[0].device)
    if len(tokens) == 1:
        return root
    above = torch.stack([first, *best], 1) + starts  # [B, steps, k]
    return torch.cat((root, above[..., None].expand(-1, -1, -1, k).flatten(1)), 1)


@cache
def _parent_constants(
    rows: int, selections: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Parents of the first k candidates [B, k]; the first beams [B, k]; and where the list of all
    candidates has those that each step's beams were chosen from [steps, 1]."""
    root = torch.full((rows, k), -1, device=device)
    first = torch.arange(k, device=device).expand(rows, -1)
    starts = torch.arange(k - k * k, k + k * k * selections, k * k, device=device)
    return root, first, starts.clamp(min=0)[:, None]
