"""Whether replies are those of the target: transformers' own distribution is the referee.

A reply token follows from the logits before it. `features` has the final states there, so one
product with the output rows says what the target would have done:

    sampled greedily      gap = best logit - the token's: 0, or small where arithmetic broke a tie
    drawn at temperature  log p(token), against what draws from p have on average

Both need an allowance for arithmetic. Two sound ways to compute a final state h differ by some
steps (eps) of bfloat16 in a direction of no meaning, so the logits of two tokens with output rows
a and b move against each other by about steps · eps · ‖h‖ · ‖a - b‖ / √H. The number of steps
depends on the target: noise of one step at every layer moves the final states of SmolLM2-135M by 9,
of a random Gemma by 30 (`forward.noise_gain`). A gap counts as arithmetic up to GAP_PER_GAIN times
that, whatever computed the reply: a server does not say. docs/targets.md has the measurements.

Only every n-th position is scored (`stride`), counted from the reply's start: which ones must not
depend on how a reply ends, or the average would be biased.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.records import Sample, SamplingParams
from pipeline.target.agreement import COLUMNS, LEAST_NATS, REAL, Agreement

#: Of a target's forward over a shard, that scoring may cost in FLOPs.
_SHARE = 0.015
#: Reply tokens of a stage, or FLOPs, that are spent on it in any case: small runs are judged too.
_LEAST_POSITIONS, _LEAST_FLOPS = 4096, 2e11
#: FLOPs an entry of the vocabulary costs beside the product: exponentials and sorting are slow.
_ENTRY_FLOPS = 2000
_BLOCK = 128  # positions whose logits are held at once
_FEW = 1024, 16384  # entries in which a nucleus is looked for before everything is sorted
_EPS = float(torch.finfo(torch.bfloat16).eps)


class Referee:
    """Scores the reply tokens of one target."""

    def __init__(
        self, rows: Tensor, *, scale: float, parameters: int, stop_ids: Sequence[int], shards: int
    ) -> None:
        """rows [V, H]: the output embedding; logits are `scale` · rows · final state.

        `parameters` of the target and the stage's `shards` say what scoring may cost; `stop_ids`
        end a reply.
        """
        self._rows, self._scale = rows.detach(), scale
        self._stop_ids = frozenset(stop_ids)
        vocabulary, hidden = rows.shape
        position = vocabulary * (2 * hidden + _ENTRY_FLOPS)
        self._least = min(_LEAST_POSITIONS, _LEAST_FLOPS / position) / shards
        forward = 2 * max(parameters - vocabulary * hidden, 1)
        #: Positions a token of a shard, that may be scored.
        self._rate = _SHARE * forward / position

    def stride(self, samples: Sequence[Sample]) -> int:
        """n, where every n-th reply token of a shard is scored."""
        tokens = sum(len(sample.token_ids) for sample in samples)
        replies = sum(span.end - span.start for sample in samples for span in sample.supervised)
        return max(1, int(replies / max(self._rate * tokens, self._least)))

    def positions(self, sample: Sample, stride: int) -> list[int]:
        """Of the reply tokens that are scored. They depend on the sample's id, not on its text."""
        name = f"{sample.source}\n{sample.sample_id}".encode()
        place = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
        chosen: list[int] = []
        for span in sample.supervised:
            chosen += range(span.start + (-place) % stride, span.end, stride)
            place += span.end - span.start
        return chosen

    @torch.inference_mode()
    def score(
        self,
        samples: Sequence[Sample],
        positions: Sequence[Sequence[int]],
        final: Tensor,
        gap_steps: float,
    ) -> list[Agreement]:
        """Agreement of each sample's reply tokens at its `positions`.

        final [N, H]: the states before them, of all samples one after the other. `gap_steps`
        count as arithmetic.
        """
        tokens = [
            (number, sample.token_ids[place])
            for number, (sample, places) in enumerate(zip(samples, positions, strict=True))
            for place in places
        ]
        owners = torch.tensor([number for number, _ in tokens], dtype=torch.int64)  # [N]
        ids = torch.tensor([token for _, token in tokens], dtype=torch.int64)  # [N]
        sums = torch.zeros(len(samples), len(COLUMNS), dtype=torch.float64)
        for sampling in dict.fromkeys(sample.sampling for sample in samples):
            alike = [number for number, each in enumerate(samples) if each.sampling == sampling]
            mine = torch.isin(owners, torch.tensor(alike)).nonzero().flatten()
            for block in torch.split(mine, _BLOCK):
                scored = self._score_block(
                    final[block.to(final.device)], ids[block], sampling, gap_steps
                )
                sums.index_add_(0, owners[block], scored.double().cpu())
        return [
            Agreement(
                **{
                    name: value if name in REAL else int(value)
                    for name, value in zip(COLUMNS, row.tolist(), strict=True)
                },
                unended=self._unended(sample),
            )
            for sample, row in zip(samples, sums, strict=True)
        ]

    def _unended(self, sample: Sample) -> int:
        """Replies with an end token before their end, or with none at the end of one that is not
        the last or says that it has stopped."""
        count, last = 0, len(sample.supervised) - 1
        for number, span in enumerate(sample.supervised):
            ids = sample.token_ids[span.start : span.end]
            ends = number < last or sample.finish_reason == "stop"
            past = any(token in self._stop_ids for token in ids[:-1])
            count += past or (ends and ids[-1] not in self._stop_ids)
        return count

    def _score_block(
        self, final: Tensor, ids: Tensor, sampling: SamplingParams, gap_steps: float
    ) -> Tensor:
        """final [n, H], ids [n] → what each token adds to the COLUMNS of its sample."""
        rows = self._rows
        final = final.to(rows.device)
        logits = (final.to(rows.dtype) @ rows.T).float().mul_(self._scale)  # [n, V]
        ids = ids.to(rows.device)[:, None]
        chosen, one = logits.gather(1, ids)[:, 0], torch.ones(len(ids), device=rows.device)  # [n]
        step = self._scale * _EPS / math.sqrt(final.shape[1])
        norm = torch.as_tensor(final.float().norm(dim=1)) * (step * gap_steps)

        def allowed(others: Tensor) -> Tensor:
            """The gap [n] between each token and another one [n]."""
            apart = rows[others].float() - rows[ids[:, 0]].float()  # [n, H]
            return norm * torch.as_tensor(apart.norm(dim=1))

        if sampling.temperature == 0:
            best = logits.max(-1)
            is_best = chosen >= best.values
            near = ~is_best & (best.values - chosen <= allowed(best.indices))
            return torch.stack([one, is_best, near, *[0 * one] * 6], dim=1)
        scaled = logits.div_(sampling.temperature)
        whole = scaled.logsumexp(-1)  # [n]
        scaled_own = scaled.gather(1, ids)[:, 0]
        nats = LEAST_NATS / min(1.0, sampling.temperature) ** 2 * one
        if sampling.top_p >= 1 and not 0 < sampling.top_k < rows.shape[0]:
            weighted = (scaled - whole[:, None]).exp_().mul_(scaled)  # p · scaled [n, V]
            mean = weighted.sum(-1)
            variance = weighted.mul_(scaled).sum(-1) - mean.square()
            drawn = [one, 0 * one, scaled_own - whole, mean - whole, variance.clamp_min(0), nats]
            return torch.stack([*[0 * one] * 3, *drawn], dim=1)
        truncated = _truncate(scaled, whole, sampling)
        q = truncated.log_q.exp()  # [n, few], zero for tokens that are cut
        weighted = (q * truncated.log_q).nan_to_num_(0)
        expected = weighted.sum(-1)  # [n]
        variance = (weighted * truncated.log_q).nan_to_num_(0).sum(-1) - expected.square()
        below = (truncated.lowest - scaled_own) * sampling.temperature  # in logits
        inside = below <= allowed(truncated.border)
        values = scaled_own - whole + truncated.raised, expected, variance.clamp_min(0), nats
        sums = [torch.where(inside, each, 0) for each in values]
        return torch.stack([*[0 * one] * 3, one, ~inside, *sums], dim=1)


class _Truncated(NamedTuple):
    """A distribution cut by top-k and then top-p; n positions."""

    log_q: Tensor  # [n, few], descending; minus infinity for tokens that are cut
    raised: Tensor  # [n]: log-probability of a token that stays, minus that in the whole
    border: Tensor  # [n]: the least likely token that stays
    lowest: Tensor  # [n]: its scaled logit


def _truncate(scaled: Tensor, whole: Tensor, sampling: SamplingParams) -> _Truncated:
    """Of scaled logits [n, V], whose logsumexp is `whole` [n]."""
    vocabulary = scaled.shape[1]
    most = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    for few in (*_FEW, vocabulary):
        highest = scaled.topk(min(few, most))  # [n, few], descending
        log_p = highest.values - whole[:, None]
        if few >= most or bool((log_p.exp().sum(-1) >= sampling.top_p).all()):
            break
    if most < vocabulary:
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
    before = log_p.exp().cumsum(-1) - log_p.exp()  # of the tokens above each
    stays = (before < sampling.top_p) | (torch.arange(log_p.shape[1], device=scaled.device) == 0)
    log_q = log_p.masked_fill(~stays, -torch.inf)
    log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    last = stays.sum(-1, keepdim=True) - 1  # [n, 1]
    return _Truncated(
        log_q,
        log_q[:, 0] - (highest.values[:, 0] - whole),
        highest.indices.gather(1, last)[:, 0],
        highest.values.gather(1, last)[:, 0],
    )
