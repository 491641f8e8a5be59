"""Verification that is not lossless, at a known rate: what statistical tests must reject."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.decoder.ops.draws import random_words
from pipeline.decoder.ops.tree import SamplingTensors, Tree


def lucky(seeds: Tensor, positions: Tensor, rate: float) -> Tensor:
    """A share `rate` of draws, chosen by numbers that no draw uses: other seeds'."""
    return random_words(seeds + 2**40, positions, 1)[:, 0] < rate * 2**32


def towards_drafts(
    logits: Tensor,
    tree: Tree,
    sampling: SamplingTensors,
    positions: Tensor,
    rate: float,
    order: Tensor | None = None,
) -> Tensor:
    """Logits [B, N, V] by which a share `rate` of the nodes accept a draft regardless.

    It is the node's last child, what the drafter itself, and likely the target, wants least; or its
    last by `order` [B, N]: with the target's noise the last child is all but a draw of the target.
    """
    nodes = torch.arange(tree.tokens.shape[1])[:, None]
    children = tree.parents[:, None] == nodes  # [B, N, N]: child of node
    children[:, :, 0] = False
    order = nodes.T if order is None else order
    last = torch.where(children, order[:, None], -1).argmax(-1)
    drafted = tree.tokens.gather(1, last)  # [B, N]
    seeds = sampling.seeds.repeat_interleave(len(nodes))
    chosen = children.any(-1) & lucky(seeds, positions.flatten(), rate).view_as(positions)
    certain = torch.full_like(logits, float("-inf")).scatter_(-1, drafted[..., None], 0.0)
    return torch.where(chosen[..., None], certain, logits)
