"""The target drafts for itself over a compressed cache (MagicDec, arXiv:2408.11049).

Behind a long context a forward is bound by reading keys and values; one that reads `budget` of them
costs a fraction, and says nearly the same. Verification reads all.

    streaming   the first page and recent whole pages of the target's own cache (`window.py`): no
                memory, and nothing to do when tokens are accepted
    snapkv      recent entries, and those that the end of the prompt attends to, by layer and head,
                on pages of the drafter's own (`snapkv.py`)

A draft reads the root first, then its beams; what it writes to the target's cache stands behind the
committed entries, where verification overwrites it.

Self-speculation over the entries that matter (SnapKV, arXiv:2404.14469).

Of a prompt, each layer and key/value head keeps the entries that the last `window` tokens attend to
most. Where a row's entries lie on the drafter's pages follows from its length L alone, with R
recent ones and E selected ones:

    slot      0 … R-1                        R … R+E-1                    R+E …
              entry e at e mod R:            of a prompt longer than      the draft: root and
              the last R entries             R+E the selected ones; else  beams, behind whatever
                                             entry i at R+i, once it      is visible
                                             leaves the ring

    visible   min(L, R+E): up to there nothing is left out, and no slot has to be counted

Keys are copied as they are stored, rotated, so they keep the positions of the full cache.

Shapes: B rows, W observing tokens a row, S entries, E selected, Q query and G key/value heads, d
head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState, TokenRows
from pipeline.decoder.drafter import ReadTokens, TreeDrafter, Trees
from pipeline.decoder.kv import Planes, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.layer import PAGE, AttentionMetadata, entry_slots
from pipeline.drafters.whole_model import draft_from_roots, forward_roots
from pipeline.errors import ConfigError
from pipeline.learning.window import seen_pages

#: As `DRAFT_NOISE`: the target hardly errs about itself.
OWN_NOISE = 1.0


def _refuse_windows(model: DecoderModel) -> None:
    """Raise ConfigError for a target with sliding windows: an entry of what a draft keeps does not
    stand at its position, and so no window can be counted off."""
    if model.sliding_window:
        problem = f"the target's own layers see {model.sliding_window} positions"
        fix = "choose another drafter: a window of its own would be kept beside theirs"
        raise ConfigError(problem, where="drafter", fix=fix)


class StreamingDrafter(TreeDrafter):
    """Sinks and recent pages of the target's own cache."""

    def __init__(self, model: DecoderModel, trees: Trees, *, budget: int) -> None:
        """Drafts attend to `budget` entries, up to whole pages; one page of them are sinks."""
        super().__init__(trees, model.vocabulary)
        _refuse_windows(model)
        self._model, self._window = model, budget - PAGE
        self.lookahead = 1 + self.shapes.beam_entries

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        """Nothing: the target's cache is its own."""

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        """Nothing: the target's cache is its own."""

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        table, seen = seen_pages(
            batch.block_table, batch.seq_lens, self._window, 1 + self.shapes.beam_entries
        )
        model, plane, lengths = self._model, planes.target, batch.seq_lens
        final = forward_roots(model, plane, batch.roots, table, seen, lengths)
        place = table, seen + 1, lengths + 1
        beams = self.shapes.beams(shape)
        noise = batch.noise(OWN_NOISE)
        return draft_from_roots(model, plane, final, *place, shape.steps, beams, noise)


class SnapKvDrafter(TreeDrafter):
    """The target over what the end of the prompt attends to, and what is recent."""

    def __init__(
        self, model: DecoderModel, trees: Trees, *, budget: int, recent: int, window: int, pool: int
    ) -> None:
        """Drafts attend to `budget` entries, of which `recent` R are the latest; `window` W tokens
        observe, their attention is pooled over `pool` neighbours."""
        super().__init__(trees, model.vocabulary)
        _refuse_windows(model)
        self._model, self._recent, self._selected = model, recent, budget - recent
        self._window, self._pool = window, pool
        self.lookahead = 1  # drafts are written to the drafter's pages
        self.state = RowState(window + 1, torch.int64)  # the last tokens, by entry mod W; a dump
        self.drafter_kv = (model.plane_shape,)
        drafted = max(1 + self.shapes.beam_entries, window)
        self.drafter_pages = pages_for(budget + drafted)

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        model, plane, lengths = self._model, planes.drafter_kv[0], batch.seq_lens
        seen = lengths.clamp(max=self._recent + self._selected)
        table, beams = batch.drafter_block_table, self.shapes.beams(shape)
        final = forward_roots(model, plane, batch.roots, table, seen, lengths)
        place = table, seen + 1, lengths + 1
        noise = batch.noise(OWN_NOISE)
        return draft_from_roots(model, plane, final, *place, shape.steps, beams, noise)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        rows = read.rows
        left = read.counts[rows.row] - rows.within  # [T] valid tokens from here on; 0: padding
        entries = batch.seq_lens[rows.row] + rows.within  # [T]
        source = _slots(batch.block_table, rows.row, entries)
        # Of more than R tokens the last ones: no two go to one slot.
        newest = (left > 0) & (left <= self._recent)
        ring = _slots(batch.drafter_block_table, rows.row, entries % self._recent)
        _copy(planes, source, ring.where(newest, 0))
        # While all is kept, what leaves the ring stays: entry e-R at slot e, not a slot sooner,
        # for a draft stands behind the visible ones.
        whole = self._recent + self._selected
        leaves = (left > 0) & (entries >= self._recent) & (entries < whole)
        leaving = _slots(batch.block_table, rows.row, (entries - self._recent).clamp(min=0))
        slots = _slots(batch.drafter_block_table, rows.row, entries.clamp(max=whole - 1))
        _copy(planes, leaving, slots.where(leaves, 0))

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        self._take_chunk(batch, planes, read.counts)
        self._remember(batch, read)
        if ended:
            lengths = batch.seq_lens[:ended] + read.counts[:ended]
            cpu = lengths.device.type == "cpu"
            if cpu and not bool((lengths > self._recent + self._selected).any()):
                return  # everything is kept
            self._select(batch.rows(0, ended), planes, lengths)

    def _take_chunk(self, batch: DecodeBatch, planes: Planes, counts: Tensor) -> None:
        """As `extend`, slot by slot and not token by token: a chunk has more tokens than slots."""
        begin, end = batch.seq_lens[:, None], (batch.seq_lens + counts)[:, None]  # [B, 1]
        device = begin.device
        row = torch.arange(len(batch), device=device)[:, None]
        newest = end - 1 - torch.arange(self._recent, device=device)  # [B, R]
        _copy_entries(batch, planes, row, newest, newest % self._recent, newest >= begin)
        place = self._recent + torch.arange(self._selected, device=device)  # [E]
        place = place.expand(len(batch), -1)
        inside = (place >= begin) & (place < end)  # the entry of this number pushes another out
        _copy_entries(batch, planes, row, place - self._recent, place, inside)

    def _remember(self, batch: DecodeBatch, read: ReadTokens) -> None:
        """Keep the last W tokens of each row, entry e at e mod W."""
        rows, window = read.rows, self._window
        left = read.counts[rows.row] - rows.within
        entries = batch.seq_lens[rows.row] + rows.within
        valid = (left > 0) & (left <= window)
        place = torch.where(valid, entries % window, window)
        batch.drafter_state.index_put_((rows.row, place), read.tokens)

    def _select(self, batch: DecodeBatch, planes: Planes, lengths: Tensor) -> None:
        """Run the last W tokens of prompts of `lengths` [B] again, for what they attend to.

        Their keys and values go behind the visible slots, not into the target's cache: that has
        them already, to the last bit.
        """
        model, ops, window = self._model, self._model.ops, self._window
        count, device = len(lengths), lengths.device
        first = (lengths - window).clamp(min=0)  # [B] entry of the first observing token
        entries = first[:, None] + torch.arange(window, device=device)  # [B, W]
        tokens = batch.drafter_state.gather(1, entries % window).flatten()
        scratch = self._recent + self._selected + torch.arange(window, device=device)
        whole = AttentionMetadata(
            rotary=model.rotary,
            positions=entries.flatten(),
            slot_mapping=entry_slots(
                batch.drafter_block_table, scratch.expand(count, -1)
            ).flatten(),
            block_table=batch.block_table,
            seq_lens=first,
            cu_seqlens_q=TokenRows.even(count, window, device).cu_seqlens_q,
            max_query_len=window,
            mask=None,
        )
        metadata, hidden = model.with_local(whole), model.embed(tokens)  # [B · W, H]
        stack, eps = model.stack, model.stack.eps
        normed, hidden = ops.add_rms_norm(hidden, None, model.input_norm, eps)
        for index, (layer, norm) in enumerate(zip(stack.layers, stack.norms, strict=True)):
            (drafter_keys, drafter_values), (keys, values) = (
                planes.drafter_kv[0][index],
                planes.target[index],
            )
            own, qkv = metadata.of(layer), ops.linear(normed, layer.qkv, layer.qkv_bias)
            query = ops.rope_write(qkv, layer.head_norms, eps, own, drafter_keys, drafter_values)
            self._keep_best(batch, planes, index, query, lengths)
            mixed = ops.tree_attention(query, keys, values, own).flatten(1)
            update = ops.linear(mixed, layer.output, layer.output_bias)
            normed, hidden = ops.finish_layer(layer, norm, eps, hidden, update)

    def _keep_best(
        self, batch: DecodeBatch, planes: Planes, layer: int, query: Tensor, lengths: Tensor
    ) -> None:
        """Copy what `query` [B · W, Q, d] attends to most, row by row, to the selected slots."""
        selected, whole = self._selected, self._recent + self._selected
        selected_slots = self._recent + torch.arange(selected, device=query.device)  # [E]
        queries = query.view(len(lengths), self._window, *query.shape[1:])
        for row, observed in enumerate(queries):
            table, drafter_block_table = batch.block_table[row], batch.drafter_block_table[row]
            keys = planes.target[layer, 0][table].transpose(0, 1).flatten(1, 2)  # [G, S, d]
            weight = observed_attention(observed, keys, lengths[row])  # [G, S]
            weight = F.max_pool1d(weight, self._pool, stride=1, padding=self._pool // 2)
            entry = torch.arange(weight.shape[1], device=weight.device)
            weight = weight.masked_fill(entry >= lengths[row] - self._recent, -1.0)
            best = weight.topk(min(selected, len(entry)), dim=-1).indices.sort(-1).values  # [G, E]
            # A short prompt is all there, entry i at R+i.
            best = torch.where(lengths[row] > whole, best, entry[: best.shape[1]])
            slots = selected_slots[: best.shape[1]]
            group = torch.arange(len(best), device=best.device)[:, None]
            entries = planes.target[layer][
                :, table[best // PAGE], group, best % PAGE
            ]  # [2, G, E, d]
            planes.drafter_kv[0][layer][
                :, drafter_block_table[slots // PAGE], group, slots % PAGE
            ] = entries


def observed_attention(query: Tensor, keys: Tensor, length: Tensor) -> Tensor:
    """How much the last W of `length` entries attend to each: query [W, Q, d], keys [G, S, d] →
    float32 [G, S], summed over the queries and over the query heads of a group."""
    window, heads, size = query.shape
    groups, entries = keys.shape[:2]
    grouped = query.float().view(window, groups, -1, size).permute(1, 2, 0, 3)  # [G, r, W, d]
    scores = (grouped.flatten(1, 2) @ keys.float().mT) * size**-0.5  # [G, r · W, S]
    scores = scores.view(groups, heads // groups, window, entries)
    entry = torch.arange(entries, device=keys.device)
    position = (length - window).clamp(min=0) + torch.arange(window, device=keys.device)
    unseen = (entry > position[:, None]) | (entry >= length)  # [W, S]
    weight = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.as_tensor(weight.sum((1, 2)))


def _slots(table: Tensor, row: Tensor, entries: Tensor) -> Tensor:
    """Slots [T] of entries [T] of rows [T]; those beyond the table are any, and must not matter."""
    page = (entries // PAGE).clamp(max=table.shape[1] - 1)
    return table[row, page] * PAGE + entries % PAGE


def _copy_entries(
    batch: DecodeBatch, planes: Planes, row: Tensor, entries: Tensor, targets: Tensor, where: Tensor
) -> None:
    """Copy entries [B, n] of the pool to `targets` [B, n] of the drafter's pages, if `where`."""
    row = row.expand_as(entries)
    source = _slots(batch.block_table, row, entries.clamp(min=0)).flatten()
    target = _slots(batch.drafter_block_table, row, targets.clamp(min=0)).where(where, 0).flatten()
    _copy(planes, source, target)


def _copy(planes: Planes, source: Tensor, target: Tensor) -> None:
    """Keys and values of slots `source` [T] of the pool to slots `target` [T] of the drafter's.

    Slot 0 belongs to nobody: several may go there.
    """
    moved = planes.target[:, :, source // PAGE, :, source % PAGE]  # [T, layers, 2, G, d]
    planes.drafter_kv[0][:, :, target // PAGE, :, target % PAGE] = moved
