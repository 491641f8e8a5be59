"""What the plain model thinks of a text: teacher forcing, for checking what a decoder wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.kv import PageAllocator, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draws import perturb
from pipeline.decoder.request import Request
from pipeline.decoder.tree import SamplingTensors


@torch.inference_mode()
def log_probabilities(
    model: DecoderModel, prompt_ids: Sequence[int], reply_ids: Sequence[int]
) -> Tensor:
    """The target's float32 log-probabilities [reply, V] before each reply token; one forward."""
    tokens = torch.tensor([*prompt_ids, *reply_ids[:-1]], device=model.device)  # [T]
    allocator = PageAllocator(pages_for(len(tokens)) + 1, device=model.device)
    (plane,) = allocator.planes((model.plane_shape,))
    batch = DecodeBatch.empty(
        1, pages=allocator.capacity, emitted=0, state=None, device=model.device
    )
    batch.block_table.copy_(torch.arange(1, allocator.pages, device=model.device))
    metadata = batch.metadata(model.ops, model.rotary, TokenRows.even(1, len(tokens), model.device))
    output = model.forward(tokens, metadata, plane)
    return model.logits(output.final[len(prompt_ids) - 1 :]).float().log_softmax(-1)


@dataclass(frozen=True)
class Gaps:
    """How far the tokens of a greedy reply lie below the best ones, in log-probability."""

    tokens: int
    near_ties: int  # tokens that are not the best one
    worst: float


def greedy_gaps(model: DecoderModel, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> Gaps:
    """Rounding lets a batch or a tree choose between near-ties; a wrong token lies far below."""
    scores = log_probabilities(model, prompt_ids, reply_ids)
    chosen = scores.gather(1, torch.tensor(reply_ids, device=scores.device)[:, None])[:, 0]
    behind = scores.max(-1).values - chosen
    return Gaps(len(reply_ids), int((behind > 0).sum()), float(behind.max()))


def draw_gap(model: DecoderModel, request: Request, reply_ids: Sequence[int]) -> float:
    """How far a sampled reply is from what the plain model draws, in nats; 0 is exact.

    A draw is the token with the largest sum of scaled log-probability and noise. By rounding, a
    near-tie may fall to either side; infinite where a token lies outside top-k or top-p.
    """
    count, device = len(reply_ids), model.device
    sampling = SamplingTensors(
        torch.full((count,), request.temperature, device=device),
        torch.full((count,), request.top_p, device=device),
        torch.full((count,), request.top_k, device=device),
        torch.full((count,), request.seed, device=device),
    )
    positions = len(request.prompt_ids) + torch.arange(count, device=device)
    scores = log_probabilities(model, request.prompt_ids, reply_ids)
    noisy = perturb(scores, sampling, positions)  # [R, V]
    chosen = noisy.gather(1, torch.tensor(reply_ids, device=device)[:, None])[:, 0]
    return float((noisy.max(-1).values - chosen).max())
