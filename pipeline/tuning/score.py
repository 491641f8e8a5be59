"""What the plain model thinks of a text: teacher forcing, for checking what a decoder wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.decoder.kv import PageAllocator, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import cumulative
from pipeline.decoder.ops.philox import uniform
from pipeline.decoder.request import Request
from pipeline.decoder.tree import SamplingTensors


@torch.inference_mode()
def log_probabilities(
    model: DecoderModel, prompt_ids: Sequence[int], reply_ids: Sequence[int]
) -> Tensor:
    """The target's float32 log-probabilities [reply, V] before each reply token; one forward."""
    device = model.device
    allocator = PageAllocator(pages_for(len(prompt_ids) + len(reply_ids)) + 1, device=device)
    block_table = torch.arange(1, allocator.pages, device=device)[None]  # [1, P]
    seq_lens = torch.zeros(1, dtype=torch.int64, device=device)
    tokens = torch.tensor([[*prompt_ids, *reply_ids[:-1]]], device=device)  # [1, T]
    positions = torch.arange(tokens.shape[1], device=device)[None]
    plane = model.plane(allocator)
    output = model.forward(tokens, positions, block_table, seq_lens, None, plane)
    return model.logits(output.final[0, len(prompt_ids) - 1 :]).float().log_softmax(-1)


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
    """How far a sampled reply is from what the plain model draws, in probability; 0 is exact.

    A draw takes the token in whose stretch of the cumulative distribution the random number falls:

        0 ──── token 0 ────┬─ 1 ─┬────── 2 ──────┬ … 1     u at the very edge of a stretch may
                                 u                         fall on either side of it by rounding
    """
    count, device = len(reply_ids), model.device
    sampling = SamplingTensors(
        torch.full((count,), request.temperature, device=device),
        torch.full((count,), request.top_p, device=device),
        torch.full((count,), request.top_k, device=device),
        torch.full((count,), request.seed, device=device),
    )
    total = cumulative(log_probabilities(model, request.prompt_ids, reply_ids), sampling)  # [R, V]
    positions = len(request.prompt_ids) + torch.arange(count, device=device)
    wanted = uniform(sampling.seeds, positions).double() * total[:, -1]
    chosen = torch.tensor(reply_ids, device=device)[:, None]  # [R, 1]
    above = total.gather(1, chosen)[:, 0]
    below = F.pad(total, (1, 0)).gather(1, chosen)[:, 0]
    return float(torch.maximum(below - wanted, wanted - above).clamp(min=0).max())
