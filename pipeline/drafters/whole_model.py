"""What drafters that run a whole model share: one token of each row, and beams behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.batch import TokenRows
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draft import BeamStep, Candidates, DraftedRows, DraftNoise, ProposalHead
from pipeline.decoder.ops.layer import AttentionMetadata, entry_slots


def forward_roots(
    model: DecoderModel,
    plane: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
) -> Tensor:
    """Run a token [B] of each row as the entry behind `seq_lens` [B], at positions [B] → final
    states [B, H]."""
    rows = TokenRows.even(len(tokens), 1, tokens.device)
    metadata = AttentionMetadata(
        rotary=model.rotary,
        positions=positions,
        slot_mapping=entry_slots(block_table, seq_lens[:, None])[:, 0],
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=rows.cu_seqlens_q,
        max_query_len=1,
        mask=None,
    )
    return model.forward(tokens, metadata, plane).final


def draft_from_roots(
    model: DecoderModel,
    plane: Tensor,
    final: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    steps: int,
    beams: int,
    noise: DraftNoise | None,
) -> Candidates:
    """Beams behind the roots, which are entries below `seq_lens` [B] already; `final` [B, H] are
    their final states, positions [B] those of the first drafted tokens."""
    place = DraftedRows(model.rotary, block_table, seq_lens, positions, noise=noise)
    head = ProposalHead(model.lm_head, None)
    step = _step(model, plane)
    return model.ops.search_beams(step, head, final, final, place, steps, beams)


def _step(model: DecoderModel, plane: Tensor) -> BeamStep:
    def run(tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        del hidden  # a token's embedding is all that a model reads
        final = model.forward(tokens, metadata, plane).final
        return final, final

    return run


def within_vocabulary(tokens: Tensor, model: DecoderModel) -> Tensor:
    """Token ids that index the model's embedding: marks of NaN and ids that pad another model's
    vocabulary do not."""
    return torch.clamp(tokens, 0, model.vocabulary - 1)
