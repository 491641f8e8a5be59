"""A draft of an EAGLE-3 head, step by step: the definition of `ops.unroll`.

Draft step s = 1…steps-1 reads one token of depth s with the output that proposed it, at position
L-1+s; it sees all L committed entries, then its own ancestors among the drafted ones:

    entries   0 … L-1 | depth 1: k | depth 2: k | …      k beams a step, written anew every round
    bits                0 … k-1      k … 2k-1            of the mask
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack, Packed, entry_slots

if TYPE_CHECKING:
    from pipeline.decoder.ops.base import TorchOps


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A head's weights; Vd is the size of its vocabulary."""

    embedding: Tensor  # [V, H] the target's
    embed_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    stack: LayerStack  # one layer, and the norm before lm_head
    lm_head: Packed  # [Vd, H]
    target_ids: Tensor  # [Vd]
    norm_output: bool  # the next step reads the output as lm_head does
    rotary: tuple[Tensor, Tensor]  # cos, sin [S, d]


class Candidates(NamedTuple):
    """All that a draft of k beams proposes, C = k + (steps - 1) · k · k a row.

    The first k have depth 1; after them every depth has k · k, k for each of its beams, best first.
    """

    tokens: Tensor  # [B, C] target token ids
    parents: Tensor  # [B, C] the candidate that each continues, -1 for the root
    scores: Tensor  # [B, C] cumulative log-probabilities, float32


def draft_step(
    ops: TorchOps,
    head: DraftHead,
    tokens: Tensor,
    hidden: Tensor,
    metadata: AttentionMetadata,
    plane: Tensor,
) -> tuple[Tensor, Tensor]:
    """A pass of the head's layer over tokens [T], hidden [T, H]: what `lm_head` reads [T, H], and
    the next step's hidden [T, H]."""
    norms = head.embed_norm, head.hidden_norm, head.stack.eps
    joined = ops.embed_concat(tokens, head.embedding, hidden, *norms)  # [T, 2H]
    normed, output, _ = ops.layers(head.stack, metadata, hidden, joined, plane)
    return normed, normed if head.norm_output else output


def unroll(
    ops: TorchOps,
    head: DraftHead,
    state: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    plane: Tensor,
    steps: int,
    k: int,
    trace: list[Tensor] | None = None,
) -> Candidates:
    """What a draft of `steps` steps of k beams a row proposes: an operation of every backend.

    state [B, H] is the head's output at the last committed entry; positions [B] are those of the
    first drafted tokens, seq_lens where no entries are hidden. Drafted keys and values go behind
    the committed entries, to `plane` [1, 2, pages, G, PAGE, d]. `trace` is given every step's
    logits [B, beams, Vd], the root's first.
    """
    rows = len(state)

    def propose(normed: Tensor) -> tuple[Tensor, Tensor]:
        """Normed outputs [B · n, H] → log-probabilities, target ids of the best k [B, n, k]."""
        logits = ops.linear(normed, head.lm_head)  # [B · n, Vd]
        if trace is not None:
            trace.append(logits.view(rows, -1, logits.shape[-1]))
        scores, draft_ids = ops.propose(logits, k)
        return scores.view(rows, -1, k), head.target_ids[draft_ids].view(rows, -1, k)

    normed = state
    if not head.norm_output:
        normed, _ = ops.add_rms_norm(state, None, head.stack.norms[0], head.stack.eps)
    score, token = (each[:, 0] for each in propose(normed))  # [B, k] of each beam
    tokens, cumulative, kept = [token], [score], []
    places, bits = _places(head, block_table, seq_lens, positions, steps - 1, k)
    hidden, lineage = state.repeat_interleave(k, dim=0), bits[0]  # [B · k, H], [B, k]
    for step, place in enumerate(places, 1):
        metadata = replace(place, mask=lineage.flatten())
        normed, hidden = draft_step(ops, head, token.flatten(), hidden, metadata, plane)
        gained, proposed = propose(normed)  # each [B, k, k]
        tokens.append(proposed.flatten(1))
        if step == len(places):
            cumulative.append((score[:, :, None] + gained).flatten(1))
            break
        beams = ops.select_beams(score, gained, proposed, lineage, hidden, bits[step])
        cumulative.append(beams.total)
        kept.append(beams.best)
        score, token, lineage, hidden = beams.score, beams.token, beams.lineage, beams.hidden
    return Candidates(torch.cat(tokens, 1), _parents(kept, tokens, k), torch.cat(cumulative, 1))


def _places(
    head: DraftHead, block_table: Tensor, seq_lens: Tensor, first: Tensor, steps: int, k: int
) -> tuple[list[AttentionMetadata], Tensor]:
    """Metadata, but for the masks, of draft steps of k beams; bits [steps, B, k] of entries."""
    rows = len(seq_lens)
    drafted, depths, bits, starts = _beam_constants(rows, steps, k, seq_lens.device)
    if steps == 0:
        return [], bits
    slots = entry_slots(block_table, seq_lens[:, None] + drafted)  # [B, W]
    slots = slots.view(rows, steps, k).transpose(0, 1).flatten(1)  # [steps, B · k]
    positions = (first[:, None] + depths).expand(-1, -1, k).flatten(1)
    places = [
        AttentionMetadata(
            rotary=head.rotary,
            positions=positions[step],
            slots=slots[step],
            block_table=block_table,
            seq_lens=seq_lens,
            query_starts=starts,
            longest=k,
            mask=None,
        )
        for step in range(steps)
    ]
    return places, bits


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


def _parents(kept: list[Tensor], tokens: list[Tensor], k: int) -> Tensor:
    """The candidate [B, C] that each of `tokens` continues, -1 for the root.

    The first k continue the root, the next k · k those k, and then k · k each the kept [B, k] of
    the k · k before them.
    """
    root, first, starts = _parent_constants(len(tokens[0]), len(kept), k, tokens[0].device)
    if len(tokens) == 1:
        return root
    above = torch.stack([first, *kept], 1) + starts  # [B, steps, k]
    return torch.cat((root, above[..., None].expand(-1, -1, -1, k).flatten(1)), 1)


@cache
def _parent_constants(
    rows: int, kept: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Parents of the first k candidates [B, k]; the first beams [B, k]; and where the list of all
    candidates has those that each step's beams were chosen from [steps, 1]."""
    root = torch.full((rows, k), -1, device=device)
    first = torch.arange(k, device=device).expand(rows, -1)
    starts = torch.arange(k - k * k, k + k * k * kept, k * k, device=device)
    return root, first, starts.clamp(min=0)[:, None]
