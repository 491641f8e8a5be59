"""What is remarkable about a server, compared with the decoder's report on the same prompts.

The comparison of τ is paired: the same prompts, greedy, so that differences between prompts cancel
out. A correct server, with the same head, tree and target, takes as many rounds as the decoder did,
up to near-ties: two tokens whose probabilities its arithmetic cannot tell apart. It fails where its
τ is further away than `eval.server.tolerance` *and* the 95 % interval of the difference excludes 0;
a few replies that part at a near-tie fail neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from pipeline.config import LiveServerSection
from pipeline.console import console, logs_json, notice, printable
from pipeline.reports import (
    Estimate,
    EvalReport,
    GoldenFigure,
    LoadPoint,
    RoundCounters,
    ServerFinding,
    ServerResult,
)
from pipeline.serve_eval.intervals import drawn_sums, estimate
from pipeline.serve_eval.servers.kinds import LiveServer, ServerRounds
from pipeline.serve_eval.servers.load import LoadRun

#: A head that fits accepts something; below this τ nothing useful was drafted.
_NOTHING_ACCEPTED = 1.05
#: How far τ may move between concurrencies, by near-ties and by prompts that are sent again.
_UNDER_LOAD = 0.10
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}  # the gravest first


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


def differing_replies(
    replies: Mapping[str, Sequence[int]], golden: GoldenFigure
) -> tuple[int, list[str]]:
    """How many prompts have a reply as token ids, and those of them whose reply is not the
    decoder's, end tokens aside."""
    known = [each for each in golden.prompts if each.id in replies]

    def without_end(ids: Sequence[int]) -> list[int]:
        return list(ids[:-1] if ids and ids[-1] in golden.stop_ids else ids)

    return len(known), [
        each.id for each in known if without_end(replies[each.id]) != without_end(each.reply_ids)
    ]


@dataclass(frozen=True)
class SeenServer:
    """All that was seen of one server."""

    server: LiveServer
    section: LiveServerSection
    runs: Sequence[LoadRun]  # by concurrency, the smallest first
    new_tokens: int
    template: Sequence[tuple[str, int, int, bool]] = ()  # prompt, its tokens, ours, the same ids
    report: EvalReport | None = None
    expected: Mapping[str, RoundCounters] = field(default_factory=dict)  # by prompt

    @property
    def paired(self) -> PairedTau | None:
        """At the lowest concurrency, where the server reports on single requests."""
        reported = {
            reply.question.request_id: reply.rounds
            for reply in self.runs[0].replies
            if reply.rounds is not None
        }
        return compare(reported, self.expected, drafts_only=self.server.kind == "vllm")


def findings_of(seen: SeenServer) -> tuple[ServerFinding, ...]:
    """The gravest first."""
    drafting = (_not_plain,) if seen.section.plain else (_acceptance, _against_report, _tree)
    parts = (failures, *drafting, _template, other_replies, _counting)
    every = [finding for part in parts for finding in part(seen)]
    return tuple(sorted(every, key=lambda each: list(_COLOURS).index(each.severity)))


def finding(
    severity: Literal["error", "warning", "note"], name: str, text: str, fix: str
) -> ServerFinding:
    """A record of its parts."""
    return ServerFinding(severity=severity, name=name, text=text, fix=fix)


def failures(seen: SeenServer) -> Iterator[ServerFinding]:
    """Failed requests, by concurrency."""
    for run in seen.runs:
        if failed := run.failed.total():
            reasons = ", ".join(f"{count} x {name}" for name, count in run.failed.most_common())
            text = f"{failed} of {failed + len(run.replies)} requests failed"
            text += f" at concurrency {run.concurrency}: {reasons}"
            fix = "look at the server's log; figures are of the others"
            yield finding("error", "requests_failed", text, fix)


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
        if trees := seen.server.settings.get("speculative_trees"):
            by_batch = ", ".join(f"{tree} from batch {rows}" for rows, tree in trees.items())
            yield finding(
                "note", "changes_under_load", f"{text}, as it drafts {by_batch}", "nothing"
            )
        else:
            fix = "look for an option that stops drafting in large batches; prompts that are sent "
            fix += "twice may also differ in length"
            yield finding("warning", "changes_under_load", text, fix)


def _against_report(seen: SeenServer) -> Iterator[ServerFinding]:
    if seen.report is None:
        text = "no report of the decoder to compare with: figures stand alone"
        fix = "run `eagle3 eval` first, where the decoder runs this target"
        yield finding("note", "no_report", text, fix)
        return
    fix = "compare head, tree and target with the report's; quantised weights change τ a little"
    tau, figures = seen.runs[0].acceptance_length, seen.report.acceptance
    if paired := seen.paired:
        if paired.differs(seen.section.tolerance):
            yield finding("error", "acceptance_differs", f"the server's {paired.text}", fix)
    elif not seen.expected:
        text = "the decoder's report has none of these prompts, or another max_new_tokens"
        fix = "evaluate with the configuration of the report"
        yield finding("note", "not_comparable", text, fix)
    elif tau is not None and figures is not None:
        decoder = figures.acceptance_length
        if not decoder.low <= tau <= decoder.high:
            text = f"the server's τ is {tau:.2f}, outside of the decoder's {decoder.value:.2f}"
            text += f" ({decoder.low:.2f} to {decoder.high:.2f})"
            yield finding("error", "acceptance_differs", text, fix)


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


def other_replies(seen: SeenServer) -> Iterator[ServerFinding]:
    """Replies that are not the decoder's greedy tokens."""
    golden = seen.report.golden if seen.report else None
    if golden is None or golden.max_new_tokens != seen.new_tokens:
        return
    ids = {
        reply.question.request_id: reply.token_ids
        for reply in seen.runs[0].replies
        if reply.token_ids is not None
    }
    compared, differing = differing_replies(ids, golden)
    if differing:
        text = f"replies differ from the decoder's greedy tokens on {len(differing)} of "
        text += f"{compared} prompts, first {differing[0]}"
        fix = "a few part at near-ties of another arithmetic; if most do, compare the weights, "
        fix += "their type and the sampling defaults"
        yield finding("warning", "replies_differ", text, fix)


def _tree(seen: SeenServer) -> Iterator[ServerFinding]:
    """Its tree against the report's."""
    server, tree = seen.server, seen.report.settings.tree if seen.report else None
    expected = seen.section.drafts or (tree.nodes - 1 if tree else None)
    unlike = []
    if tree:
        shape = {"speculative_num_steps": tree.steps, "speculative_eagle_topk": tree.top_k}
        unlike = [
            f"{key} {server.settings[key]} against {value}"
            for key, value in shape.items()
            if server.settings.get(key) not in (None, value)
        ]
    reported = [each for run in seen.runs for each in run.rounds]
    rounds, drafted = sum(each.rounds for each in reported), sum(each.drafted for each in reported)
    each_round = server.drafted_tokens or (round(drafted / rounds) if drafted and rounds else None)
    if expected and each_round and each_round != expected:
        unlike.append(f"{each_round} drafted tokens a round against {expected}")
    if unlike:
        fix = "start the server with the report's tree, or evaluate with eval.tree as it has it"
        text = f"it drafts other trees: {'; '.join(unlike)}"
        yield finding("warning", "tree_differs", text, fix)


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
