"""What is remarkable about a server, beside what the decoder reported of the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.config import LiveServerSection
from pipeline.reports import EvalReport, RoundCounters, ServerFinding
from pipeline.serve_eval.live.golden import PairedTau, compare, parted
from pipeline.serve_eval.live.measure import LoadRun
from pipeline.serve_eval.live.servers import LiveServer

#: A head that fits accepts something; below this τ nothing useful was drafted.
_NOTHING_ACCEPTED = 1.05
#: τ may move so much between concurrencies, by near-ties and by the prompts that are sent again.
_UNDER_LOAD = 0.10
_ORDER = ("error", "warning", "note")


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
        """At the lowest concurrency, where the server tells of single requests."""
        told = {
            reply.question.request_id: reply.told
            for reply in self.runs[0].replies
            if reply.told is not None
        }
        vllm = self.server.kind == "vllm"
        return compare(told, self.expected, drafts_only=vllm)


def findings_of(seen: SeenServer) -> tuple[ServerFinding, ...]:
    """The gravest first."""
    drafting = (_not_plain,) if seen.section.plain else (_acceptance, _against_report, _settings)
    parts = (_failures, *drafting, _template, _replies, _counting)
    every = [finding for part in parts for finding in part(seen)]
    return tuple(sorted(every, key=lambda each: _ORDER.index(each.severity)))


def _failures(seen: SeenServer) -> Iterator[ServerFinding]:
    for run in seen.runs:
        if failed := run.failed.total():
            reasons = ", ".join(f"{count} x {name}" for name, count in run.failed.most_common())
            asked = failed + len(run.replies)
            text = f"{failed} of {asked} requests failed at concurrency {run.concurrency}"
            fix = "look at the server's log; figures are of the others"
            yield ServerFinding(
                severity="error", name="requests_failed", text=f"{text}: {reasons}", fix=fix
            )


def _not_plain(seen: SeenServer) -> Iterator[ServerFinding]:
    """Whether what should decode plainly drafts."""
    if drafted := sum(each.drafted for run in seen.runs for each in run.told):
        text = f"the server should decode plainly (eval.server.plain), and drafted {drafted} tokens"
        fix = "start it without its speculative options, or set eval.server.plain=false"
        yield ServerFinding(severity="error", name="not_plain", text=text, fix=fix)


def _acceptance(seen: SeenServer) -> Iterator[ServerFinding]:
    """Whether it drafts at all, and whether it still does under load."""
    told = [(run.concurrency, run.acceptance_length) for run in seen.runs]
    lengths = [(count, tau) for count, tau in told if tau is not None]
    if not lengths:
        where = "its /metrics has no counters of spec_decode"
        if seen.server.kind != "vllm":
            where = "its replies have no spec_verify_ct"
        yield ServerFinding(
            severity="error" if seen.report or seen.section.drafts else "warning",
            name="no_acceptance",
            text=f"the server tells nothing of speculation: {where}",
            fix="start it with its speculative options; plain decoding tells nothing either",
        )
        return
    tau = lengths[0][1]
    own = seen.paired.decoder.value if seen.paired else None
    if tau < _NOTHING_ACCEPTED and (own is None or own >= _NOTHING_ACCEPTED):
        yield ServerFinding(
            severity="error",
            name="head_not_loaded",
            text=f"the server's τ is {tau:.2f}: the head was not loaded, or not with its weights",
            fix="compare the draft model's path with the head directory, and its layers with "
            "`eagle3 inspect HEAD`",
        )
    for count, under_load in lengths[1:]:
        if abs(under_load - tau) > _UNDER_LOAD * tau:
            text = f"τ is {tau:.2f} at concurrency {lengths[0][0]} and {under_load:.2f} at {count}"
            if trees := seen.server.settings.get("speculative_trees"):
                by_batch = ", ".join(f"{tree} from batch {rows}" for rows, tree in trees.items())
                text, fix = f"{text}, as it drafts {by_batch}", "nothing"
            else:
                fix = "look for an option that stops drafting in large batches; prompts that are "
                fix += "sent twice may also differ in length"
            yield ServerFinding(
                severity="note" if trees else "warning",
                name="changes_under_load",
                text=text,
                fix=fix,
            )


def _against_report(seen: SeenServer) -> Iterator[ServerFinding]:
    if seen.report is None:
        text = "no report of the decoder to compare with: figures stand alone"
        fix = "run `eagle3 eval` first, where the decoder runs this target"
        yield ServerFinding(severity="note", name="no_report", text=text, fix=fix)
        return
    fix = "compare head, tree and target with the report's; quantised weights change τ a little"
    if paired := seen.paired:
        if paired.differs(seen.section.tolerance):
            yield ServerFinding(
                severity="error",
                name="acceptance_differs",
                text=f"the server's {paired.text}",
                fix=fix,
            )
        return
    tau, figures = seen.runs[0].acceptance_length, seen.report.acceptance
    if not seen.expected:
        text = "the decoder's report has none of these prompts, or another max_new_tokens"
        fix = "evaluate with the configuration of the report"
        yield ServerFinding(severity="note", name="not_comparable", text=text, fix=fix)
    elif tau is not None and figures is not None:
        decoder = figures.acceptance_length
        if not decoder.low <= tau <= decoder.high:
            text = f"the server's τ is {tau:.2f}, outside of the decoder's {decoder.value:.2f}"
            text += f" ({decoder.low:.2f} to {decoder.high:.2f})"
            yield ServerFinding(severity="error", name="acceptance_differs", text=text, fix=fix)


def _template(seen: SeenServer) -> Iterator[ServerFinding]:
    """What its chat endpoint makes of messages, and what it makes of token ids."""
    wrong = [each for each in seen.template if not each[3]]
    if wrong:
        name, theirs, ours, _ = wrong[0]
        text = f"its template differs: prompt tokens {theirs} against {ours} for {name}"
        if theirs == ours:
            text = f"its template differs: as many prompt tokens, {ours}, but others, for {name}"
        if len(seen.template) > 1:
            text += f" ({len(wrong)} of {len(seen.template)} prompts)"
        fix = "give the server the target's own chat template, system prompt and template variables"
        yield ServerFinding(severity="error", name="template_differs", text=text, fix=fix)
    changed = [
        reply
        for reply in seen.runs[0].replies
        if reply.prompt_tokens not in (None, len(reply.question.context))
    ]
    if changed:
        first = changed[0]
        text = f"it read {first.prompt_tokens} tokens where {len(first.question.context)} were sent"
        fix = "it adds tokens to token ids: look for an option on special tokens"
        yield ServerFinding(severity="error", name="prompt_changed", text=text, fix=fix)


def _replies(seen: SeenServer) -> Iterator[ServerFinding]:
    golden = seen.report.golden if seen.report else None
    if golden is None or golden.max_new_tokens != seen.new_tokens:
        return
    ids = {
        reply.question.request_id: reply.token_ids
        for reply in seen.runs[0].replies
        if reply.token_ids is not None
    }
    compared, differing = parted(ids, golden)
    if differing:
        text = f"replies differ from the decoder's greedy tokens on {len(differing)} of "
        text += f"{len(compared)} prompts, first {differing[0]}"
        fix = "a few part at near-ties of another arithmetic; if most do, compare the weights, "
        fix += "their type and the sampling defaults"
        yield ServerFinding(severity="warning", name="replies_differ", text=text, fix=fix)


def _settings(seen: SeenServer) -> Iterator[ServerFinding]:
    """Its tree against the report's."""
    server, tree = seen.server, seen.report.settings.tree if seen.report else None
    wanted = seen.section.drafts or (tree.nodes - 1 if tree else None)
    named = (
        {"speculative_num_steps": tree.steps, "speculative_eagle_topk": tree.top_k} if tree else {}
    )
    unlike = [
        f"{key} {server.settings[key]} against {value}"
        for key, value in named.items()
        if server.settings.get(key) not in (None, value)
    ]
    told = [each for run in seen.runs for each in run.told]
    rounds, drafted = sum(each.rounds for each in told), sum(each.drafted for each in told)
    each_round = server.drafted_tokens or (round(drafted / rounds) if drafted and rounds else None)
    if wanted and each_round and each_round != wanted:
        unlike.append(f"{each_round} drafted tokens a round against {wanted}")
    if unlike:
        fix = "start the server with the report's tree, or evaluate with eval.tree as it has it"
        text = f"it drafts other trees: {'; '.join(unlike)}"
        yield ServerFinding(severity="warning", name="tree_differs", text=text, fix=fix)


def _counting(seen: SeenServer) -> Iterator[ServerFinding]:
    for run in seen.runs:
        if run.counted is not None and not run.failed and run.counted.generated != run.tokens:
            text = f"it counted {run.counted.generated} generated tokens at concurrency "
            text += f"{run.concurrency}, {run.tokens} came back"
            fix = "others use this server: measure it alone"
            if run.counted.generated < run.tokens:
                fix = "its /metrics may be of one of several processes: ask a single one"
            yield ServerFinding(severity="warning", name="other_traffic", text=text, fix=fix)
    if pooled := [str(run.concurrency) for run in seen.runs if run.pooled]:
        text = f"acceptance at concurrency {', '.join(pooled)} is of all requests together"
        fix = "nothing: this server does not tell it by request, so there is no interval"
        yield ServerFinding(severity="note", name="acceptance_pooled", text=text, fix=fix)
