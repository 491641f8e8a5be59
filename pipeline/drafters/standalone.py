"""Drafting with a smaller model of the same tokenizer (Leviathan et al. 2023, arXiv:2211.17192).

A row with L committed tokens x0…x(L-1) and root xL has L+1 entries in the draft model's cache, the
root's among them, so that the first proposal of a round is there when the last one ends:

    entry        0    1    …   L-1      L (root)  │  L+1 …         drafted, or overwritten by what
    token        x0   x1   …   x(L-1)   xL        │                was accepted
                                        └ final state: batch.drafter_state
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch, RowState
from pipeline.decoder.drafter import ReadTokens, TreeDrafter, Trees
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import Candidates
from pipeline.drafters.whole_model import draft_from_roots, forward_roots, within_vocabulary
from pipeline.errors import ConfigError


class StandaloneDrafter(TreeDrafter):
    """A model of its own, with its plane on the pool's pages."""

    def __init__(self, draft: DecoderModel, model: DecoderModel, trees: Trees) -> None:
        """`draft` and the target share type, device and operations.

        Raises ConfigError where the draft model has more tokens, or fewer positions.
        """
        check_fits(draft, model)
        super().__init__(trees, draft.vocabulary)
        self._draft = draft
        self.lookahead = max(self.shapes.beam_entries + 1, self.depth + 2)
        self.state = RowState(draft.config.hidden_size, draft.dtype)
        self.planes = (draft.plane_shape,)

    def prefill(self, batch: DecodeBatch, planes: Planes, read: ReadTokens, ended: int) -> None:
        draft, plane = self._draft, planes.drafter[0]
        metadata = batch.metadata(draft.ops, draft.rotary, read.rows)
        draft.forward(within_vocabulary(read.tokens, draft), metadata, plane)
        if ended:
            rows, starts = batch.rows(0, ended), read.rows.cu_seqlens_q[:ended]
            ends = starts + read.counts[:ended] - 1
            roots = within_vocabulary(read.next_tokens[ends], draft)
            lengths = rows.seq_lens + read.counts[:ended]
            final = forward_roots(draft, plane, roots, rows.block_table, lengths, lengths)
            rows.drafter_state.copy_(final)

    def extend(self, batch: DecodeBatch, planes: Planes, read: ReadTokens) -> None:
        draft = self._draft
        extended = replace(batch, seq_lens=batch.seq_lens + 1)
        metadata = extended.metadata(draft.ops, draft.rotary, read.rows)
        tokens = within_vocabulary(read.next_tokens, draft)
        final = draft.forward(tokens, metadata, planes.drafter[0]).final  # [T, H]
        batch.drafter_state.copy_(final[read.rows.cu_seqlens_q[:-1] + read.counts - 1])

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        lengths = batch.seq_lens + 1
        place = batch.block_table, lengths, lengths
        state, beams = batch.drafter_state, self.shapes.beams(shape)
        plane = planes.drafter[0]
        noise = batch.noise()
        return draft_from_roots(self._draft, plane, state, *place, shape.steps, beams, noise)


def check_tokens(directory: Path, target: Path, source: str) -> None:
    """Raise ConfigError where the model in `directory` reads other tokens than the target."""
    from transformers import AutoTokenizer

    ours, theirs = (AutoTokenizer.from_pretrained(each).get_vocab() for each in (target, directory))
    different = sorted(ours.items() ^ theirs.items(), key=lambda each: each[1])
    if different:
        token, index = different[0]
        problem = f"its tokenizer is not the target's: {len(different)} entries differ"
        raise ConfigError(
            f"{problem}, first {token!r} at {index}",
            where=f"drafter.source={source}",
            fix="choose a smaller model of the target's own family",
        )


def check_fits(draft: DecoderModel, model: DecoderModel) -> None:
    """Raise ConfigError where a draft model cannot draft for the target."""
    if draft.vocabulary > model.vocabulary:
        problem = f"the draft model has {draft.vocabulary} tokens, the target {model.vocabulary}"
        fix = "choose a smaller model of the target's own family"
        raise ConfigError(problem, where="drafter.source", fix=fix)
