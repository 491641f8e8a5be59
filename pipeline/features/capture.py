"""One shard: packed forwards of its samples, the states they store, and the checks of both.

Shapes: T tokens of a sample, H the target's hidden size. Samples must hold the ids that a server
would read, so their messages are rendered again:

    messages    system, user, assistant, user, assistant
    token_ids   <sys>… <user> 2+2? <assistant> 4 <end> <user> Why? <assistant> Because… <end>
                └────── one rendering ───────┘ └──┘    └─ cut out of ─┘        generated
                                             generated   the whole one

Prompts and what stands between replies must be what the chat template gives for these messages
today; replies are the target's own and stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.config import FeaturesSection, RunConfig, prepare_process
from pipeline.config.run import Supervise
from pipeline.console import notice
from pipeline.errors import (
    DataError,
    OutOfMemory,
    TemplateError,
    brief,
    is_out_of_memory,
)
from pipeline.records import Arithmetic, Manifest, Sample, Span, TargetContract
from pipeline.store.manifest import manifest_where
from pipeline.store.states import StatesSample, teacher_positions
from pipeline.target.agreement import (
    CAUSES,
    CHAOTIC_GAP,
    GAP_PER_GAIN,
    LEAST_GAP,
    MOST_BEYOND,
    MOST_BEYOND_OF_CHAOTIC,
    Agreement,
    problem_of,
    problem_of_sample,
)
from pipeline.target.arithmetic import torch_arithmetic
from pipeline.target.forward import (
    Alternatives,
    Draw,
    LoadedTarget,
    capture_alone,
    capture_alternatives,
    capture_states,
    layers_of,
    noise_gain,
    register_packed_attention,
)
from pipeline.target.open import Target, open_target
from pipeline.target.parallel import Group, require_several
from pipeline.target.referee import Referee
from pipeline.target.template import ChatTemplate

#: Positions whose logits are held at once, for what is drawn of them.
_DRAWN_TOGETHER = 128


class CapturedShard(NamedTuple):
    """What one shard's samples give."""

    states: list[StatesSample]
    agreements: Sequence[Agreement]  # of each sample's replies with the teacher
    gap_steps: float  # what counted as arithmetic, in steps of bfloat16


class StatesSource(Protocol):
    """What computes states: the target in this process, or an engine that serves it."""

    @property
    def contract(self) -> TargetContract:
        """Whose states they are."""

    @property
    def arithmetic(self) -> Arithmetic:
        """What they are computed with."""

    def together(self, documents: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """(aux [T, L · H], final [T, H]) of each document; they do not see each other."""

    def with_alternatives(
        self, documents: Sequence[Sequence[int]], draw: Draw
    ) -> list[tuple[Tensor, Tensor, Alternatives]]:
        """Those and the alternatives of each document that are drawn."""

    def alone(self, document: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same of one document, by a way that could not confuse it with another."""

    def noise_gain(self, document: Sequence[int], final: Tensor) -> float:
        """How far noise moves the final states [T, H]; see `forward.noise_gain`."""


class LocalStates:
    """Of a target that transformers runs in this process."""

    def __init__(self, target: LoadedTarget) -> None:
        self._target, self.contract = target, target.contract

    @property
    def arithmetic(self) -> Arithmetic:
        """Torch's."""
        return torch_arithmetic(self._target.model.dtype, self._target.device)

    def together(self, documents: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """From one packed forward."""
        return capture_states(self._target, documents)

    def with_alternatives(
        self, documents: Sequence[Sequence[int]], draw: Draw
    ) -> list[tuple[Tensor, Tensor, Alternatives]]:
        """In forwards of as many tokens as the documents have."""
        tokens = sum(map(len, documents))
        return capture_alternatives(self._target, documents, draw, together=tokens)

    def alone(self, document: Sequence[int]) -> tuple[Tensor, Tensor]:
        """By transformers' own attention and masks."""
        return capture_alone(self._target, document)

    def noise_gain(self, document: Sequence[int], final: Tensor) -> float:
        """Measured."""
        return noise_gain(self._target, document, final)


class Drawing(NamedTuple):
    """Which alternatives there are: what the target itself might have said in a token's place."""

    alternatives: int  # K
    supervise: Supervise
    rows: Tensor  # [V, H], whose products with final states, times `scale`, are the logits
    scale: float
    seed: int

    def draw(self, sample: Sample, final: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [S] of the sample's teachers, and K other tokens at each [K, S], drawn from the
        target's distribution there, final states [T, H], without putting any back.

        A function of seed and sample. The largest of log p plus Gumbel noise are such draws (Kool
        et al. 2019, arXiv:1903.06059).
        """
        positions, device = teacher_positions_of(sample, self.supervise).long(), self.rows.device
        name = f"{self.seed}/alternatives/{sample.source}/{sample.sample_id}"
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        generator = torch.Generator(device).manual_seed(number)
        own = torch.tensor(sample.token_ids)[positions]  # [S]
        drawn = []
        for start in range(0, len(positions), _DRAWN_TOGETHER):
            block = slice(start, start + _DRAWN_TOGETHER)
            before = final[(positions[block] - 1).clamp(min=0).to(final.device)].to(device)
            logits = (before @ self.rows.T).float() * self.scale  # [B, V]
            noise = torch.empty_like(logits).exponential_(generator=generator).log_()
            logits.sub_(noise).scatter_(1, own[block, None].to(device), -torch.inf)
            drawn.append(logits.topk(self.alternatives).indices.T.cpu())
        return positions, torch.cat(drawn, dim=1) if drawn else own.new_empty(self.alternatives, 0)


class MatchedTarget(NamedTuple):
    """The target that wrote the samples: its files, and what computes its states."""

    target: Target
    source: StatesSource
    rows: Tensor  # [V, H], whose products with final states, times `scale`, are the logits
    scale: float
    has_experts: bool

    @classmethod
    def loaded(cls, target: Target, loaded: LoadedTarget) -> MatchedTarget:
        """In this process, with transformers' own output rows."""
        rows, scale = loaded.output_rows, target.architecture.logit_scale
        if rows is None:
            rows, scale = target.weights.lm_head().to(loaded.device, loaded.model.dtype), 1.0
        has_experts = any("experts" in name for name, _ in loaded.model.named_modules())
        return cls(target, LocalStates(loaded), rows, scale, has_experts)

    def most_beyond(self, section: FeaturesSection, gap_steps: float) -> float:
        """Share of the reply tokens that may be beyond the gap: the section's, or by what the
        target makes of noise."""
        if section.reply_tolerance is not None:
            return section.reply_tolerance
        chaotic = gap_steps > CHAOTIC_GAP or self.has_experts
        return MOST_BEYOND_OF_CHAOTIC if chaotic else MOST_BEYOND

    def drawing(self, section: FeaturesSection, seed: int) -> Drawing | None:
        """Of the section's alternatives, if it has some."""
        if not section.alternatives:
            return None
        return Drawing(section.alternatives, section.supervise, self.rows, self.scale, seed)

    def referee(self, shards: int = 1) -> Referee:
        """Of the replies of a stage of so many shards."""
        return Referee(
            self.rows,
            scale=self.scale,
            parameters=self.target.contract.parameters,
            stop_ids=self.target.template().stop_ids,
            shards=shards,
        )


def load_matching_target(
    config: RunConfig, expected: TargetContract, group: Group | None = None
) -> MatchedTarget:
    """The target, ready for packed forwards; its slice of it where a `group` shares the target.

    Raises ContractMismatch when it is not the one that wrote the samples, and ConfigError when it
    is to be split and this process is alone.
    """
    group = group or Group()
    require_several(group, config.features.parallel, stage="features")
    with group.all_or_raise():
        prepare_process(config.run)
        where = manifest_where(config.run.uri, "synth")
        local = config.features.backend == "local"
        target = open_target(config.target, expected=expected, where=where, packed=local)
        if not local:
            return _served(config, target)
    device_map, attention = config.features.device_map, register_packed_attention()
    with group.all_or_raise():
        loaded = target.load(attention=attention, device_map=device_map, processes=group.size)
        return MatchedTarget.loaded(target, loaded)


def _served(config: RunConfig, target: Target) -> MatchedTarget:
    """The target in an engine; its output rows are read from its files."""
    from pipeline.features.engine import open_engine

    has_experts = any("experts" in name for name in target.weights)
    rows = target.weights.lm_head().to(target.device, target.dtype)  # scaled already
    return MatchedTarget(target, open_engine(config, target), rows, 1.0, has_experts)


def capture_shard(
    source: StatesSource,
    samples: Sequence[Sample],
    section: FeaturesSection,
    advance: Callable[[int], None],
    *,
    name: str,
    referee: Referee | None = None,
    scored: bool = False,
    drawing: Drawing | None = None,
) -> CapturedShard:
    """The states of `samples`, in their order, bf16 on the source's device, with the alternatives
    of a `drawing`; and with a `referee` how their replies agree with the target. `scored`: another
    process of the group has one.

    The first forward of a shard needs the most memory. When there is not enough, its samples and
    those of the shard's other forwards are computed in two halves. Raises OutOfMemory when that
    does not help.

    One sample, chosen by the shard's `name`, is computed again by itself and compared (see
    `differences`). `advance` is called with the tokens of each forward. Raises DataError that
    names the sample for ids or states that cannot be used, and for states that depend on how
    samples were batched.
    """
    states: dict[int, StatesSample] = {}
    stride = referee.stride(samples) if referee else 1
    places = [referee.positions(sample, stride) if referee else [] for sample in samples]
    gap_steps = 0.0
    before: dict[int, Tensor] = {}  # final states before the scored tokens
    checked = chosen_for_check(name, len(samples))
    lengths = [len(sample.token_ids) for sample in samples]
    budget = section.forward_tokens(source.arithmetic.device)
    if section.backend != "local":  # an engine batches for itself
        budget = sum(lengths)
    waiting = deque(into_forwards(lengths, budget))
    halved = False
    while waiting:
        documents = {number: samples[number] for number in waiting[0]}
        try:
            captured = _capture(source, documents, checked, section.self_check_tolerance, drawing)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _say_out_of_memory(error, len(documents), budget, halved=halved)
            halved = True
        else:
            waiting.popleft()
            for number, (aux, final, others) in captured.items():
                states[number] = _states_of(samples[number], aux, final, others, section.supervise)
                after = torch.tensor(places[number], dtype=torch.int64, device=final.device)
                before[number] = final[after - 1]
                if number == checked and (referee or scored):
                    gain = source.noise_gain(samples[number].token_ids, final)
                    gap_steps = max(LEAST_GAP, GAP_PER_GAIN * gain)
            advance(sum(len(sample.token_ids) for sample in documents.values()))
            continue
        # The error, and with it the tensors of the forward, is gone now.
        torch.cuda.empty_cache()
        # Neighbours have similar lengths, so both halves need similar memory.
        waiting = deque(half for batch in waiting for half in (batch[::2], batch[1::2]) if half)
    numbers = range(len(samples))
    agreements: list[Agreement] = []
    if referee and samples:
        final = torch.cat([before[number] for number in numbers])
        agreements = referee.score(samples, places, final, gap_steps)
    return CapturedShard([states[number] for number in numbers], agreements, gap_steps)


def check_replies(
    samples: Sequence[Sample], agreements: Sequence[Agreement], most_beyond: float
) -> None:
    """Raise DataError, naming the sample, where replies are another model's than the teacher.

    `most_beyond`: see `problem_of`.
    """
    for sample, agreement in zip(samples, agreements, strict=True):
        if problem := problem_of_sample(agreement, most_beyond):
            raise DataError(problem, where=_where(sample), fix=CAUSES)
    if problem := problem_of(sum(agreements, Agreement()), most_beyond):
        worst = max(range(len(samples)), key=lambda number: agreements[number].distance)
        raise DataError(problem, where=f"{_where(samples[worst])}, the farthest", fix=CAUSES)


#: Aux [T, L · H], final [T, H] and what was drawn beside them.
_Captured = tuple[Tensor, Tensor, Alternatives | None]


def _capture(
    source: StatesSource,
    documents: dict[int, Sample],
    checked: int,
    tolerance: float,
    drawing: Drawing | None,
) -> dict[int, _Captured]:
    """States of numbered samples from one forward, and alternatives; number `checked` is
    compared."""
    samples = list(documents.values())
    for sample in samples:
        _check_ids(sample, source.contract.vocab_size)
    token_ids = [sample.token_ids for sample in samples]
    captured: list[_Captured]
    if drawing is None:
        captured = [(aux, final, None) for aux, final in source.together(token_ids)]
    else:
        draw, others = drawing.draw, source.with_alternatives
        captured = [*others(token_ids, lambda number, final: draw(samples[number], final))]
    _check_finite(samples, captured)
    numbered = dict(zip(documents, captured, strict=True))
    if checked in documents and tolerance:
        aux, final, alternatives = numbered[checked]
        _check_alone(source, documents[checked], aux, final, tolerance)
        if drawing and alternatives:
            positions = teacher_positions_of(documents[checked], drawing.supervise)
            _check_alternative(source, documents[checked], positions, alternatives, tolerance)
    return numbered


def _say_out_of_memory(error: Exception, samples: int, tokens: int, *, halved: bool) -> None:
    """Raises OutOfMemory for a batch that has been halved, or is one sample."""
    if halved or samples == 1:
        problem = f"out of memory, {'also with half of it' if halved else 'for one sample'}"
        fix = "lower it, free memory, or set features.device_map=auto; committed shards are kept"
        where = f"features.batch_tokens={tokens}"
        raise OutOfMemory(f"{problem}: {brief(error)}", where=where, fix=fix) from error
    text = f"out of memory with features.batch_tokens={tokens}: the rest of the shard in halves"
    notice("features", text, batch_tokens=tokens)


def into_forwards(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of samples of like length, `batch_tokens` together; a longer one goes alone.

        a shard     [▢▢▢ ▢▢ ▢▢▢▢]
        forwards    [▢▢▢▢][▢▢▢ ▢▢]      the longest first

    States are put back into the shard's order. The most memory is needed by the first forward of a
    shard, not by some later one.
    """
    batch: list[int] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batch and tokens + lengths[number] > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += lengths[number]
    if batch:
        yield batch


def supervised_mask(sample: Sample) -> Tensor:
    """uint8 [T]: 1 where the target generated the token."""
    mask = torch.zeros(len(sample.token_ids), dtype=torch.uint8)
    for span in sample.supervised:
        mask[span.start : span.end] = 1
    return mask


def chosen_for_check(name: str, count: int) -> int:
    """Number of the sample of shard `name` that is computed twice; the same in every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % max(1, count)


def differences(packed: tuple[Tensor, Tensor], alone: tuple[Tensor, Tensor]) -> list[float]:
    """Largest relative difference of a token, ‖packed - alone‖ / ‖alone‖, in each layer.

    Both are (aux [T, L · H], final [T, H]): the aux layers and the final state.
    """
    largest = []
    for ours, reference in zip(layers_of(*packed), layers_of(*alone), strict=True):
        distance = (ours.float() - reference.float()).norm(dim=1)  # [T]
        relative = distance / reference.float().norm(dim=1).clamp_min(1e-30)
        largest.append(float(relative.max()))
    return largest


def _check_alone(
    source: StatesSource, sample: Sample, aux: Tensor, final: Tensor, tolerance: float
) -> None:
    """Raise DataError when the sample's states are not those that it has by itself.

    The tolerance counts in steps of the compute type. Two sound ways to compute SmolLM2's states
    differ by up to 15 steps in bfloat16 and 23 in float32; a token from another document in reach
    makes 100 % and more.
    """
    allowed = tolerance * torch.finfo(aux.dtype).eps
    names = [f"layer {layer}" for layer in source.contract.capture_layers] + ["the final state"]
    measured = differences((aux, final), source.alone(sample.token_ids))
    for name, difference in zip(names, measured, strict=True):
        if not difference <= allowed:
            problem = (
                f"{name} differs by {difference:.3g} between a packed forward and the sample "
                f"alone, where {allowed:.3g} is allowed in {aux.dtype}"
            )
            fix = (
                "set features.batch_tokens=1 so that each sample goes alone, and report the "
                "target; features.self_check_tolerance sets the limit"
            )
            raise DataError(problem, where=_where(sample), fix=fix)


def _check_alternative(
    source: StatesSource,
    sample: Sample,
    positions: Tensor,
    alternatives: Alternatives,
    tolerance: float,
) -> None:
    """Raise DataError when the state of one alternative, the first in the middle of positions [S],
    is not that of the sample which has it and ends there."""
    if not len(positions):
        return
    middle = len(positions) // 2
    at, token = int(positions[middle]), int(alternatives.token_ids[0, middle])
    state = alternatives.final_states[0, middle].float()
    reference = source.alone([*sample.token_ids[:at], token])[1][-1].float()
    allowed = tolerance * torch.finfo(alternatives.final_states.dtype).eps
    difference = float((state - reference).norm() / reference.norm().clamp_min(1e-30))
    if not difference <= allowed:
        problem = f"the final state of token {token} at position {at} differs by {difference:.3g} "
        problem += f"from that of the sample which has it there, where {allowed:.3g} is allowed"
        fix = "set features.alternatives=0, and report the target"
        raise DataError(problem, where=_where(sample), fix=fix)


def _check_finite(samples: Sequence[Sample], captured: Sequence[_Captured]) -> None:
    """One look at a whole forward; only a bad one is searched."""
    whole = [
        (aux, final, others.final_states) if others else (aux, final)
        for aux, final, others in captured
    ]
    if bool(torch.stack([torch.isfinite(part).all() for parts in whole for part in parts]).all()):
        return
    names = ("aux states", "final states", "alternatives")
    for sample, parts in zip(samples, whole, strict=True):
        for name, states in zip(names, parts, strict=False):
            if not torch.isfinite(states).all():
                problem = f"the target's {name} hold NaN or infinity"
                fix = "check the target's weights, or try target.dtype=float32"
                raise DataError(problem, where=_where(sample), fix=fix)


def teacher_positions_of(sample: Sample, supervise: Supervise) -> Tensor:
    """Positions of the final states that are stored of it, int32 [S]."""
    mask = supervised_mask(sample)
    return teacher_positions(mask, len(mask) - 1 if supervise == "all" else None)


def _states_of(
    sample: Sample,
    aux: Tensor,
    final: Tensor,
    alternatives: Alternatives | None,
    supervise: Supervise,
) -> StatesSample:
    """aux [T, L · H] whole, final [T, H] and alternatives where they teach; all bf16."""
    positions = teacher_positions_of(sample, supervise)
    ids, states = None, None
    if alternatives:
        ids = alternatives.token_ids.T.to("cpu", torch.int32).contiguous()  # [S, K]
        states = alternatives.final_states.transpose(0, 1).flatten(1).to(torch.bfloat16)
    return StatesSample(
        sample_id=sample.sample_id,
        source=sample.source,
        token_ids=torch.tensor(sample.token_ids, dtype=torch.int32),
        supervised_mask=supervised_mask(sample),
        aux_states=aux.to(torch.bfloat16),
        final_states=final[positions.to(final.device)].to(torch.bfloat16),
        final_positions=positions,
        alternative_ids=ids,
        alternative_states=states,
    )


def _check_ids(sample: Sample, vocab_size: int) -> None:
    """An id outside the embedding would be a crash without a name, or on a GPU a dead process."""
    ids = sample.token_ids
    fix = "make the samples again with this target: `eagle3 synth --force`"
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        problem = f"needs one or more ids in [0, {vocab_size})"
        raise DataError(problem, where=f"{_where(sample)}: token_ids", fix=fix)
    if any(not 0 <= span.start < span.end <= len(ids) for span in sample.supervised):
        problem = f"has a span outside its {len(ids)} tokens"
        raise DataError(problem, where=f"{_where(sample)}: supervised", fix=fix)


def _where(sample: Sample) -> str:
    return f"sample {sample.sample_id} of {sample.source}"


#: Samples of a shard that are rendered again, evenly spread.
_RENDERED = 32


class Rendering:
    """The template as synth used it, from what synth's manifest says."""

    def __init__(self, template: ChatTemplate, parent: Manifest) -> None:
        """`template` is the target's, without a system prompt: samples hold their own."""
        facts = parent.details.get("template")
        clock = (facts or {}).get("clock")
        # Samples of older versions name neither the template's variables nor the clock it read.
        self._known = facts is not None and (bool(clock) or not template.reads_clock)
        if clock:
            template.set_clock(datetime.fromisoformat(clock))
        self._template = template
        mix = parent.details.get("sampling", {}).get("mix") or ()
        self._variants = {each["name"]: each.get("chat_template_kwargs") or {} for each in mix}

    def check(self, samples: Sequence[Sample]) -> int:
        """How many samples were rendered. Raises DataError for the first of other ids."""
        if not self._known or not samples:
            return 0
        chosen = samples[:: -(-len(samples) // _RENDERED)]
        for sample in chosen:
            if problem := self._problem(sample):
                raise DataError(
                    problem,
                    where=f"sample {sample.sample_id} of {sample.source}",
                    fix="the target's tokenizer or chat template is another than synth used, or an "
                    "older version tokenised the turns one by one, or texts as control tokens; "
                    "make the samples again with `eagle3 synth --force`",
                )
        return len(chosen)

    def _problem(self, sample: Sample) -> str:
        roles = [message.role for message in sample.messages]
        system = sample.messages[0].content if roles[:1] == ["system"] else None
        messages = [each for each in sample.messages if each.role in ("user", "tool")]
        turns = [message.content for message in messages]
        tool_turns = [number for number, each in enumerate(messages) if each.role == "tool"]
        spans = sample.supervised
        try:
            template = self._template_of(sample)
            first = template.start(turns[0], system=system)
        except TemplateError as error:
            return f"its messages cannot be rendered again: {error.problem}"
        if tuple(first) != sample.token_ids[: spans[0].start]:
            return "its first prompt is not what the chat template gives for its messages"
        replies = [Span(start=span.start, end=span.end - 1) for span in spans]
        for number in range(1, len(spans)):
            before = sample.token_ids[: spans[number - 1].end]
            rendered = template.follow(
                *(turns[: number + 1], before, replies[:number]),
                system=system,
                tool_turns=tool_turns,
            )
            between = sample.token_ids[spans[number - 1].end : spans[number].start]
            if isinstance(rendered, str) or tuple(rendered) != between:
                return (
                    f"the ids between its replies {number} and {number + 1} are not those of the "
                    "whole conversation, rendered and tokenised at once"
                )
        return ""

    def _template_of(self, sample: Sample) -> ChatTemplate:
        kwargs: Mapping[str, Any] = self._variants.get(sample.variant, {})
        tools = json.loads(sample.tools) if sample.tools else ()
        if not kwargs and not tools:
            return self._template
        return self._template.varied(kwargs=kwargs, tools=tools)
