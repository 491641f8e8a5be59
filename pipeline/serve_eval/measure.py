"""Decode the evaluation prompts plainly, speculatively and with Hugging Face, in turns.

The ways of decoding take turns on the same question, so that other load on the machine affects all
of them; ratios are taken per question. Rates count decoding alone: prefill is the same for all.

Losslessness has two legs. Speculative decoding in fp32 must give plain decoding's tokens
(`Comparison.check_lossless`). And plain decoding must be the target's: by a misread tensor or rope
setting both could decode another model. So transformers reads a few plain replies, one
forward each (`check_with_transformers`):

    tokens   <prompt> … <assistant> 4    <end>
    logits                    best: 4    <end>     each reply token must be the best one before it,

or lie below it by no more than fp32 arithmetic moves logits (see `target/referee.py`). The logits
of both, which differ long before a token does, must agree as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config import RivalSection, RunConfig, TreeSection
from pipeline.console import long_step, notice, progress_bar
from pipeline.decoder.drafter import DrafterFactory, Trees
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.decoder.request import Completion, Request
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError, HeadError, TargetError
from pipeline.heads.base import DraftingHead
from pipeline.heads.registry import open_head
from pipeline.records import Prompt, match_contracts
from pipeline.reports import ReferenceCheck
from pipeline.serve_eval.questions import LeftOut, Question, first_question, next_question
from pipeline.target.arithmetic import pick_device
from pipeline.target.forward import LoadedTarget
from pipeline.target.open import Target
from pipeline.target.parallel import Group
from pipeline.target.template import ChatTemplate
from pipeline.tuning.tune import Choice, tune
from pipeline.tuning.verification import Gaps, ImposedAcceptance, greedy_gaps, log_probabilities

#: Requests that the losslessness check decodes together.
_LOSSLESS_SLOTS = 8
#: Prompts that `tree: auto` tries the drafter on.
_TUNING_PROMPTS = 8
#: Plain replies that transformers reads.
_REFERENCE_REPLIES = 4
#: Steps (eps) of float32 that two sound ways to compute a final state may differ by.
_STEPS = 256.0
#: Share by which the logits before a token may differ, ‖ours - theirs‖ / ‖theirs‖, both without
#: their mean. Sound ways differ by some 1e-5.
_LOGITS = 1e-3
#: Tokens of a reply whose rate with Hugging Face is taken.
_LEAST_TIMED = 4
_EPS = float(torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class Measured:
    """One question, decoded in every way.

    Rates in tokens per second; 0 when nothing was decoded after prefill, or too little to time.
    """

    question: Question
    plain: Completion
    speculative: Completion
    rates: dict[str, float]
    gaps: Gaps  # of the speculative reply, in the run's own type
    rivals: dict[str, Completion] = field(default_factory=dict)  # by name, of `eval.compare`


class PlainReply(NamedTuple):
    """Plain decoding's reply to a question, in fp32."""

    question: Question
    token_ids: tuple[int, ...]
    scores: Tensor  # [reply, V]: the decoder's log-probabilities before each token


class Comparison:
    """The target with and without a drafter, at batch 1, ready to decode."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        head: DraftingHead | None,
        template: ChatTemplate,
        *,
        dtype: torch.dtype,
        max_length: int,
        processes: Group | None = None,
    ) -> None:
        """Load the target, of several `processes` this one's slice; a trained drafter drafts with
        `head`."""
        self._section, self._template = config.eval, template
        self._is_refresh = config.refresh is not None
        self._processes = processes or Group()
        with self._processes.all_or_raise():
            self.model = DecoderModel.load(
                target.directory,
                target.contract.capture_layers,
                device=pick_device(config.target.device),
                dtype=dtype,
                max_length=max_length,
                group=TensorGroup.of(self._processes),
            )
            factory = load_drafter(config.eval.drafter, self.model, target, head)
        assert factory is not None, "the configuration refuses drafter none"
        #: Of the drafter that is measured, with the settings that were chosen.
        self.factory = factory
        self.tree = TreeSection() if config.eval.tree == "auto" else config.eval.tree
        self._by_batch: dict[int, TreeSection | None] = {}
        self._target, self._rivals = target, dict[str, Engine]()

    def tune(self, prompts: Sequence[Prompt]) -> Choice:
        """Pick the tree for batch 1, and the drafter's open settings, by trying it on some of the
        prompts; and a tree for each batch size of `eval.load`.

        From then on `tree` is the one for batch 1, or the default tree where plain decoding is
        predicted to be faster, so that the drafter can still be judged.
        """
        chosen = sorted(_spread(len(prompts), min(_TUNING_PROMPTS, len(prompts))))
        questions = [first_question(prompts[index], self._template) for index in chosen]
        contexts = [question.context for question in questions if self.fits(question.context)]
        if not contexts:
            raise ConfigError(
                "no prompt that the tree would be picked with fits the target's positions",
                where="eval.tree",
                fix="choose shorter prompts, lower eval.max_new_tokens, or give a shape",
            )
        notice("eval", f"tree: auto, trying the drafter on {len(contexts)} prompts")
        with long_step("eval", "tree: auto"):
            choices = tune(
                self.model,
                self.factory,
                contexts,
                rows=sorted({1, *self._section.load.concurrency}),
                stop_ids=self._template.stop_ids,
                new_tokens=self._section.max_new_tokens,
                processes=self._processes,
            )
        choice, default = choices[1], TreeSection()
        assert choice.factory is not None
        self._by_batch = {
            rows: each.shape if each.drafts else None for rows, each in choices.items()
        }
        steps = min(default.steps, max(choice.factory.depths))
        default = default.model_copy(update={"steps": steps})
        self.settle(choice.shape if choice.drafts else default, choice.settings)
        shape = (
            f"top_k {choice.shape.top_k}, steps {choice.shape.steps}, nodes {choice.shape.nodes}"
        )
        shape += "".join(f"; {name} {value}" for name, value in choice.settings.items())
        gain = f"τ {choice.acceptance_length:.2f}, {choice.speedup:.2f}x plain decoding"
        notice("eval", f"tree: {shape}; predicted: {gain}")
        if not choice.drafts:
            plainly = "tree: one node, plain decoding: no tree is predicted to be faster"
            notice("eval", f"{plainly}; the drafter is measured on the default tree")
        return choice

    @property
    def alone(self) -> DrafterFactory:
        """What is measured without a lookup beside it, as servers draft."""
        return self.factory.without_lookup or self.factory

    @property
    def trees(self) -> dict[int, TreeSection | None]:
        """By batch size, each up to the next; None where plain decoding is faster."""
        return {**self._by_batch, 1: self.tree}

    def add_rivals(self, rivals: Sequence[RivalSection]) -> None:
        """Let these drafters take their turns on every question, beside the report's own."""
        for rival in rivals:
            head: DraftingHead | None = None
            if rival.head:
                contract, where = self._target.contract, f"head {rival.head}"
                expected = None if self._is_refresh else contract
                head, card = open_head(rival.head, expected=expected)
                match_contracts(contract, card.contract, where=where, tuned=self._is_refresh)
                positions, needed = head.shape.max_position_embeddings, self.model.max_length
                if positions < needed:
                    problem = (
                        f"{rival.name} was made for {positions} positions, {needed} are needed"
                    )
                    fix = "choose shorter prompts, lower eval.max_new_tokens, or leave it out"
                    raise HeadError(problem, where="eval.compare", fix=fix)
            factory = load_drafter(rival.drafter, self.model, self._target, head)
            assert factory is not None, "the configuration refuses drafter none"
            drafter = factory(rival.tree or self.tree)
            self._rivals[rival.name] = Engine(self.model, drafter=drafter)

    def settle(self, tree: TreeSection, settings: Mapping[str, int]) -> None:
        """Decode with this tree and these settings of the drafter from now on."""
        self.tree, self.factory = tree, self.factory.variant(settings)

    def engine(
        self,
        *,
        speculative: bool,
        slots: int = 1,
        trees: Trees | None = None,
        imposed: Sequence[int] = (),
    ) -> Engine:
        """A fresh engine over the shared weights; `trees` take the place of `tree`.

        With `imposed`, rounds accept these numbers of drafted tokens in turn, whatever the target's
        choice.
        """
        drafter = self.factory(trees or self.tree) if speculative else None
        verify = ImposedAcceptance(imposed, self.model.device) if imposed else None
        return Engine(self.model, drafter=drafter, slots=slots, verify=verify)

    def measure(
        self, prompts: Sequence[Prompt], hf: LoadedTarget | None = None
    ) -> tuple[list[Measured], list[LeftOut]]:
        """Decode each turn of each prompt, up to the first that is left out.

        `hf` decodes `eval.hf_prompts` of the prompts, too. Raises TargetError for a failed request.
        """
        section, template = self._section, self._template
        measured, left_out = list[Measured](), list[LeftOut]()
        engines = {
            "plain": self.engine(speculative=False),
            "speculative": self.engine(speculative=True),
            **self._rivals,
        }
        with_hf = _spread(len(prompts), section.hf_prompts) if hf else set()
        turns = [min(len(prompt.turns), section.max_turns) for prompt in prompts]
        with progress_bar("eval", unit="turns", total=sum(turns)) as bar:
            for index, prompt in enumerate(prompts):
                question: Question | LeftOut = first_question(prompt, template)
                for turn in range(turns[index]):
                    if turn:
                        last = measured[-1]
                        question = next_question(last.question, last.plain, prompt, turn, template)
                    if isinstance(question, Question) and not self.fits(question.context):
                        question = LeftOut(question.request_id, "prompt_too_long")
                    bar.advance(1)
                    if isinstance(question, LeftOut):
                        left_out.append(question)
                        break
                    request, done = self._request(question), dict[str, Completion]()
                    for _ in range(1 if measured else 2):  # first uses allocate
                        for name, engine in engines.items():
                            (done[name],) = engine.generate([request])
                            _check(done[name])
                    rates = {name: _rate(completion) for name, completion in done.items()}
                    if hf and index in with_hf:
                        rates["hf"] = _hf_rate(hf, request, warm_up=not measured)
                    plain, drafted = done.pop("plain"), done.pop("speculative")
                    gaps = greedy_gaps(self.model, request.prompt_ids, drafted.token_ids)
                    measured.append(Measured(question, plain, drafted, rates, gaps, done))
        return measured, left_out

    def check_lossless(self, questions: Sequence[Question], temperature: float = 0.0) -> list[bool]:
        """Of each question: whether speculative is plain decoding, token for token.

        Above temperature 0 each question has a seed, which gives the same tokens however they are
        drafted.
        """
        requests = [
            replace(
                self._request(question), request_id=str(index), temperature=temperature, seed=index
            )
            for index, question in enumerate(questions)
        ]
        slots = min(_LOSSLESS_SLOTS, len(requests))
        replies: list[dict[str, tuple[int, ...]]] = [{}, {}]  # plain, speculative
        note = "lossless in fp32?" + (f" temperature {temperature:g}" if temperature else "")
        with progress_bar("eval", unit="replies", total=2 * len(requests), note=note) as bar:
            for speculative in (False, True):
                for done in self.engine(speculative=speculative, slots=slots).generate(requests):
                    replies[speculative][done.request_id] = done.token_ids
                    bar.advance(1)
        plain, drafted = replies
        return [drafted[each.request_id] == plain[each.request_id] for each in requests]

    def plain_replies(self, questions: Sequence[Question]) -> list[PlainReply]:
        """Plain replies to a few questions: the longest context, and others evenly."""
        longest_first = sorted(range(len(questions)), key=lambda n: -len(questions[n].context))
        step = max(1, len(questions) // _REFERENCE_REPLIES)
        indices = dict.fromkeys([longest_first[0], *range(0, len(questions), step)])
        some = [questions[index] for index in list(indices)[:_REFERENCE_REPLIES]]
        requests = [
            replace(self._request(question), request_id=str(index))
            for index, question in enumerate(some)
        ]
        engine = self.engine(speculative=False, slots=len(requests))
        done = {}
        for each in engine.generate(requests):
            done[each.request_id] = each.token_ids
        replies = [done[request.request_id] for request in requests]
        return [
            PlainReply(each, reply, log_probabilities(self.model, each.context, reply))
            for each, reply in zip(some, replies, strict=True)
        ]

    def _request(self, question: Question) -> Request:
        limit, stop_ids = self._section.max_new_tokens, self._template.stop_ids
        return Request(question.request_id, question.context, limit, stop_ids)

    def fits(self, context: Sequence[int]) -> bool:
        """Whether a reply fits after it."""
        return len(context) + self._section.max_new_tokens <= self.model.max_length


def _check(completion: Completion) -> None:
    if completion.error is not None:
        where = f"prompt {completion.request_id}"
        raise TargetError(completion.error.what, where=where, fix=completion.error.fix)


def _rate(completion: Completion) -> float:
    seconds = completion.statistics.decode_seconds
    return completion.statistics.round_tokens / seconds if seconds else 0.0


@torch.inference_mode()
def _hf_rate(hf: LoadedTarget, request: Request, *, warm_up: bool) -> float:
    """Decoding rate of `generate`: a run of one token, which is all prefill, is subtracted.

    0 for a reply that is too short for it: what two timings differ by is then chance.
    """
    ids = torch.tensor([request.prompt_ids], device=hf.device)

    def timed(limit: int) -> tuple[int, float]:
        started = time.perf_counter()
        output = hf.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=list(request.stop_ids),
            pad_token_id=request.stop_ids[0],
        )
        return output.shape[1] - ids.shape[1], time.perf_counter() - started

    if warm_up:
        timed(2)
    _, prefill = timed(1)
    tokens, whole = timed(request.max_new_tokens)
    if tokens < _LEAST_TIMED or whole <= prefill:
        return 0.0
    return (tokens - 1) / (whole - prefill)


def _spread(total: int, count: int) -> set[int]:
    """`count` indices, evenly over range(total)."""
    if count > total:
        return set(range(total))
    return {index * total // count for index in range(count)}


@torch.inference_mode()
def check_with_transformers(
    target: Target, replies: Sequence[PlainReply], processes: Group | None = None
) -> ReferenceCheck:
    """The second leg of losslessness: read plain replies with transformers, in fp32, over the
    `processes` that share the target."""
    processes = processes or Group()
    with processes.all_or_raise():
        loaded = target.load(dtype="float32", processes=processes.size)
        model, rows = loaded.model, loaded.output_rows
        if rows is None:
            rows = target.weights.lm_head().to(loaded.device, torch.float32)  # [V, H]
    near_ties, wrong, farthest, different = 0, 0, 0.0, list[str]()
    note = "plain decoding is transformers'?"
    with progress_bar("eval", unit="replies", total=len(replies), note=note) as bar:
        for question, reply, scores in replies:
            ids = torch.tensor([[*question.context, *reply[:-1]]], device=model.device)
            output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
            logits = output.logits[0, len(question.context) - 1 :].float()  # [reply, V]
            final = output.hidden_states[-1][0, len(question.context) - 1 :].float()  # [reply, H]
            token = torch.tensor(list(reply), device=logits.device)  # [reply]
            best = logits.max(-1)
            gap = best.values - logits.gather(1, token[:, None])[:, 0]
            between = (rows[best.indices] - rows[token]).float().norm(dim=1)  # [reply]
            allowed = final.norm(dim=1) * between * (_STEPS * _EPS / final.shape[1] ** 0.5)
            is_wrong = gap > allowed
            apart = _relative_distance(scores.to(logits.device), logits)  # [reply]
            farthest = max(farthest, float(apart.max()))
            near_ties += int(((gap > 0) & ~is_wrong).sum())
            wrong += int(is_wrong.sum())
            if bool(is_wrong.any()) or not float(apart.max()) <= _LOGITS:
                different.append(question.request_id)
            bar.advance(1)
    return ReferenceCheck(
        same=not different,
        replies=len(replies),
        tokens=sum(len(each.token_ids) for each in replies),
        near_ties=near_ties,
        wrong_tokens=wrong,
        logits_difference=float(f"{farthest:.3g}"),
        different=tuple(sorted(different)),
    )


def _relative_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """‖ours - theirs‖ / ‖theirs‖ by row of [R, V], both without their mean."""
    ours, theirs = (each - each.mean(-1, keepdim=True) for each in (ours, theirs))
    apart: Tensor = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-30)
    return apart
