"""What n-gram drafts should be, by plain search, and prompts that repeat themselves."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config import NgramSection, TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.engine import Engine
from pipeline.decoder.ops.draft import Candidates
from pipeline.decoder.ops.lookup import tree_of_chains
from pipeline.decoder.request import Completion, Request
from pipeline.drafters.ngram import NgramDrafter
from tests.decoder.conftest import random_tokens

TREE = TreeSection(top_k=3, steps=5, nodes=14)
SECTION = NgramSection(min_match=1, max_match=5, matches=6)


def match_of(history: Sequence[int], end: int, max_match: int) -> int:
    """Tokens up to `end` that agree with the last ones of `history`."""
    length = 0
    while length < min(max_match, end + 1) and history[end - length] == history[-1 - length]:
        length += 1
    return length


def chains_of(
    history: Sequence[int], section: NgramSection, steps: int
) -> list[tuple[int, list[int]]]:
    """Match lengths and continuations, in the order in which they are to be proposed."""
    ends = range(len(history) - 1)
    matches = [(match_of(history, end, section.max_match), end) for end in ends]
    kept = sorted((each for each in matches if each[0] >= section.min_match), reverse=True)
    chains = []
    for length, end in kept[: section.matches]:
        text = list(history)
        chain = []
        for step in range(steps):
            chain.append(text[end + 1 + step])
            text.append(chain[-1])
        chains.append((length, chain))
    return chains


Branch = tuple[int, ...]


def tree_of(chains: list[tuple[int, list[int]]], top_k: int) -> dict[Branch, float]:
    """Log-probabilities of all nodes, by the tokens that lead to them."""
    mass: dict[Branch, int] = {(): sum(1 << min(length, 16) for length, _ in chains)}
    for length, chain in chains:
        for depth in range(1, len(chain) + 1):
            branch = tuple(chain[:depth])
            mass[branch] = mass.get(branch, 0) + (1 << min(length, 16))
    scores: dict[Branch, float] = {}
    level: list[Branch] = [()]
    while level:
        below = []
        for branch in level:
            children = [each for each in mass if each[:-1] == branch and each]
            children.sort(key=lambda each: -mass[each])  # stable: the earlier chain's first
            for child in children[:top_k]:
                gained = math.log(mass[child] / (mass[branch] + 1))
                scores[child] = scores.get(branch, 0.0) + gained
                below.append(child)
        level = below
    return scores


def nodes_of(candidates: Candidates, row: int) -> dict[Branch, float]:
    """What a row's candidates propose; checks that they can become a tree."""
    tokens, parents, scores = (part[row].tolist() for part in candidates[:3])
    depths = candidates.depths.tolist()
    branches: list[Branch] = []
    nodes: dict[Branch, float] = {}
    for index, (token, parent, score) in enumerate(zip(tokens, parents, scores, strict=True)):
        assert -1 <= parent < index and token >= 0
        assert depths[index] == (1 if parent < 0 else depths[parent] + 1)
        assert parent < 0 or score <= scores[parent]
        branches.append((*(branches[parent] if parent >= 0 else ()), token))
        if score > -math.inf:
            assert branches[-1] not in nodes, "equal siblings"
            nodes[branches[-1]] = score
    for index, (branch, score) in enumerate(zip(branches, scores, strict=True)):
        if score == -math.inf and nodes:
            # It repeats a sibling that stands before it: no walk gets there.
            assert branch[:-1] in nodes or len(branch) == 1
            assert branch in nodes and branches.index(branch) < index
    return nodes


def row_of_tokens(histories: Sequence[Sequence[int]], size: int) -> tuple[Tensor, Tensor]:
    """History [B, size] with garbage behind, and seq_lens [B]."""
    generator = torch.Generator().manual_seed(3)
    state = torch.randint(0, 4, (len(histories), size), generator=generator)
    for row, history in enumerate(histories):
        state[row, : len(history)] = torch.tensor(history)
    return state, torch.tensor([len(history) - 1 for history in histories])


def random_histories(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(draw.choice((1, 2, 3, 4))) for _ in range(draw.randint(1, 60))]
        for _ in range(count)
    ]


def drafted_candidates(rows: int, steps: int, beams: int, seed: int) -> Candidates:
    """As a head makes them: `beams` children of the root, and of `beams` nodes of each depth; few
    tokens, none twice below a node."""
    draw = random.Random(seed)
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    scores: list[list[float]] = []
    depths: list[int] = []
    for _ in range(rows):
        row: list[tuple[int, int, float]] = []
        depths, level = [], [-1]
        for depth in range(steps):
            below = []
            for parent in level:
                above = row[parent][2] if parent >= 0 else 0.0
                for token in draw.sample(range(6), beams):
                    row.append((token, parent, above - draw.random() * 2))
                    depths.append(depth + 1)
                    below.append(len(row) - 1)
            level = draw.sample(below, beams)
        tokens.append([each[0] for each in row])
        parents.append([each[1] for each in row])
        scores.append([each[2] for each in row])
    parts = torch.tensor(tokens), torch.tensor(parents), torch.tensor(scores)
    return Candidates(*parts, torch.tensor(depths))


def looked_up_candidates(rows: int, steps: int, chains: int, seed: int) -> Candidates:
    """Of random chains, some rows without any."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 6, (rows, chains, steps), generator=generator)
    lengths = torch.randint(0, 5, (rows, chains), generator=generator)
    lengths = lengths.sort(dim=1, descending=True).values
    lengths[::3] = 0
    return tree_of_chains(tokens, lengths, 3)


def both_of(drafted: Candidates, looked_up: Candidates, row: int) -> dict[Branch, float]:
    """All branches of both, each with the larger score."""
    nodes = nodes_of(drafted, row)
    for branch, score in nodes_of(looked_up, row).items():
        nodes[branch] = max(score, nodes.get(branch, -math.inf))
    return nodes


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    return {done.request_id: done for done in engine.generate(requests)}


def replies(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {name: done.token_ids for name, done in run(engine, requests).items()}


def mixed_requests(count: int, stop_ids: tuple[int, ...] = ()) -> list[Request]:
    """Prompts of 1 to 40 tokens, some of which repeat themselves; limits of 1 to 70."""
    requests = []
    for index in range(count):
        prompt = random_tokens(1 + (11 * index) % 40, seed=index).tolist()
        prompt = (prompt[:5] * 8)[:40] if index % 3 == 0 else prompt
        limit = 1 + (29 * index) % 70
        requests.append(Request(str(index), tuple(prompt), limit, stop_ids))
    return requests


def batch_of(drafter: NgramDrafter, histories: Sequence[Sequence[int]]) -> DecodeBatch:
    """Rows with these tokens, the last of each being the root."""
    size, device = drafter.history, torch.device("cpu")
    batch = DecodeBatch.empty(len(histories), pages=1, emitted=1, device=device, drafter=drafter)
    tokens, seq_lens = row_of_tokens(histories, size)
    batch.history.copy_(tokens)
    batch.seq_lens.copy_(seq_lens)
    batch.roots.copy_(torch.tensor([history[-1] for history in histories]))
    return batch
