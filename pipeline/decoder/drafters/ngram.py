"""Drafting by looking up what came before: prompt lookup, or suffix matching; no head, no training.

Where the text repeats itself — code that is edited, a document that is quoted, a loop — what
followed its last tokens the last time follows them again (prompt lookup decoding, Saxena 2023;
arXiv:2304.04487; SuffixDecoding, arXiv:2411.04975):

    history    … a b c d e … x b c f … a b c        root: the last c, at L
    matches          └─ of 3       └─ of 2          proposed: d e … before f …

Matching runs on the device, in operations of static shape: history lies in the row's state, and so
the whole round stays one graph that waits for no host. A host that kept suffix trees would be a
round behind, or the round would wait for it. The price is S · max_match comparisons a row, far less
than one layer's weights; on a CPU, where nothing is captured, only the tokens that equal the root
are looked at.

A match whose continuation reaches the root goes on periodically: behind "a b a b" stand "a b a b …"
as deep as the draft goes. So every match proposes a whole chain, and `tree_of_chains` merges them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config import NgramSection, TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState
from pipeline.decoder.drafters.base import ReadTokens, TreeDrafter, Trees
from pipeline.decoder.drafters.chains import no_chains, tree_of_chains
from pipeline.decoder.drafters.corpus import CorpusIndex
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.tree import HEADROOM


class NgramDrafter(TreeDrafter):
    """Proposes what followed earlier occurrences of the last tokens.

    Row b's state is its tokens 0 … L, the root being the last; whatever stands behind is never
    looked at.
    """

    def __init__(
        self,
        model: DecoderModel,
        trees: Trees,
        section: NgramSection,
        corpus: CorpusIndex | None = None,
    ) -> None:
        """`corpus` is looked up beside the request's own tokens; it must match `max_match`."""
        super().__init__(trees, model.vocabulary)
        self._section, self._corpus = section, corpus
        proposed = [
            min(each.nodes, 1 + section.matches * each.steps) for each in self.shapes.drafted
        ]
        self.nodes = max(proposed, default=1)
        self.lookahead = 1  # drafting writes no entry
        self.state = RowState(model.max_length + HEADROOM, torch.int64)
        #: Whether values may be looked at: on a CPU rounds are never captured.
        self.looks = model.device.type == "cpu"

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        del ended
        self.extend(batch, planes, read)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        del planes
        history, rows, last = batch.drafter_state, read.rows, batch.drafter_state.shape[1] - 1
        place = batch.seq_lens[rows.row] + rows.within
        # Padding is written, too; what follows the last valid token goes over it.
        history[rows.row, place.clamp(max=last)] = read.tokens
        behind = (batch.seq_lens + read.counts).clamp(max=last)
        next_tokens = read.next_tokens[rows.cu_seqlens_q[:-1] + read.counts - 1].clamp(min=0)
        history.scatter_(1, behind[:, None], next_tokens[:, None])

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        del planes
        history, seq_lens = batch.drafter_state, batch.seq_lens
        max_match, most = self._section.max_match, self._section.matches
        if self.looks:
            history = history[:, : max(int(seq_lens.max()) + 1, most)]
        match = match_lengths_on_host if self.looks else match_lengths
        lengths = match(history, seq_lens, max_match)  # [B, S]
        lengths, ends = longest_matches(lengths, self._section.min_match, most)
        chains = continuations(history, seq_lens, ends, shape.steps)  # [B, W, D]
        if self._corpus is not None:
            context = last_tokens(history, seq_lens, max_match)
            of_corpus = self._corpus.lookup(context, self._section.min_match, most, shape.steps)
            lengths, order = torch.cat((lengths, of_corpus[0]), 1).sort(
                dim=-1, descending=True, stable=True
            )
            lengths, order = lengths[:, :most], order[:, :most]
            chains = torch.cat((chains, of_corpus[1]), 1)
            chains = chains.gather(1, order[..., None].expand(-1, -1, shape.steps))
        if self.looks and not bool(lengths.any()):
            return no_chains(*chains.shape)
        return tree_of_chains(chains, lengths, self.shapes.beams(shape))


def last_tokens(history: Tensor, seq_lens: Tensor, count: int) -> Tensor:
    """The root, and what stands before it, the last token first: [B, count], -1 for none."""
    place = seq_lens[:, None] - torch.arange(count, device=history.device)
    return torch.where(place >= 0, history.gather(1, place.clamp(min=0)), -1)


def match_lengths(history: Tensor, seq_lens: Tensor, max_match: int) -> Tensor:
    """Of every position p of history [B, S]: with how many tokens up to p the row's last ones
    agree, at most `max_match`; [B, S], 0 from the root on."""
    rows, size = history.shape
    suffix = last_tokens(history, seq_lens, max_match)[:, None]  # [B, 1, m]
    before = history.new_full((rows, max_match - 1), -2)  # equals no token
    windows = torch.cat((before, history), 1).unfold(1, max_match, 1).flip(-1)  # [B, S, m]
    back = torch.arange(max_match, device=history.device)
    lengths = torch.where(windows == suffix, max_match, back).amin(-1)  # the first that differs
    earlier = torch.arange(size, device=history.device) < seq_lens[:, None]
    return torch.where(earlier, lengths, 0)


def match_lengths_on_host(history: Tensor, seq_lens: Tensor, max_match: int) -> Tensor:
    """As `match_lengths`, for a host: only where the root's own token stands is more compared."""
    suffix = last_tokens(history, seq_lens, max_match)  # [B, m]
    same = history == suffix[:, :1]
    same &= torch.arange(history.shape[1]) < seq_lens[:, None]
    row, place = same.nonzero().unbind(1)  # [n]
    back = torch.arange(max_match)
    before = place[:, None] - back  # [n, m]
    agrees = (history[row[:, None], before.clamp(min=0)] == suffix[row]) & (before >= 0)
    lengths = torch.zeros_like(history)
    lengths[row, place] = torch.where(agrees, max_match, back).amin(-1)
    return lengths


def longest_matches(lengths: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Of match lengths [B, S] the `most` longest, of equals the latest: lengths, 0 where there is
    none of at least `least`, and the positions they end at, each [B, most]."""
    size = lengths.shape[1]
    # Length and position in one number: no two are equal, so every device picks the same.
    key = lengths * size + torch.arange(size, device=lengths.device)
    best = key.topk(most, dim=1).values
    length = best // size
    return torch.where(length >= least, length, 0), best % size


def continuations(history: Tensor, seq_lens: Tensor, ends: Tensor, steps: int) -> Tensor:
    """What follows the tokens at `ends` [B, W], `steps` tokens each, periodic from the root on:
    [B, W, steps]; anything where `ends` lie not before the root."""
    period = (seq_lens[:, None] - ends).clamp(min=1)[..., None]  # [B, W, 1]
    ahead = torch.arange(steps, device=history.device) % period
    place = (ends[..., None] + 1 + ahead).clamp(max=history.shape[1] - 1)
    return history.gather(1, place.flatten(1)).view_as(place)
