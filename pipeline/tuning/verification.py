"""What a decoder's text is checked against, and acceptance that is imposed instead.

Teacher forcing: the plain model's log-probabilities of a reply, its near-ties, and how far a draw
is from the one that its seed gives. Imposed acceptance measures the speed of a head that does not
exist yet: every round accepts as many drafted tokens as a fixed pattern says, whatever the target
thinks of them. The work is a real decoder's, the text is not the target's; an engine that gets it
as its `verify` marks every completion as simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor

import torch
from torch import Tensor

from pipeline.decoder.batch import DecodeBatch, TokenRows
from pipeline.decoder.kv import PageAllocator, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.draws import perturb
from pipeline.decoder.ops.tree import SamplingTensors, Tree, VerifyOutput
from pipeline.decoder.request import Request


@torch.inference_mode()
def log_probabilities(
    model: DecoderModel, prompt_ids: Sequence[int], reply_ids: Sequence[int]
) -> Tensor:
    """The target's float32 log-probabilities [reply, V] before each reply token; one forward."""
    tokens = torch.tensor([*prompt_ids, *reply_ids[:-1]], device=model.device)  # [T]
    allocator = PageAllocator(pages_for(len(tokens)) + 1, device=model.device)
    (plane,) = allocator.planes((model.plane_shape,))
    batch = DecodeBatch.empty(1, pages=allocator.capacity, emitted=0, device=model.device)
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
    gap = scores.max(-1).values - chosen
    return Gaps(len(reply_ids), int((gap > 0).sum()), float(gap.max()))


def runners_up(
    model: DecoderModel, prompt_ids: Sequence[int], reply_ids: Sequence[int]
) -> tuple[list[int], list[float]]:
    """For each token of a greedy reply the likeliest other one, and how far below it lies, in nats.

    Another arithmetic may choose the other one where the two are all but equally likely.
    """
    scores = log_probabilities(model, prompt_ids, reply_ids)
    chosen = torch.tensor(reply_ids, device=scores.device)[:, None]
    others, ids = scores.scatter(1, chosen, -torch.inf).max(-1)
    return ids.tolist(), (scores.gather(1, chosen)[:, 0] - others).tolist()


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


#: Rounds after which a pattern repeats: τ is met to a twentieth.
_ROUNDS = 20


def pattern_of(tau: float) -> tuple[int, ...]:
    """Drafted tokens that rounds accept in turn, so that they emit `tau` >= 1 on average; as even
    as whole numbers can be."""
    ends = [floor(round(_ROUNDS * (tau - 1)) * turn / _ROUNDS) for turn in range(_ROUNDS + 1)]
    return tuple(later - earlier for earlier, later in pairwise(ends))


class ImposedAcceptance:
    """Verification of one engine: round r accepts pattern[r mod len] drafted tokens a row."""

    def __init__(self, pattern: Sequence[int], device: torch.device) -> None:
        self._pattern = torch.tensor(pattern, device=device)
        # Counted on the device, so that a captured round counts too.
        self._round = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        """Walk towards the deepest node; same form as a real acceptance. A tree that is not so deep
        gives what it has."""
        imposed = self._pattern[self._round % len(self._pattern)]  # [1]
        self._round.add_(1)
        rows, count = tree.tokens.shape
        index = torch.arange(count, device=predicted.device)
        deepest = tree.tree_mask.gather(1, tree.depth.argmax(1, keepdim=True))  # [B, 1] bits
        towards = (deepest >> index & 1).bool() & (index > 0)  # [B, N]
        node = torch.zeros(rows, dtype=torch.int64, device=predicted.device)
        path, counts = [node], torch.ones_like(node)
        for step in range(depth):
            child = (tree.parents == node[:, None]) & towards  # [B, N]
            accepted = child.any(1) & (step < imposed)
            node = torch.where(accepted, child.int().argmax(1), node)
            counts = counts + accepted
            path.append(node)
        walked = torch.stack(path, dim=1)  # [B, D + 1]
        emitted = tree.tokens.gather(1, torch.cat((walked[:, 1:], walked[:, -1:]), dim=1))
        bonus = predicted.gather(1, walked[:, -1:]).clamp(min=0)  # [B, 1]
        last = torch.arange(depth + 1, device=predicted.device) >= counts[:, None] - 1
        return VerifyOutput(walked, counts, torch.where(last, bonus, emitted))
