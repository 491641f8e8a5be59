"""What is remarkable about a server, compared with the decoder's report on the same prompts.

Like is compared with like: the shape that the server drafts, a chain or a tree, is read from it,
and the decoder's rounds with just that shape are the report's, replayed where its own tree is
another. Prompts are the same, replies greedy, so these must hold, from sharp to blunt:

    rounds     where a reply is the decoder's own text, its rounds accept what the decoder's do: in
               fp32 all of them, in bf16 those whose drafts are no near-ties
    text       another reply parts from the decoder's where two tokens are all but equally likely
    logits     a server that gives log-probabilities of a text that it is sent has the decoder's
               leads over its replies, up to the noise of its arithmetic
    τ          over all prompts it is the decoder's, up to `eval.server.tolerance`, or up to a
               difference whose 95 % interval holds 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from math import erfc, inf, log, log1p, sqrt
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from pipeline.config import OWNER, LiveServerSection, TreeSection
from pipeline.console import console, logs_json, notice, printable
from pipeline.reports import (
    Estimate,
    EvalReport,
    GoldenFigure,
    GoldenPrompt,
    LoadPoint,
    RoundCounters,
    ServerFinding,
    ServerResult,
)
from pipeline.serve_eval.intervals import drawn_sums, estimate
from pipeline.serve_eval.servers.kinds import Kind, LiveServer, ServerRounds
from pipeline.serve_eval.servers.load import LiveReply, LoadRun

#: A head that fits accepts something; below this τ nothing useful was drafted.
_NOTHING_ACCEPTED = 1.05
#: A right server's text parts where the next token is no further below, in nats: bf16, and fp32.
NEAR_TIE, EXACT_TIE = 0.5, 0.01
#: Standard deviation of what another arithmetic adds to the difference of two logits, in nats: in
#: bf16 0.13 at most where a right server gives its logits, 0.20 as its replies part; and in fp32.
NOISE, EXACT_NOISE = 0.25, 0.005
#: More than NOISE must explain replies that part better by so much, in nats of their likelihood
#: (95 % of the chi-squared distribution with one degree of freedom).
_LIKELIER = 1.92
#: Drafts in bf16 are others than the decoder's, on a right server, only where these lead by little:
#: by so many nats all together, and by so many more for each round.
NEAR_DRAFTS, NEAR_DRAFT = 0.4, 0.001
#: Of trees in bf16, whose near-ties are not known: so many more or fewer rounds, as a share.
_OTHER_ROUNDS = 0.04
#: Rounds that near-ties may move, of however few, where no reply keeps its text.
_MOVED_ROUNDS = 2
#: The same of SGLang's trees in fp32, whose branches read each other's keys; 0.002 were seen.
_OTHER_BRANCHES = 0.01
#: How far τ may move between concurrencies, by near-ties and by prompts that are sent again.
_UNDER_LOAD = 0.10
_TARGET_FIX = "compare the target's weights, their type and quantisation, and sampling defaults"
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}  # the gravest first


class Noise(NamedTuple):
    """On the differences of a server's logits, at least NOISE."""

    sigma: float  # nats
    likelier: float  # than NOISE, in nats of the log-likelihood


class PairedTau(NamedTuple):
    """τ of a server and of the decoder on the same prompts."""

    prompts: int
    server: float
    decoder: Estimate
    difference: Estimate  # server - decoder

    def differs(self, tolerance: float) -> bool:
        """By more than the tolerance, and by more than prompts explain."""
        beyond = abs(self.difference.value) > tolerance * self.decoder.value
        return beyond and not self.difference.low <= 0 <= self.difference.high

    @property
    def text(self) -> str:
        """Both, and how far apart they are."""
        apart = self.difference
        interval = f"95 % interval {apart.low:+.3f} to {apart.high:+.3f}"
        return (
            f"τ is {self.server:.3f} against {self.decoder.value:.3f} of the decoder on the same "
            f"{self.prompts} prompts (difference {apart.value:+.3f}, {interval})"
        )


def compare(
    reported: Mapping[str, ServerRounds],
    expected: Mapping[str, RoundCounters],
    *,
    drafts_only: bool,
) -> PairedTau | None:
    """On the prompts, by id, that both have; None without any.

    `drafts_only`: the server counts as vLLM does, rounds with a draft, each uncut.
    """
    names = [name for name in reported if name in expected and expected[name].rounds]
    if not names:
        return None
    rows = []
    for name in names:
        ours, theirs = expected[name], reported[name]
        decoder = ours.rounds, ours.tokens
        if drafts_only:
            decoder = ours.drafts, ours.drafts + ours.accepted_tokens
        rows.append((theirs.rounds, theirs.tokens, *decoder))
    sums = drawn_sums(np.array(rows, float), names)  # [1 + DRAWS, 4]
    server, decoder_tau = sums[:, 1] / sums[:, 0], sums[:, 3] / np.maximum(sums[:, 2], 1)
    difference = estimate(server - decoder_tau, len(names))
    return PairedTau(len(names), float(server[0]), estimate(decoder_tau, len(names)), difference)


@dataclass(frozen=True)
class SeenServer:
    """All that was seen of one server."""

    server: LiveServer
    section: LiveServerSection
    runs: Sequence[LoadRun]  # by concurrency, the smallest first
    new_tokens: int
    template: Sequence[tuple[str, int, int, bool]] = ()  # prompt, its tokens, ours, the same ids
    report: EvalReport | None = None
    own: Mapping[str, RoundCounters] = field(default_factory=dict)  # by prompt, with its own tree
    #: By prompt, how far each token of the decoder's reply leads over the likeliest other; {}: the
    #: server does not say.
    leads: Mapping[str, Sequence[float]] = field(default_factory=dict)
    #: Replies that had parted from the decoder's, sent again up to there.
    cut: Mapping[str, LiveReply] = field(default_factory=dict)

    @property
    def golden(self) -> GoldenFigure | None:
        """The report's replies, where they were made with as many tokens as these."""
        golden = self.report.golden if self.report else None
        return golden if golden and golden.max_new_tokens == self.new_tokens else None

    @property
    def golden_prompts(self) -> list[GoldenPrompt]:
        """Those that were sent as the report has them: another template makes other tokens of a
        prompt of the same name."""
        sent = {each.question.request_id: each.question.context for each in self.runs[0].replies}
        prompts = self.golden.prompts if self.golden else ()
        return [each for each in prompts if sent.get(each.id) == each.prompt_ids]

    @property
    def shape(self) -> TreeSection | None:
        """What it drafts, as it reports or as its counters show; None where neither does."""
        return drafted_shape(self.server, self.runs[0])

    @property
    def looked_up(self) -> bool:
        """Whether the report's own rounds had a lookup beside the drafter, which no other server
        has, and golden ones have not."""
        return self.report is not None and self.report.drafter.lookup is not None

    @property
    def expected(self) -> Mapping[str, RoundCounters]:
        """The decoder's rounds with the server's shape, by prompt; {} where they are not known."""
        shape, tree = self.shape, self.report.settings.tree if self.report else None
        if self.looked_up:
            if self.server.kind == OWNER or shape is None or tree is None:
                return {}
            if shape == tree:
                return {each.id: each.counters for each in self.golden_prompts}
        elif shape is None or tree is None or shape == tree:
            return self.own
        prompts = self.golden_prompts
        return {each.id: each.shapes[shape.label] for each in prompts if shape.label in each.shapes}

    @property
    def paired(self) -> PairedTau | None:
        """At the lowest concurrency, where the server reports on single requests."""
        return compare(self.reported, self.expected, drafts_only=self.server.kind == "vllm")

    @property
    def reported(self) -> dict[str, ServerRounds]:
        """By prompt."""
        replies = self.runs[0].replies
        return {each.question.request_id: each.rounds for each in reversed(replies) if each.rounds}

    @property
    def token_ids(self) -> dict[str, tuple[int, ...] | None]:
        """Of the first reply to each prompt, by request."""
        replies = reversed(self.runs[0].replies)
        return {each.question.request_id: each.token_ids for each in replies}

    @property
    def partings(self) -> list[Parting]:
        """Of replies whose token ids are known and not the decoder's."""
        golden, ids, partings = self.golden, self.token_ids, []
        for prompt in self.golden_prompts:
            if golden and (theirs := ids.get(prompt.id)):
                parting = parting_of(prompt, theirs, golden.stop_ids)
                partings += [parting] if parting else []
        return partings

    @property
    def other_leads(self) -> list[tuple[float, str, int]]:
        """The server's leads less the decoder's, with the prompt and the token of its reply."""
        return [
            (theirs - ours, prompt.id, position)
            for prompt in self.golden_prompts
            for position, (theirs, ours) in enumerate(
                zip(self.leads.get(prompt.id, ()), prompt.runner_up_gaps, strict=False)
            )
        ]

    @property
    def measured_noise(self) -> float | None:
        """Root mean square of the leads' differences, in nats; None where they are not known."""
        squares = [each**2 for each, *_ in self.other_leads]
        return sqrt(sum(squares) / len(squares)) if squares else None

    @property
    def noise(self) -> Noise:
        """What explains best where the replies part: noise n ~ N(0, sigma) on each lead g of the
        likeliest token. It is the server's as well with probability P(n < g)."""
        partings = {each.prompt: each for each in self.partings}
        ids, taken = self.token_ids, list[float]()
        lost = [each.gap or 0.0 for each in partings.values()]
        for prompt in self.golden_prompts:
            theirs = ids.get(prompt.id) or ()
            end = partings[prompt.id].position if prompt.id in partings else len(theirs)
            taken += prompt.runner_up_gaps[:end]

        def likelihood(sigma: float) -> float:
            scale = sigma * sqrt(2)
            surprises = [log1p(-erfc(gap / scale) / 2) for gap in taken]
            surprises += [log(max(erfc(gap / scale) / 2, 1e-300)) for gap in lost]
            return sum(surprises)

        tried = [NOISE * 1.1**step for step in range(30)]  # 0.25 … 4
        best = max(tried, key=likelihood)
        return Noise(best, likelihood(best) - likelihood(NOISE))

    @property
    def exact_rounds(self) -> bool:
        """Whether every round must be the decoder's: in fp32, of requests one at a time. Together
        with others an engine's drafter may see a little less of a prompt that it reads in pieces.
        """
        return self.exact_alone and not self.reads_other_branches

    @property
    def exact_alone(self) -> bool:
        """Both sides compute in fp32, and no request ran beside another."""
        return self.exact and self.runs[0].concurrency == 1

    @property
    def reads_other_branches(self) -> bool:
        """SGLang's trees of three levels and more: a branch reads the keys that stand in its own
        row, though it may go on from another one (docs/engines.md), so its scores are a little
        other than the decoder's."""
        shape = self.shape
        return bool(self.server.kind == "sglang" and shape and shape.top_k > 1 and shape.steps > 2)

    @property
    def compared(self) -> list[ComparedRounds]:
        """Of replies that are the decoder's own text, or begin as it does: the rounds before a
        parting are known where the server lists them, or was asked for that much again."""
        parted, expected = {each.prompt: each.position for each in self.partings}, self.expected
        known = {each.question.request_id for each in self.runs[0].replies if each.token_ids}
        compared = []
        for prompt in self.golden_prompts:
            theirs, tokens = self.reported.get(prompt.id), parted.get(prompt.id)
            if tokens is not None and not (theirs and theirs.in_order):
                theirs = self.cut[prompt.id].rounds if prompt.id in self.cut else None
            if theirs and prompt.id in known and prompt.id in expected:
                compared.append(ComparedRounds(prompt, theirs, expected[prompt.id], tokens))
        return compared

    @property
    def exact(self) -> bool:
        """Whether both sides compute in fp32: as the server says, else as it shows."""
        if self.report is None or self.report.settings.dtype != "float32":
            return False
        if self.dtype == "auto":
            return not self.partings and (self.measured_noise or 0.0) <= EXACT_NOISE
        return self.dtype == "float32"

    @property
    def dtype(self) -> str:
        """That the server says it computes in; auto where it does not."""
        return str(self.server.settings.get("dtype", "auto")).removeprefix("torch.")


def drafted_shape(server: LiveServer, run: LoadRun) -> TreeSection | None:
    """SGLang and `eagle3 serve` report it; vLLM and llama-server draft chains, and count every
    position."""
    names = "num_steps", "eagle_topk", "num_draft_tokens"
    steps, top_k, nodes = (server.settings.get(f"speculative_{name}") for name in names)
    if isinstance(steps, int) and isinstance(top_k, int) and isinstance(nodes, int):
        with suppress(ValidationError):  # no tree has such a shape
            return TreeSection(steps=steps, top_k=top_k, nodes=nodes)
    positions = max(
        (len(each.counters.proposed) for each in run.rounds if each.counters), default=0
    )
    is_chain = server.kind in ("vllm", "llamacpp")
    return TreeSection.chain(positions) if is_chain and positions else None


def rounds_until(tokens: int, accepted: Callable[[int], int]) -> int:
    """Rounds that so many tokens after prefill's take, where `accepted(position)` drafts are
    accepted by the round that begins at `position`."""
    position = rounds = 0
    while position < tokens:
        position += accepted(position) + 1
        rounds += 1
    return rounds


class ComparedRounds(NamedTuple):
    """The server's rounds for a golden prompt, and the decoder's."""

    prompt: GoldenPrompt
    theirs: ServerRounds
    ours: RoundCounters  # of the whole reply
    tokens: int | None  # from which on the text is another; None: all of it is the decoder's

    def rounds(self, shape: TreeSection) -> int:
        """The decoder's, for as much of the text as is the same."""
        accepted_at = self.prompt.accepted_at.get(shape.label, ())
        if self.tokens is None or self.theirs.in_order or not accepted_at:
            return self.ours.rounds
        return rounds_until(self.tokens - 1, accepted_at.__getitem__)

    def other_drafts(self, chain: TreeSection) -> Iterator[tuple[float, str]]:
        """Drafts that are not the decoder's: by how much, in nats, its own lead, and where."""
        accepted_at, position = self.prompt.accepted_at[chain.label], 0
        for drafted, accepted in self.theirs.in_order:
            if position >= len(accepted_at):
                break
            ours = min(accepted_at[position], drafted)  # a full batch may leave room for few drafts
            bonus = position + max(accepted, ours) + 1  # the last token that either comes to
            if accepted != ours and (self.tokens is None or bonus < self.tokens):
                lead = self._lead(position, min(accepted, ours))
                where = f"the round at token {position + 1} accepted {accepted} drafted tokens, "
                yield lead, f"{where}the decoder's {ours}, whose draft leads by {lead:.2f} nats"
            position += accepted + 1
        if not self.theirs.in_order and (lead := self._least_lead(chain)):
            taken = f"{self.theirs.rounds} rounds accepted {self.theirs.accepted} tokens, to which "
            yield lead, f"{taken}the decoder comes by drafts that lead by {lead:.2f} nats"

    def _least_lead(self, chain: TreeSection) -> float:
        """By how much the drafts lead together, in nats, that must be others for the decoder to
        come to these counters; the least of all ways, infinite where there is none."""
        accepted_at = self.prompt.accepted_at[chain.label]
        end = (self.tokens or len(self.prompt.reply_ids)) - 1
        costs: list[dict[tuple[int, int], float]] = [{} for _ in range(end + 1)]
        costs[0][0, 0] = 0.0  # by rounds and accepted tokens until each position
        for position in range(end):
            ours = accepted_at[position]
            ways = {each: self._lead(position, each) for each in range(ours)} | {ours: 0.0}
            if ours < chain.steps:  # how far another draft would go on is not known
                lead = self._lead(position, ours)
                ways |= dict.fromkeys(range(ours + 1, chain.steps + 1), lead)
            for accepted, lead in ways.items():
                after = costs[min(position + accepted + 1, end)]
                for (rounds, total), cost in costs[position].items():
                    counters = rounds + 1, total + accepted
                    after[counters] = min(after.get(counters, inf), cost + lead)
        counted = (self.theirs.rounds, self.theirs.accepted)
        if self.tokens is None:
            return costs[end].get(counted, inf)
        # The last round may go on into text that is not the decoder's.
        return min(
            (cost for (each, _), cost in costs[end].items() if each == counted[0]), default=inf
        )

    def _lead(self, position: int, depth: int) -> float:
        """Of the draft that is `depth` tokens deep."""
        margins = self.prompt.chain_margins[position]
        return margins[depth] if depth < len(margins) else 0.0


class Parting(NamedTuple):
    """Where a reply parts from the decoder's."""

    prompt: str
    position: int  # the first token that differs
    gap: float | None  # nats that the server's token lies below at least; None: not known
    likely: bool  # it is the likeliest other token


def parting_of(
    prompt: GoldenPrompt, reply: Sequence[int], stop_ids: Sequence[int]
) -> Parting | None:
    """None for the decoder's own text; a reply may or may not hold its end token.

    The report has the gap of the likeliest other token; one of any third lies deeper still.
    """

    def without_end(ids: Sequence[int]) -> list[int]:
        return list(ids[:-1] if ids and ids[-1] in stop_ids else ids)

    ours, theirs = without_end(prompt.reply_ids), without_end(reply)
    if ours == theirs:
        return None
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    )
    # A reply that ends there has no token to compare.
    likely = same >= len(theirs) or theirs[same] in prompt.runner_up_ids[same : same + 1]
    gap = prompt.runner_up_gaps[same] if same < len(prompt.runner_up_gaps) else None
    return Parting(prompt.id, same, gap, likely)


def findings_of(seen: SeenServer) -> tuple[ServerFinding, ...]:
    """The gravest first."""
    drafting = (_not_plain,) if seen.section.plain else (_acceptance, against_report)
    parts = (failures, *drafting, _template, texts, _counting)
    every = [finding for part in parts for finding in part(seen)]
    return tuple(sorted(every, key=lambda each: list(_COLOURS).index(each.severity)))


def finding(
    severity: Literal["error", "warning", "note"], name: str, text: str, fix: str
) -> ServerFinding:
    """A record of its parts."""
    return ServerFinding(severity=severity, name=name, text=text, fix=fix)


def failures(seen: SeenServer) -> Iterator[ServerFinding]:
    """Failed requests, by concurrency, and replies that are cut short."""
    for run in seen.runs:
        if failed := run.failed.total():
            reasons = ", ".join(f"{count} x {name}" for name, count in run.failed.most_common())
            text = f"{failed} of {failed + len(run.replies)} requests failed"
            text += f" at concurrency {run.concurrency}: {reasons}"
            text += f"; the server says: {run.detail}" if run.detail else ""
            fix = "look at the server's log; figures are of the others"
            yield finding("error", "requests_failed", text, fix)
    lengths = [each.tokens for each in seen.runs[0].replies if each.finish_reason == "length"]
    if cut := [length for length in lengths if length < seen.new_tokens]:
        text = f"{len(cut)} of {len(seen.runs[0].replies)} replies end for their length, the first "
        text += f"after {cut[0]} tokens, where {seen.new_tokens} were asked for"
        fix = "look for a limit in its options and in the model's generation_config.json"
        yield finding("error", "replies_cut", text, fix)
    limit = seen.server.settings.get("max_model_len", seen.server.settings.get("context_length"))
    sent = max((len(each.question.context) for each in seen.runs[0].replies), default=0)
    if isinstance(limit, int) and 0 < limit < sent + seen.new_tokens:
        text = f"it takes {limit} tokens, and the longest prompt with its reply has "
        fix = f"start it with a context of at least {sent + seen.new_tokens}"
        yield finding("error", "context_cut", f"{text}{sent + seen.new_tokens}", fix)


def _not_plain(seen: SeenServer) -> Iterator[ServerFinding]:
    """A server that should decode plainly must not draft."""
    if drafted := sum(each.drafted for run in seen.runs for each in run.rounds):
        text = f"the server should decode plainly (eval.server.plain), and drafted {drafted} tokens"
        fix = "start it without its speculative options, or set eval.server.plain=false"
        yield finding("error", "not_plain", text, fix)


def _acceptance(seen: SeenServer) -> Iterator[ServerFinding]:
    """Whether it drafts at all, and whether it still does under load."""
    lengths = [
        (run.concurrency, tau) for run in seen.runs if (tau := run.acceptance_length) is not None
    ]
    if not lengths:
        where = "its /metrics has no counters of spec_decode"
        if seen.server.kind != "vllm":
            where = "its replies have no spec_verify_ct"
        if seen.server.kind == "llamacpp":
            where = "the timings of its replies have no draft_n"
        text = f"the server reports no speculation: {where}"
        fix = "start it with its speculative options; plain decoding reports none either"
        severity = seen.report or seen.section.drafts
        yield finding("error" if severity else "warning", "no_acceptance", text, fix)
        return
    (count, tau), *loaded = lengths
    own = seen.paired.decoder.value if seen.paired else None
    if tau < _NOTHING_ACCEPTED and (own is None or own >= _NOTHING_ACCEPTED):
        text = f"the server's τ is {tau:.2f}: the head was not loaded, or not with its weights"
        fix = "compare the draft model's path with the head directory, and its layers with "
        yield finding("error", "head_not_loaded", text, f"{fix}`eagle3 inspect HEAD`")
    for under_load, moved in loaded:
        if abs(moved - tau) <= _UNDER_LOAD * tau:
            continue
        text = f"τ is {tau:.2f} at concurrency {count} and {moved:.2f} at {under_load}"
        trees = seen.server.settings.get("speculative_trees")
        if isinstance(trees, dict) and trees:
            by_batch = ", ".join(f"{tree} from batch {rows}" for rows, tree in trees.items())
            yield finding(
                "note", "changes_under_load", f"{text}, as it drafts {by_batch}", "nothing"
            )
        else:
            fix = "look for an option that stops drafting in large batches; prompts that are sent "
            fix += "twice may also differ in length"
            yield finding("warning", "changes_under_load", text, fix)


def against_report(seen: SeenServer) -> Iterator[ServerFinding]:
    """Rounds by prompt, τ over all, and the shape, which is another's where the report's own tree
    is not what the server drafts."""
    yield from _shape(seen)
    if seen.report is None:
        text = "no report of the decoder to compare with: figures stand alone"
        fix = "run `eagle3 eval` first, where the decoder runs this target"
        yield finding("note", "no_report", text, fix)
        return
    yield from _rounds(seen)
    fix = "compare head and target with the report's; quantised weights change τ a little"
    tau, figures = seen.runs[0].acceptance_length, seen.report.acceptance
    if paired := seen.paired:
        if paired.differs(seen.section.tolerance):
            yield finding("error", "acceptance_differs", f"the server's {paired.text}", fix)
    elif seen.looked_up and not seen.expected:
        text = "the report's rounds had a lookup beside the drafter, and it knows none without one"
        fix = "evaluate without eval.drafter.lookup, or with the server's shape in eval.shapes"
        yield finding("note", "not_comparable", f"{text} on these prompts", fix)
    elif not seen.own:
        text = "the decoder's report has none of these prompts, or another max_new_tokens"
        fix = "evaluate with the configuration of the report"
        yield finding("note", "not_comparable", text, fix)
    elif tau is not None and figures is not None and seen.expected and not seen.looked_up:
        decoder = figures.acceptance_length
        if not decoder.low <= tau <= decoder.high:
            text = f"the server's τ is {tau:.2f}, outside of the decoder's {decoder.value:.2f}"
            text += f" ({decoder.low:.2f} to {decoder.high:.2f})"
            yield finding("error", "acceptance_differs", text, fix)


def _shape(seen: SeenServer) -> Iterator[ServerFinding]:
    """Another one than the report's tree, or than `eval.server.drafts`."""
    shape, drafts = seen.shape, seen.section.drafts
    tree = seen.report.settings.tree if seen.report else None
    if shape and drafts and shape.nodes - 1 != drafts:
        text = f"it drafts {shape.nodes - 1} tokens a round, and should draft {drafts}"
        fix = "start the server with so many, or set eval.server.drafts"
        yield finding("error", "tree_differs", text, fix)
    elif shape is None or tree is None or shape == tree:
        return
    elif seen.expected:
        text = f"it drafts {shape.label} (steps/top-k/tokens) where the report's tree is "
        text += f"{tree.label}: compared with the decoder's rounds of {shape.label}"
        fix = "nothing, or start the server with the report's tree"
        yield finding("warning", "tree_differs", text, fix)
    else:
        text = f"it drafts {shape.label} (steps/top-k/tokens), the report's tree is {tree.label}, "
        text += f"and the report does not know the decoder's rounds with {shape.label}"
        fix = "add the shape to eval.shapes and evaluate again, or start the server with the tree"
        yield finding("error", "tree_differs", text, fix)


def _rounds(seen: SeenServer) -> Iterator[ServerFinding]:
    """Where the text is the decoder's own, so are the rounds."""
    compared, shape = seen.compared, seen.shape
    if shape is None or not compared:
        return
    # llama-server's sums leave out what a reply's end has no room for.
    sums = seen.server.kind != "llamacpp"
    listed = all(each.theirs.in_order for each in compared)
    known = shape.top_k == 1 and all(each.prompt.chain_margins for each in compared)
    one_by_one = known and (listed or (sums and not seen.exact_rounds))
    text = _other_drafts(seen, shape) if one_by_one else _other_rounds(seen, shape)
    if text:
        fix = "the head computes something else there: compare its weights, aux layers, rotary "
        fix += "settings and norms with the head directory (`eagle3 inspect HEAD`)"
        yield finding("error", "rounds_differ", text, fix)


def _other_drafts(seen: SeenServer, chain: TreeSection) -> str:
    """Drafts that are not the server's: any in fp32, in bf16 if they lead by much; "" for none."""
    compared = seen.compared
    other = [
        (lead, f"in {each.prompt.id} {what}")
        for each in compared
        for lead, what in each.other_drafts(chain)
    ]
    total, rounds = sum(lead for lead, _ in other), sum(each.theirs.rounds for each in compared)
    allowed = 0.0 if seen.exact_rounds else NEAR_DRAFTS + NEAR_DRAFT * rounds
    if total <= allowed or not other:
        return ""
    text = f"other tokens are drafted where the decoder's lead by {total:.2f} nats together, in "
    return f"{text}{rounds} rounds; first of all {max(other)[1]}"


def _other_rounds(seen: SeenServer, shape: TreeSection) -> str:
    """Replies that took other rounds: any where they must be equal, else if there are many more
    rounds, or fewer, in all text that is the decoder's own; "" for none."""
    kind = seen.server.kind
    pairs = [
        (each.prompt.id, _counted(each.theirs, kind), _counted(each.ours, kind))
        for each in seen.compared
        if each.tokens is None
    ]
    other = [pair for pair in pairs if pair[1] != pair[2]]
    if not seen.exact_rounds:
        rounds = [(name, theirs["rounds"], ours["rounds"]) for name, theirs, ours in pairs]
        # Of a reply that parts, the list goes on into another text, and an old report knows no
        # positions: neither has rounds of the text before.
        rounds += [
            (each.prompt.id, each.theirs.rounds, each.rounds(shape))
            for each in seen.compared
            if each.tokens is not None
            and not each.theirs.in_order
            and shape.label in each.prompt.accepted_at
        ]
        apart, total = (
            sum(abs(each[1] - each[2]) for each in rounds),
            sum(each[2] for each in rounds),
        )
        share = _OTHER_BRANCHES if seen.exact_alone else _OTHER_ROUNDS
        if apart <= share * total or (not other and apart <= _MOVED_ROUNDS):
            return ""
        if not other:
            first, made, expected = next(each for each in rounds if each[1] != each[2])
            text = f"{sum(each[1] for each in rounds)} rounds where the decoder has {total} "
            return f"{text}on the same text, first {first}: {made} against {expected}"
    if not other:
        return ""
    name, theirs, ours = other[0]
    text = f"{len(other)} of {len(pairs)} replies with the decoder's own text took other rounds, "
    return f"{text}first {name}: {_in_words(theirs)} against {_in_words(ours)} of the decoder"


def _counted(rounds: ServerRounds | RoundCounters, kind: Kind) -> dict[str, int]:
    """What must be equal: rounds, drafted and accepted tokens. vLLM counts only rounds with a
    draft; llama-server drafts no token that the reply has no room for, where we draft it in vain.
    """
    if kind == "llamacpp":
        return {"rounds": rounds.rounds, "tokens": rounds.tokens}
    if isinstance(rounds, RoundCounters):
        made, accepted = (
            (rounds.drafts if kind == "vllm" else rounds.rounds),
            rounds.accepted_tokens,
        )
    else:
        made, accepted = rounds.rounds, rounds.accepted
    return {"rounds": made, "drafted": rounds.drafted, "accepted": accepted}


def _in_words(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.items())


def _template(seen: SeenServer) -> Iterator[ServerFinding]:
    """What its chat endpoint makes of messages, and what it makes of token ids."""
    if wrong := [each for each in seen.template if not each[3]]:
        name, theirs, ours, _ = wrong[0]
        text = f"its template differs: prompt tokens {theirs} against {ours} for {name}"
        if theirs == ours:
            text = f"its template differs: as many prompt tokens, {ours}, but others, for {name}"
        if len(seen.template) > 1:
            text += f" ({len(wrong)} of {len(seen.template)} prompts)"
        fix = "give the server the target's own chat template, system prompt and template variables"
        yield finding("error", "template_differs", text, fix)
    for reply in seen.runs[0].replies:
        sent = len(reply.question.context)
        if reply.prompt_tokens not in (None, sent):
            text = f"it read {reply.prompt_tokens} tokens where {sent} were sent"
            fix = "it adds tokens to token ids: look for an option on special tokens"
            yield finding("error", "prompt_changed", text, fix)
            return


def texts(seen: SeenServer) -> Iterator[ServerFinding]:
    """Logits that are not the decoder's, and replies that part from its greedy tokens where one is
    clearly the likelier.

    A note counts the others: at a near-tie another arithmetic may take either token.
    """
    measured, allowed = seen.measured_noise, EXACT_NOISE if seen.exact else NOISE
    if measured is not None and measured > allowed:
        other = seen.other_leads
        most, name, position = max(other, key=lambda each: abs(each[0]))
        text = f"over {len(other)} tokens of the decoder's replies {measured:.3g} nats of noise "
        text += f"lie on the server's logits, where {allowed:g} are allowed; most in {name}, whose "
        text += f"token {position + 1} leads by {abs(most):.2f} nats "
        text += "more" if most > 0 else "less"
        yield finding("error", "logits_differ", text, _TARGET_FIX)
    replied, ids = seen.golden_prompts, seen.token_ids
    if hidden := [each.id for each in replied if not ids[each.id]]:
        text = f"{len(hidden)} of {len(replied)} replies came without token ids, first "
        text += f"{hidden[0]}: their texts and single rounds were not compared, only τ"
        fix = "use a version that returns token ids, and ask it without a gateway"
        # What fp32 promises, equal texts and rounds, was then not seen of any reply. Without scores
        # a server that names no type may compute in another.
        known = seen.measured_noise is not None or seen.dtype != "auto"
        unseen = seen.exact_alone and known and len(hidden) == len(replied)
        yield finding("error" if unseen else "warning", "texts_unknown", text, fix)
    if not (partings := seen.partings):
        return
    limit = EXACT_TIE if seen.exact else NEAR_TIE
    far = [each for each in partings if each.gap is not None and each.gap > limit]
    unlikely = [each for each in partings if not each.likely]
    count = f"{len(partings)} of {len(seen.runs[0].replies)} replies part from the decoder's"
    if any(each.gap is None for each in partings):
        text = f"{count}, first {partings[0].prompt}; the report does not know near-ties"
        fix = "evaluate again; if most part, compare the weights and their type"
        yield finding("warning", "replies_differ", text, fix)
    elif far:
        worst = max(far, key=lambda each: each.gap or 0.0)
        text = f"{count}, {len(far)} of them at no near-tie: in {worst.prompt} the server's token "
        text += f"{worst.position + 1} is {worst.gap:.2f} nats less likely than the decoder's"
        yield finding("error", "replies_differ", text, _TARGET_FIX)
    elif len(unlikely) > len(partings) / 2 and len(unlikely) > 1:
        text = f"{count}, {len(unlikely)} of them with neither of the two likeliest tokens, first "
        text += f"{unlikely[0].prompt} at token {unlikely[0].position + 1}"
        yield finding("error", "replies_differ", text, _TARGET_FIX)
    elif measured is None and not seen.exact and (noise := seen.noise).likelier > _LIKELIER:
        text = f"{count}, each where the next likeliest token is within {limit:g} nats, but too "
        text += f"often: as if noise of {noise.sigma:.2f} nats lay on the differences of logits, "
        text += f"where {NOISE:g} are allowed"
        yield finding("error", "replies_differ", text, _TARGET_FIX)
    else:
        text = f"{count}, each where the next likeliest token is within {limit:g} nats"
        yield finding("note", "near_ties", text, "nothing")


def _counting(seen: SeenServer) -> Iterator[ServerFinding]:
    for run in seen.runs:
        if run.counted is not None and not run.failed and run.counted.generated != run.tokens:
            text = f"it counted {run.counted.generated} generated tokens at concurrency "
            text += f"{run.concurrency}, {run.tokens} came back"
            fix = "others use this server: measure it alone"
            if run.counted.generated < run.tokens:
                fix = "its /metrics may be of one of several processes: ask a single one"
            yield finding("warning", "other_traffic", text, fix)
    if pooled := [str(run.concurrency) for run in seen.runs if run.pooled]:
        text = f"acceptance at concurrency {', '.join(pooled)} is of all requests together"
        fix = "nothing: this server does not report it by request, so there is no interval"
        yield finding("note", "acceptance_pooled", text, fix)


def print_server(result: ServerResult) -> None:
    """A row for each concurrency, then the findings; or one JSON object where logs are JSON."""
    if logs_json():
        fields = result.model_dump(mode="json", include={"url", "kind", "model", "findings"})
        fields["acceptance_length"] = [_tau(point) for point in result.curve.points]
        notice("eval", f"server {result.url}", **fields)
        return
    from rich.table import Table

    title = f"eagle3 eval --server {result.url} ({result.kind} {result.version})"
    table = Table(title=printable(title), title_justify="left", title_style="bold")
    for name in ("at a time", "requests", "failed", "τ", "tokens/s", "TTFT p50", "TPOT p50"):
        table.add_column(name, justify="right")
    for point in result.curve.points:
        table.add_row(
            *map(str, (point.concurrency, point.requests, point.failed)),
            _tau(point),
            f"{point.throughput:,.1f}",
            f"{1000 * point.ttft_seconds.p50:,.1f} ms",
            f"{1000 * point.tpot_seconds.p50:,.2f} ms",
        )
    console.print(table)
    for each in result.findings:
        print_finding(each)


def print_finding(finding: ServerFinding) -> None:
    """On a line of its own."""
    from rich.text import Text

    words = printable(f"{finding.text} (fix: {finding.fix})")
    console.print(Text.assemble((f"{finding.severity}: ", _COLOURS[finding.severity]), words))


def _tau(point: LoadPoint) -> str:
    """With its interval, where it has one."""
    if point.acceptance is None:
        return "–"
    tau = point.acceptance.acceptance_length
    interval = f" ({tau.low:.2f} to {tau.high:.2f})" if tau.high > tau.low else ""
    return f"{tau.value:.2f}{interval}"
