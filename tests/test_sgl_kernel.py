"""Our stand-in for `sgl_kernel`, each function against an independent reference.

The references are loops over positions, or a tree that is known before it is put into candidates.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tests.engines.sglang_cpu import sgl_kernel

WIDTH, SLOTS = 40, 200


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture
def table() -> Tensor:
    """[requests, positions], no slot twice."""
    return torch.randperm(SLOTS)[: 4 * WIDTH].view(4, WIDTH).int()


def test_slots_are_read_and_written_by_request(table: Tensor) -> None:
    requests, start, end = torch.tensor([2, 0]), torch.tensor([5, 0]), torch.tensor([9, 3])
    out = torch.full((9,), -1)
    sgl_kernel.assign_extend_cache_locs_cpu(requests, table, start, end, out, WIDTH)
    wanted = [int(table[2, at]) for at in range(5, 9)] + [int(table[0, at]) for at in range(3)]
    assert out.tolist() == [*wanted, -1, -1]

    copy, empty = table.clone(), torch.zeros_like(table)
    sgl_kernel.assign_req_to_token_pool_cpu(requests, empty, start, end, out, WIDTH)
    copy[[1, 3]] = 0
    copy[2, :5] = copy[2, 9:] = copy[0, 3:] = 0
    assert torch.equal(empty, copy)


def test_drafts_take_the_slots_after_the_text_beam_by_beam(table: Tensor) -> None:
    requests, lengths, beams, steps = torch.tensor([1, 3]), torch.tensor([7, 11]), 3, 4
    out = torch.zeros(2 * beams * steps, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        requests, table, lengths, out, WIDTH, beams, steps
    )
    seen = sgl_kernel.build_draft_decode_metadata_cpu(table, requests, lengths, beams, steps, WIDTH)
    for row, (request, length) in enumerate(zip([1, 3], [7, 11], strict=True)):
        for beam in range(beams):
            own = out.view(2, beams, steps)[row, beam].tolist()
            text = table[request, :length].tolist()
            assert seen[row * beams + beam, : length + steps].tolist() == text + own
    assert len(set(out.tolist())) == out.numel()


def grown(beams: int, steps: int, nodes: int) -> tuple[list[list[int]], list[int], list[int]]:
    """A random tree as drafting grows it: paths of the chosen candidates, their numbers, and of
    every group the candidate that it descends from."""
    paths = [[at] for at in range(beams)]
    parents, frontier = [-1], list(range(beams))
    for _ in range(steps - 1):
        parents += frontier
        first = len(paths)
        paths += [[*paths[each], at] for each in frontier for at in range(beams)]
        frontier = sorted(random.sample(range(first, len(paths)), beams))
    chosen: list[int] = []
    while len(chosen) < nodes - 1:  # a parent before its children
        number = random.randrange(len(paths))
        if number not in chosen and (
            len(paths[number]) == 1 or paths.index(paths[number][:-1]) in chosen
        ):
            chosen.append(number)
    chosen.sort()
    return [paths[each] for each in chosen], chosen, parents


@pytest.mark.parametrize(("beams", "steps", "nodes"), [(1, 3, 4), (4, 5, 8), (2, 3, 6), (3, 1, 4)])
def test_a_tree_and_its_verification(beams: int, steps: int, nodes: int) -> None:
    random.seed(beams + steps)
    trees, lengths = [grown(beams, steps, nodes) for _ in range(5)], torch.tensor([9, 3, 30, 7, 1])
    masks, positions, links = build(trees, lengths, beams, steps, nodes)
    tokens = torch.randint(0, 3, (5, nodes))
    predicted = torch.randint(0, 3, (5, nodes))
    accepted = torch.full((5, steps + 1), -1, dtype=torch.int32)
    counts, predicts = torch.zeros(5, dtype=torch.int32), torch.zeros(5 * nodes, dtype=torch.int32)
    for row, (paths, _, _) in enumerate(trees):
        for node, path in enumerate(paths, start=1):  # siblings differ, as top-k makes them
            tokens[row, node] = path[-1]
    sgl_kernel.verify_tree_greedy_cpu(
        predicts,
        accepted,
        counts,
        candidates=tokens,
        retrive_index=links[0],
        retrive_next_token=links[1],
        retrive_next_sibling=links[2],
        target_predict=predicted,
    )
    for row, (paths, _, _) in enumerate(trees):
        every: list[list[int]] = [[], *paths]
        for node, path in enumerate(every):
            ancestors = [path[: len(other)] == other for other in every]
            assert masks[row, node].tolist() == ancestors
            assert positions[row, node] == lengths[row] + len(path)
        # The longest path of which every token is what the target says at the node before.
        best = max(
            (
                path
                for path in every
                if all(
                    path[at] == predicted[row, every.index(path[:at])] for at in range(len(path))
                )
            ),
            key=len,
        )
        way = [every.index(best[:at]) for at in range(len(best) + 1)]
        assert counts[row] == len(best)
        assert accepted[row, : len(way)].tolist() == [row * nodes + node for node in way]
        assert set(accepted[row, len(way) :].tolist()) <= {-1}
        assert [predicts[row * nodes + node] for node in way] == predicted[row, way].tolist()


def test_a_node_without_its_parent_is_never_accepted() -> None:
    # Of candidates 0, 1 and their children 2 … 5, node 2 descends from 1, which is left out.
    masks, _, links = build([([], [0, 4], [-1, 0, 1])], torch.tensor([6]), 2, 2, 3)
    assert masks[0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]
    assert links[1].tolist() == [[1, -1, -1]] and links[2].tolist() == [[-1, -1, -1]]


def build(
    trees: list[tuple[list[list[int]], list[int], list[int]]],
    lengths: Tensor,
    beams: int,
    steps: int,
    nodes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks [B, N, N], positions [B, N] and the links [3, B, N]."""
    mask = torch.ones(len(trees) * nodes * nodes, dtype=torch.bool)
    positions = torch.zeros(len(trees) * nodes, dtype=torch.int64)
    links = torch.full((3, len(trees), nodes), -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        *(torch.tensor([each[2] for each in trees]), torch.tensor([each[1] for each in trees])),
        *(lengths, mask, positions, *links, beams, steps, nodes, 1),
    )
    return mask.view(-1, nodes, nodes), positions.view(-1, nodes), links


def test_what_a_round_commits() -> None:
    tokens, bonus = torch.arange(10, 18), torch.zeros(2, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([3, 1]), bonus, 4)
    assert bonus.tolist() == [12, 14]
    slots, out = torch.arange(100, 110), torch.zeros(6, dtype=torch.int64)
    accepted = torch.tensor([[0, 3, -1], [5, -1, -1]])
    sgl_kernel.fill_accept_out_cache_loc_cpu(accepted, slots, out)
    assert out.tolist() == [100, 103, 105, 0, 0, 0]


def test_rows_of_all_layers_move_at_once() -> None:
    layers = [torch.randn(9, 2, width) for width in (4, 8)]
    before = [each.clone() for each in layers]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([each.data_ptr() for each in layers], dtype=torch.uint64),
        torch.tensor([each[0].nbytes for each in layers]),
        torch.tensor([1, 2, 7]),
        torch.tensor([2, 3, 1]),  # 2 and 1 are overwritten as well as read
    )
    for now, then in zip(layers, before, strict=True):
        then[[1, 2, 7]] = then[[2, 3, 1]]
        assert torch.equal(now, then)


HEADS, GROUPS, SIZE, SCALE = 6, 2, 8, 0.3


def by_hand(query: Tensor, cache: Tensor, slots: list[int]) -> Tensor:
    """[H, D], of one query [H, D] over keys and values [2, slots, G, D]."""
    keys, values = cache
    out = torch.zeros(HEADS, SIZE)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = [SCALE * float(query[head] @ keys[slot, group]) for slot in slots]
        total = sum(math.exp(each) for each in scores)
        for score, slot in zip(scores, slots, strict=True):
            out[head] += math.exp(score) / total * values[slot, group]
    return out


@pytest.mark.parametrize("window", [0, 3])
def test_attention_of_a_step(table: Tensor, window: int) -> None:
    cache = torch.randn(2, SLOTS, GROUPS, SIZE)
    query, out = torch.randn(2, HEADS, SIZE), torch.empty(2, HEADS, SIZE)
    new, lengths = torch.randn(2, 2, GROUPS, SIZE), [8, 2]
    slots = torch.tensor([int(table[2, 7]), int(table[1, 1])])
    sgl_kernel.decode_attention_cpu(
        *(query, cache[0], cache[1], 1.0, 1.0, out, new[0].flatten(1), new[1].flatten(1), slots),
        *(torch.empty(0), table, torch.tensor([2, 1]), torch.tensor(lengths), SCALE, 0.0, False),
        *(window, None, None),
    )
    assert torch.equal(cache[:, slots], new)
    for row, (request, length) in enumerate(zip([2, 1], lengths, strict=True)):
        seen = table[request, max(length - window, 0) if window else 0 : length].tolist()
        assert torch.allclose(out[row], by_hand(query[row], cache, seen), atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "window", "all", "tree"])
def test_attention_of_new_tokens(table: Tensor, kind: str) -> None:
    lengths, new, requests = [9, 4], [3, 3], [3, 0]
    cache = torch.randn(2, SLOTS, GROUPS, SIZE)
    query = torch.randn(6, HEADS, SIZE)
    out, mask = torch.empty_like(query), torch.rand(2, 3, 3) > 0.5
    mask |= torch.eye(3, dtype=torch.bool)
    sgl_kernel.extend_attention_cpu(
        *(query, query, query, out, cache[0], cache[1], 1.0, 1.0, table, torch.tensor(requests)),
        *(torch.tensor(lengths), torch.tensor(new), torch.tensor([0, 3]), 3, SCALE, 0.0, False),
        *(2 if kind == "window" else 0, None, None),
        *(mask.flatten() if kind == "tree" else None, kind != "all"),
    )
    for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        for token in range(3):
            own = length - 3 + token
            places = {
                "causal": list(range(own + 1)),
                "window": [own - 1, own],
                "all": list(range(length)),
                "tree": [
                    at
                    for at in range(length)
                    if at < length - 3 or mask[row, token, at - length + 3]
                ],
            }[kind]
            seen = [int(table[request, at]) for at in places]
            wanted = by_hand(query[3 * row + token], cache, seen)
            assert torch.allclose(out[3 * row + token], wanted, atol=1e-5)
