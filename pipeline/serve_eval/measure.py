"""Decode every question plainly, speculatively and with Hugging Face, one after the other.

The three ways take turns on the same question, so that whatever else the machine does hits all of
them; ratios are taken per question. Rates count decoding alone: prefill is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pipeline.config import RivalSection, RunConfig, TreeSection
from pipeline.console import long_step, notice
from pipeline.decoder.drafter import Drafter, DrafterFactory, Trees
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Completion, Request
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError, HeadError, TargetError
from pipeline.heads.base import DraftingHead
from pipeline.heads.registry import open_head
from pipeline.records import Prompt
from pipeline.serve_eval.questions import LeftOut, Question, first_question, next_question
from pipeline.serve_eval.reference import PlainReply
from pipeline.target.arithmetic import pick_device
from pipeline.target.forward import LoadedTarget
from pipeline.target.open import Target
from pipeline.target.template import ChatTemplate
from pipeline.tuning.tune import Choice, tune
from pipeline.tuning.verification import Gaps, ImposedAcceptance, greedy_gaps, log_probabilities

#: Requests that the losslessness check decodes together.
_LOSSLESS_SLOTS = 8
#: Prompts that `tree: auto` tries the drafter on.
_TUNING_PROMPTS = 8


@dataclass(frozen=True)
class Measured:
    """One question, decoded in every way.

    Rates in tokens per second; 0 when nothing was decoded after prefill.
    """

    question: Question
    plain: Completion
    speculative: Completion
    rates: dict[str, float]
    gaps: Gaps  # of the speculative reply, in the run's own type
    rivals: dict[str, Completion] = field(default_factory=dict)  # by name, of `eval.compare`


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
    ) -> None:
        """`head` is what a trained drafter drafts with."""
        self._section, self._template = config.eval, template
        self.model = DecoderModel.load(
            target.directory,
            target.contract.capture_layers,
            device=pick_device(config.target.device),
            dtype=dtype,
            max_length=max_length,
        )
        factory = load_drafter(config.eval.drafter, self.model, target, head)
        assert factory is not None, "the configuration refuses drafter none"
        self._factory = factory
        self.tree = TreeSection() if config.eval.tree == "auto" else config.eval.tree
        self._by_batch: dict[int, TreeSection | None] = {}
        self._target, self._rivals = target, dict[str, Engine]()

    def tune(self, prompts: Sequence[Prompt]) -> Choice:
        """Pick the tree for batch 1, and what the drafter leaves open, by trying it on some of the
        prompts; and one for each batch of `eval.load`.

        `tree` is the first from then on; the default one where plain decoding is predicted to be
        faster than any, so that the drafter can still be judged.
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
                self._factory,
                contexts,
                rows=sorted({1, *self._section.load.concurrency}),
                stop_ids=self._template.stop_ids,
                new_tokens=self._section.max_new_tokens,
            )
        choice = choices[1]
        self._by_batch = {
            rows: each.shape if each.drafts else None for rows, each in choices.items()
        }
        tree = choice.shape
        assert choice.factory is not None
        default = _no_deeper_than(choice.factory.depths)
        self.settle(tree if choice.drafts else default, choice.settings)
        shape = f"top_k {tree.top_k}, steps {tree.steps}, nodes {tree.nodes}"
        for name, value in choice.settings.items():
            shape += f"; {name} {value}"
        gain = f"τ {choice.acceptance_length:.2f}, {choice.speedup:.2f}x plain decoding"
        notice("eval", f"tree: {shape}; predicted: {gain}")
        if not choice.drafts:
            plainly = "tree: one node, plain decoding: no tree is predicted to be faster"
            notice("eval", f"{plainly}; the drafter is measured on the default tree")
        return choice

    @property
    def trees(self) -> dict[int, TreeSection | None]:
        """By batch size, each up to the next; None where plain decoding is faster."""
        return {**self._by_batch, 1: self.tree}

    @property
    def factory(self) -> DrafterFactory:
        """Of the drafter that is measured, with the settings that were chosen."""
        return self._factory

    def add_rivals(self, rivals: Sequence[RivalSection]) -> None:
        """Let these drafters take their turns on every question, beside the report's own."""
        for rival in rivals:
            head: DraftingHead | None = None
            if rival.head:
                head, _ = open_head(rival.head, expected=self._target.contract)
                _check_positions(head, self.model.max_length, rival.name)
            factory = load_drafter(rival.drafter, self.model, self._target, head)
            assert factory is not None, "the configuration refuses drafter none"
            self._rivals[rival.name] = Engine(self.model, drafter=factory(rival.tree))

    def settle(self, tree: TreeSection, settings: Mapping[str, int]) -> None:
        """Decode with this tree and these settings of the drafter from now on."""
        self.tree, self._factory = tree, self._factory.variant(settings)

    def engine(
        self,
        *,
        speculative: bool,
        slots: int = 1,
        trees: Trees | None = None,
        imposed: Sequence[int] = (),
    ) -> Engine:
        """A fresh engine over the shared weights, with `trees` in place of `tree` where given.

        Rounds accept `imposed` drafted tokens in turn, if any, whatever the target thinks of them.
        """
        drafter = self.factory(trees or self.tree) if speculative else None
        verify = ImposedAcceptance(imposed, self.model.device) if imposed else None
        return Engine(self.model, drafter=drafter, slots=slots, verify=verify)

    def drafter(self) -> Drafter:
        """A fresh one, with the settled tree."""
        return self.factory(self.tree)

    def measure(
        self, prompts: Sequence[Prompt], hf: LoadedTarget | None, hf_prompts: int
    ) -> Iterator[Measured | LeftOut]:
        """Each turn of each prompt, up to one that is left out."""
        engines = {
            "plain": self.engine(speculative=False),
            "speculative": self.engine(speculative=True),
            **self._rivals,
        }
        with_hf = _spread(len(prompts), hf_prompts)
        for index, prompt in enumerate(prompts):
            question, reply = first_question(prompt, self._template), None
            for turn in range(min(len(prompt.turns), self._section.max_turns)):
                if reply:
                    following = next_question(question, reply, prompt, turn, self._template)
                    if isinstance(following, LeftOut):
                        yield following
                        break
                    question = following
                if not self.fits(question.context):
                    yield LeftOut(question.request_id, "prompt_too_long")
                    break
                rival = hf if index in with_hf else None
                measured = self._decode(question, engines, rival, warm_up=index == turn == 0)
                reply = measured.plain
                yield measured

    def check_lossless(
        self,
        questions: Sequence[Question],
        advance: Callable[[int], None],
        temperature: float = 0.0,
    ) -> list[bool]:
        """Of each question: whether speculative is plain decoding, token for token.

        Draws above temperature 0 have a seed, which gives the same tokens however they are drafted.
        `advance` is given 1 for each reply, two a question.
        """
        requests = [
            replace(
                self._request(question), request_id=str(index), temperature=temperature, seed=index
            )
            for index, question in enumerate(questions)
        ]
        slots = min(_LOSSLESS_SLOTS, len(requests))
        replies: list[dict[str, tuple[int, ...]]] = [{}, {}]  # plain, speculative
        for speculative in (False, True):
            for done in self.engine(speculative=speculative, slots=slots).generate(requests):
                replies[speculative][done.request_id] = done.token_ids
                advance(1)
        plain, drafted = replies
        return [drafted[each.request_id] == plain[each.request_id] for each in requests]

    def plain_replies(self, questions: Sequence[Question]) -> list[PlainReply]:
        """Each question's plain reply, with the decoder's log-probabilities before its tokens."""
        requests = [
            replace(self._request(question), request_id=str(index))
            for index, question in enumerate(questions)
        ]
        engine = self.engine(speculative=False, slots=len(requests))
        done = {each.request_id: each.token_ids for each in engine.generate(requests)}
        plain = []
        for index, question in enumerate(questions):
            reply = done[str(index)]
            scores = log_probabilities(self.model, question.context, reply)
            plain.append(PlainReply(question, reply, scores))
        return plain

    def _decode(
        self,
        question: Question,
        engines: dict[str, Engine],
        hf: LoadedTarget | None,
        *,
        warm_up: bool,
    ) -> Measured:
        request = self._request(question)
        if warm_up:
            for engine in engines.values():
                _complete(engine, request)
        done = {name: _complete(engine, request) for name, engine in engines.items()}
        rates = {name: _rate(completion) for name, completion in done.items()}
        if hf:
            rates["hf"] = _hf_rate(hf, request, warm_up=warm_up)
        gaps = greedy_gaps(self.model, request.prompt_ids, done["speculative"].token_ids)
        plain, speculative = done.pop("plain"), done.pop("speculative")
        return Measured(question, plain, speculative, rates, gaps, done)

    def _request(self, question: Question) -> Request:
        limit, stop_ids = self._section.max_new_tokens, self._template.stop_ids
        return Request(question.request_id, question.context, limit, stop_ids)

    def fits(self, context: Sequence[int]) -> bool:
        """Whether a reply fits behind it."""
        return len(context) + self._section.max_new_tokens <= self.model.max_length


def _check_positions(head: DraftingHead, longest: int, name: str) -> None:
    if (positions := head.shape.max_position_embeddings) < longest:
        problem = f"{name} was made for {positions} positions, the longest request has {longest}"
        fix = "choose shorter prompts, lower eval.max_new_tokens, or leave it out"
        raise HeadError(problem, where="eval.compare", fix=fix)


def _no_deeper_than(depths: Sequence[int]) -> TreeSection:
    """The default tree, or what of it such a drafter can draft."""
    default = TreeSection()
    return default.model_copy(update={"steps": min(default.steps, max(depths))})


def _complete(engine: Engine, request: Request) -> Completion:
    (completion,) = engine.generate([request])
    if completion.error is not None:
        where = f"prompt {request.request_id}"
        raise TargetError(completion.error.what, where=where, fix=completion.error.fix)
    return completion


def _rate(completion: Completion) -> float:
    seconds = completion.statistics.decode_seconds
    return completion.statistics.round_tokens / seconds if seconds else 0.0


@torch.inference_mode()
def _hf_rate(hf: LoadedTarget, request: Request, *, warm_up: bool) -> float:
    """Decoding rate of `generate`: a run of one token, which is all prefill, is subtracted."""
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
    return (tokens - 1) / (whole - prefill) if tokens > 1 else 0.0


def _spread(total: int, wanted: int) -> set[int]:
    """`wanted` indices, evenly over range(total)."""
    if wanted > total:
        return set(range(total))
    return {index * total // wanted for index in range(wanted)}
