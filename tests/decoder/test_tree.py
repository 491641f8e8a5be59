"""The draft tree: links, masks, and which candidates are kept."""

from __future__ import annotations

import torch

from pipeline.decoder.tree import attention_mask, causal_mask, grow, root_only
from pipeline.decoder.verify import verify_greedy

# The tree drawn in pipeline/decoder/tree.py: root, a b, c d below a, e below b.
_TOKENS = torch.tensor([[11, 12, 21, 22, 23]])
_PARENTS = torch.tensor([[-1, -1, 0, 0, 1]])
_SCORES = torch.tensor([[-0.1, -0.2, -0.3, -0.4, -0.5]])


def _drawn(nodes: int = 6):  # type: ignore[no-untyped-def]
    return grow(torch.tensor([7]), _TOKENS, _PARENTS, _SCORES, nodes, steps=2)


def test_the_drawn_tree() -> None:
    tree = _drawn()
    assert tree.tokens.tolist() == [[7, 11, 12, 21, 22, 23]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 2]]
    drawn = ["1", "11", "1 1", "11 1", "11  1", "1 1  1"]
    expected = [[column < len(row) and row[column] == "1" for column in range(6)] for row in drawn]
    assert tree.ancestors.tolist() == [expected]


def test_the_best_nodes_are_kept_and_stay_connected() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        parents = torch.tensor(
            [[-1, -1, -1, *torch.randint(0, 3, (9,), generator=generator).tolist(), *torch.randint(3, 12, (9,), generator=generator).tolist()]]
        )
        gains = -torch.rand(1, 21, generator=generator).mul(3).floor()  # many ties, many zeros
        scores = gains.clone()
        for node in range(3, 21):
            scores[0, node] = scores[0, parents[0, node]] + gains[0, node]
        tree = grow(torch.tensor([0]), torch.arange(1, 22)[None], parents, scores, 8, steps=3)
        kept = (tree.tokens[0, 1:] - 1).tolist()
        assert sorted(scores[0, kept].tolist(), reverse=True) == sorted(scores[0].tolist(), reverse=True)[:7]
        for node in range(1, 8):
            above = int(parents[0, kept[node - 1]])
            assert tree.parents[0, node] == (0 if above < 0 else kept.index(above) + 1)
            assert tree.parents[0, node] < node


def test_masks_show_the_prefix_and_the_ancestors_and_nothing_else() -> None:
    tree = _drawn()
    mask = attention_mask(tree.ancestors, torch.tensor([3]), 11, torch.float32)[0]
    visible = mask == 0
    assert visible[:, :3].all()
    assert torch.equal(visible[:, 3:9], tree.ancestors[0])
    assert not visible[:, 9:].any()
    assert torch.isinf(mask[~visible]).all()
    chain = causal_mask(3, 2, torch.float32, torch.device("cpu"))[0] == 0
    assert chain.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_rows_of_a_batch_have_their_own_prefix() -> None:
    tree = root_only(torch.tensor([5, 6]))
    mask = attention_mask(tree.ancestors, torch.tensor([1, 4]), 5, torch.float32) == 0
    assert mask[:, 0].int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]


def _walk(tree, predicted: torch.Tensor) -> list[int]:  # type: ignore[no-untyped-def]
    """Reference acceptance of a single tree: follow the child that the target chose, as long as there is one."""
    node, emitted = 0, []
    while True:
        emitted.append(int(predicted[node]))
        children = [child for child in range(1, len(tree.tokens[0])) if tree.parents[0, child] == node and tree.tokens[0, child] == emitted[-1]]
        if not children:
            return emitted
        node = children[0]


def test_verification_follows_the_target() -> None:
    tree = _drawn()
    predicted = torch.tensor([[11, 22, 0, 0, 99, 0]])  # root → a, a → d, d → 99
    accepted = verify_greedy(tree, predicted, depth=2)
    assert accepted.counts.tolist() == [3]
    assert accepted.path[0].tolist() == [0, 1, 4]
    assert accepted.tokens[0, :3].tolist() == [11, 22, 99]


def test_verification_equals_a_walk_down_random_trees() -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = set()
    for _ in range(300):
        # Siblings get different tokens: candidate tokens enumerate 0…2 within each family of three.
        parents = torch.tensor([[-1] * 3 + [0] * 3 + [1] * 3 + [4] * 3 + [10] * 3])
        tokens = torch.arange(15)[None] % 3
        depth = torch.tensor([[1] * 3 + [2] * 6 + [3] * 3 + [4] * 3])
        tree = grow(torch.tensor([9]), tokens, parents, -depth.float(), 16, steps=4)
        predicted = torch.randint(0, 4, (1, 16), generator=generator)  # 3 is nobody's token
        accepted = verify_greedy(tree, predicted, depth=4)
        count = int(accepted.counts[0])
        assert accepted.tokens[0, :count].tolist() == _walk(tree, predicted[0])
        assert (tree.depth[0, accepted.path[0]] == torch.arange(5).clamp(max=count - 1)).all()
        lengths.add(count)
    assert lengths == {1, 2, 3, 4, 5}
