"""The second leg of losslessness: is plain decoding the target's? transformers answers.

Speculative decoding equals plain decoding where the first leg holds; both may still be of another
model than the target, by a tensor or a rope setting that our reader got wrong. A few plain replies
in fp32 are therefore read by transformers' own model, attention and masks, one forward each:

    tokens   <prompt> … <assistant> 4    <end>
    logits                    best: 4    <end>     each reply token must be the best one before it

or lie below it by no more than fp32 arithmetic moves logits (see `target/referee.py`). And the
logits of both, which differ long before a token does, must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.reports import ReferenceCheck
from pipeline.serve_eval.questions import Question
from pipeline.target.open import Target

#: Steps (eps) of float32 that two sound ways to compute a final state may differ by.
_STEPS = 256.0
#: Share by which the logits before a token may differ, ‖ours - theirs‖ / ‖theirs‖, both without
#: their mean. Sound ways differ by some 1e-5.
_LOGITS = 1e-3
_EPS = float(torch.finfo(torch.float32).eps)


def chosen(questions: Sequence[Question], count: int) -> list[Question]:
    """Of the questions those that are checked: the longest context, and others evenly."""
    longest = max(range(len(questions)), key=lambda index: len(questions[index].context))
    step = max(1, len(questions) // count)
    indices = dict.fromkeys([longest, *range(0, len(questions), step)])
    return [questions[index] for index in list(indices)[:count]]


class PlainReply(NamedTuple):
    """What plain decoding in fp32 answers to a question."""

    question: Question
    token_ids: tuple[int, ...]
    scores: Tensor  # [reply, V]: the decoder's log-probabilities before each token


@torch.inference_mode()
def check_with_transformers(
    target: Target, plain: Sequence[PlainReply], advance: Callable[[int], None]
) -> ReferenceCheck:
    """Read plain replies with transformers in fp32; `advance` gets 1 for each."""
    model = target.load(dtype="float32").model
    rows = model.get_output_embeddings().weight  # [V, H]
    near_ties, wrong, farthest, different = 0, 0, 0.0, []
    for question, reply, scores in plain:
        ids = torch.tensor([[*question.context, *reply[:-1]]], device=model.device)
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        logits = output.logits[0, len(question.context) - 1 :].float()  # [reply, V]
        final = output.hidden_states[-1][0, len(question.context) - 1 :].float()  # [reply, H]
        token = torch.tensor(list(reply), device=logits.device)  # [reply]
        best = logits.max(-1)
        gap = best.values - logits.gather(1, token[:, None])[:, 0]
        between = (rows[best.indices] - rows[token]).float()  # [reply, H]
        allowed = final.norm(dim=1) * between.norm(dim=1) * (_STEPS * _EPS / final.shape[1] ** 0.5)
        is_wrong = gap > allowed
        theirs = logits - logits.mean(-1, keepdim=True)
        ours = scores.to(logits.device) - scores.mean(-1, keepdim=True).to(logits.device)
        apart = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-30)  # [reply]
        farthest = max(farthest, float(apart.max()))
        near_ties += int(((gap > 0) & ~is_wrong).sum())
        wrong += int(is_wrong.sum())
        if bool(is_wrong.any()) or not float(apart.max()) <= _LOGITS:
            different.append(question.request_id)
        advance(1)
    return ReferenceCheck(
        same=not different,
        replies=len(plain),
        tokens=sum(len(each.token_ids) for each in plain),
        near_ties=near_ties,
        wrong_tokens=wrong,
        logits_difference=float(f"{farthest:.3g}"),
        different=tuple(sorted(different)),
    )
