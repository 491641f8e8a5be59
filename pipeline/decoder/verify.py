"""What the target makes of a tree, and how plain decoding draws a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.decoder.tree import Tree


@dataclass(frozen=True)
class Acceptance:
    """The longest branch of each tree that the target would have generated itself.

    tree      root ─ a ─ c            path    [0 1 3]   node indices, padded with the last one
    target         a   c   x          counts  3         nodes on it, root included
                                      tokens  a c x     what the round emits: `counts` tokens
    """

    path: Tensor  # [B, D + 1]
    counts: Tensor  # [B]
    tokens: Tensor  # [B, D + 1]; row b holds counts[b] emitted tokens, the last one is the bonus


def verify_greedy(tree: Tree, predicted: Tensor, depth: int) -> Acceptance:
    """Accept the deepest branch on which every node equals the target's choice at its parent.

    predicted [B, N] is the target's argmax after each node; `depth` D the deepest a tree can be.
    Siblings carry different tokens, so the branch is unique.
    """
    count = tree.tokens.shape[1]
    agrees = tree.tokens == predicted.gather(1, tree.parents)  # [B, N]
    agrees[:, 0] = True
    accepted = ~(tree.ancestors & ~agrees[:, None]).any(-1)  # [B, N]: the node and all above it
    best = torch.where(accepted, tree.depth, -1).argmax(-1)  # [B]
    branch = tree.ancestors.gather(1, best[:, None, None].expand(-1, 1, count))[:, 0]  # [B, N]
    nodes = torch.arange(count, device=best.device)
    # Parents stand before children: the branch's nodes in ascending order are its path.
    path = torch.where(branch, nodes, count).sort(-1).values[:, : depth + 1]
    path = torch.minimum(path, best[:, None])
    counts = branch.sum(-1)
    # After node path[e] the target emits predicted[path[e]]: the next node on the path, then the bonus.
    return Acceptance(path, counts, predicted.gather(1, path))


def sample(logits: Tensor, *, temperature: float, top_p: float, top_k: int, generator: torch.Generator | None) -> int:
    """One token from logits [V]; temperature 0 is greedy.

    Order as in Hugging Face: temperature, then top-k, then top-p (the smallest set of most likely
    tokens whose mass reaches top_p).
    """
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.float() / temperature
    if top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(top_k, len(scaled))).values[-1], float("-inf"))
    probabilities = scaled.softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        probabilities = probabilities.index_fill(0, order[outside], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
