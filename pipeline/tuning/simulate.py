"""Imposed acceptance, for measuring speed with a head that does not exist yet.

Every round accepts as many drafted tokens as a fixed pattern says, whatever the target thinks of
them. The work is that of a real decoder, the text is not the target's: an engine that gets this as
its `verify` marks every completion as simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import floor

import torch
from torch import Tensor

from pipeline.decoder.tree import Tree, VerifyOutput

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
        wanted = self._pattern[self._round % len(self._pattern)]  # [1]
        self._round.add_(1)
        rows, count = tree.tokens.shape
        index = torch.arange(count, device=predicted.device)
        deepest = tree.tree_mask.gather(1, tree.depth.argmax(1, keepdim=True))  # [B, 1] bits
        towards = (deepest >> index & 1).bool() & (index > 0)  # [B, N]
        node = torch.zeros(rows, dtype=torch.int64, device=predicted.device)
        path, counts = [node], torch.ones_like(node)
        for step in range(depth):
            child = (tree.parents == node[:, None]) & towards  # [B, N]
            accepted = child.any(1) & (step < wanted)
            node = torch.where(accepted, child.int().argmax(1), node)
            counts = counts + accepted
            path.append(node)
        walked = torch.stack(path, dim=1)  # [B, D + 1]
        emitted = tree.tokens.gather(1, torch.cat((walked[:, 1:], walked[:, -1:]), dim=1))
        bonus = predicted.gather(1, walked[:, -1:]).clamp(min=0)  # [B, 1]
        last = torch.arange(depth + 1, device=predicted.device) >= counts[:, None] - 1
        return VerifyOutput(walked, counts, torch.where(last, bonus, emitted))
