"""README.md of a head that is given away: a model card as the Hugging Face hub reads it.

Everything in it comes from the head's own files and, where there is one, from a report of
evaluation. Nothing is said that they do not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from pipeline.console import markdown_text
from pipeline.errors import DataError
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard, is_hub_id, without_places
from pipeline.heads.registry import algorithm_of
from pipeline.reports import AcceptanceFigures, EvalReport, ShapeAcceptance
from pipeline.store.hub import license_fields

MODEL_CARD = "README.md"
#: What the ways of decoding are called that a speedup is over.
_RIVALS = {"plain": "plain decoding", "hf": "Hugging Face generate"}
_REFERENCE = {
    True: "gives transformers' tokens in fp32",
    False: "does NOT give transformers' tokens in fp32",
    None: "was not compared with transformers",
}
#: Sources of training data that are listed one by one.
_SOURCES = 20


def model_card(
    head: DraftingHead,
    card: HeadCard,
    *,
    format: str,
    verifier: str | None = None,
    report: EvalReport | None = None,
    where: str = "--report",
    license: str | None = None,
) -> str:
    """`verifier` is where config.json of speculators' dialect says that the target is, if it does,
    `license` the head's, which its owners choose.

    Raises DataError for a report of another target, or of a drafter without a head.
    """
    if report is not None:
        _check_report(card, report, where)
    base = card.contract.source
    parts = [
        f"---\n{_metadata(card, base, report, license)}---",
        f"# Draft head for {markdown_text(base)}",
        _about(head, card),
        _measured(report) if report else "",
        _serving(head, base, format, verifier, report),
        _made_of(card),
        _limits(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _check_report(card: HeadCard, report: EvalReport, where: str) -> None:
    if not card.contract.has_weights_of(report.contract) or not report.head:
        problem = "this report is of another target" if report.head else "it is of no trained head"
        raise DataError(problem, where=where, fix="give the report of this head's evaluation")
    if without_places(report.provenance) != without_places(card.provenance):
        problem = "this report is of another head: its provenance differs"
        raise DataError(problem, where=where, fix="give the report of this head's evaluation")


def _metadata(card: HeadCard, base: str, report: EvalReport | None, license: str | None) -> str:
    """The YAML block (huggingface.co/docs/hub/model-cards)."""
    fields: dict[str, Any] = {
        **(license_fields([license]) if license else {}),
        "tags": ["speculative-decoding", "eagle3", "draft-model"],
        "pipeline_tag": "text-generation",
    }
    if is_hub_id(base):
        fields = {"base_model": base} | fields
    if report:
        named = sorted({each.source for each in report.prompts if each.source}) or ["prompts"]
        beside = _beside(report)
        name = f"acceptance length τ{beside}"
        metrics = [_metric("acceptance_length", name, report.acceptance_length)]
        if beside and (alone := report.of_drafter_alone):
            tau = alone.acceptance_length.value
            metrics.insert(0, _metric("acceptance_length", "acceptance length τ", tau))
        if speedup := report.speedup.get("plain"):
            name = f"speedup{beside} over plain decoding"
            metrics.append(_metric("speedup", name, speedup))
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"name": ", ".join(named), "type": "prompts"},
            "metrics": metrics,
        }
        fields["model-index"] = [{"name": f"draft head for {base}", "results": [result]}]
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def _metric(kind: str, name: str, value: float) -> dict[str, Any]:
    return {"type": kind, "name": name, "value": round(value, 3)}


def _about(head: DraftingHead, card: HeadCard) -> str:
    contract, parameters = card.contract, head.count_parameters()
    share = 100 * parameters / contract.parameters
    kind = algorithm_of(head).describe(head)
    return (
        f"This is {kind} of {parameters:,} parameters ({share:.1f} % of the target's). It makes "
        f"{markdown_text(contract.source)} decode faster; with the same target greedy output is "
        f"the same, token for token. It proposes {head.shape.draft_vocab_size:,} of "
        f"{contract.vocab_size:,} tokens, and reads the target's layers "
        f"{', '.join(map(str, contract.capture_layers))} (by output index).\n\n"
        f"It belongs to one target: fingerprint {_code(contract.fingerprint)}, revision "
        f"{markdown_text(contract.revision)}, chat template "
        f"{_code(contract.chat_template_hash[:16])}. With another one, or another template, it "
        "accepts less."
    )


def _measured(report: EvalReport) -> str:
    tree, figures = report.settings.tree, report.acceptance
    beside = _beside(report)
    shape = f"top_k {tree.top_k}, steps {tree.steps}, nodes {tree.nodes}" if tree else "none"
    rows = [
        *_alone(report),
        f"* acceptance length τ{beside} **{report.acceptance_length:.2f}**{_interval(figures)}, "
        "bonus token included",
        *(
            f"* **{ratio:.2f}×** {_RIVALS.get(rival) or markdown_text(rival)}"
            f"{beside and ',' + beside}"
            for rival, ratio in report.speedup.items()
            if ratio
        ),
        f"* tree: {shape}; {len(report.prompts)} requests of at most "
        f"{report.settings.max_new_tokens} tokens, greedy, one at a time",
        f"* {markdown_text(report.settings.device)}, {markdown_text(report.settings.dtype)}",
        f"* fp32 output {'is' if report.lossless.greedy_fp32 else 'is NOT'} that of plain "
        f"decoding on {report.lossless.prompts_checked} requests; plain decoding "
        f"{_REFERENCE[report.plain_is_the_target]}",
        *_golden(report),
    ]
    categories = [
        f"| {markdown_text(name)} | {row.acceptance_length:.2f} |"
        for name, row in report.by_category.items()
    ]
    table = (
        "\n".join([f"| category | τ{beside} |", "|---|---:|", *categories]) if categories else ""
    )
    return "\n\n".join(part for part in ("## Measured", "\n".join(rows), table) if part)


def _beside(report: EvalReport) -> str:
    """Said of figures that are not the head's alone."""
    return "" if report.drafter.lookup is None else " with a lookup of earlier text"


def _alone(report: EvalReport) -> list[str]:
    """Of the head, where the report's own figures are of a lookup, too."""
    figures = report.of_drafter_alone
    if report.drafter.lookup is None or figures is None:
        return []
    tau = f"**{figures.acceptance_length.value:.2f}**{_interval(figures)}"
    prompts = f"first turns of {figures.requests} prompts"
    return [f"* acceptance length τ {tau} of the head alone, on {prompts}"]


def _interval(figures: AcceptanceFigures | None) -> str:
    if figures is None:
        return ""
    tau = figures.acceptance_length
    return f" (95 % of draws of prompts: {tau.low:.2f} … {tau.high:.2f})"


def _golden(report: EvalReport) -> list[str]:
    """What `eagle3 check-serving` holds a server against."""
    golden = report.golden
    if golden is None:
        return []
    tau = golden.acceptance_length
    return [
        f"* golden τ {tau.value:.3f} with that tree, on {len(golden.prompts)} prompts (token ids "
        f"{_code(golden.prompts_digest[:16])}, replies of at most {golden.max_new_tokens} tokens, "
        f"weights {_code(golden.head_fingerprint[:16])}): `eagle3 check-serving --server URL "
        "--report report.json` asks a running server the same"
    ]


def _serving(
    head: DraftingHead, base: str, format: str, verifier: str | None, report: EvalReport | None
) -> str:
    """Commands of servers that read this format; they were not run for this head."""
    target = base if is_hub_id(base) else "TARGET"
    shapes = report.shapes if report else ()
    own = next((each for each in shapes if each.own), None)
    chain = next((each for each in shapes if each.top_k == 1), None)
    tree = (own.steps, own.top_k, own.nodes) if own else (3, 1, 4)
    tokens = chain.steps if chain else 3
    serve = algorithm_of(head).serve_command(head.shape, format, target, tree, tokens)
    if serve is None:
        return "## Serving\n\nSee docs/head-format.md of the pipeline for who reads this format."
    command, other, expected = serve.command, serve.other, own
    if serve.chain:
        chains = (each for each in shapes if each.top_k == 1 and each.steps == serve.chain)
        expected = next(chains, None)
    where = "HEAD is this directory" + (", TARGET the target’s" if target == "TARGET" else "")
    if verifier is not None:
        alone = "`vllm serve HEAD` does the same with as many tokens as config.json says"
        where += f". {alone}, which names {markdown_text(verifier)} as the target"
    source = "The command follows the server's documentation"
    if serve.tried:
        source = f"Another head was served so ({serve.tried})"
    return (
        f"## Serving\n\n```bash\n{command}\n```\n\n{where}. {_expected(expected, own)}{other} "
        f"{source}; it was not run for this head. `eagle3 eval --server URL` says whether a "
        "running server reaches what was measured here."
    )


def _expected(shape: ShapeAcceptance | None, own: ShapeAcceptance | None) -> str:
    if shape is None:
        return ""
    if shape.own:
        return "This is the draft of which τ is above. "
    tau, prompts = shape.acceptance.acceptance_length, shape.acceptance.requests
    said = f"With this draft τ is {tau.value:.2f} ({tau.low:.2f} … {tau.high:.2f}) on the first "
    said += f"turns of {prompts} prompts"
    above = (
        f", where the tree above has {own.acceptance.acceptance_length.value:.2f}" if own else ""
    )
    return f"{said}{above}. "


def _made_of(card: HeadCard) -> str:
    """Provenance, as far as the head carries it."""
    provenance: Mapping[str, Any] = card.provenance
    lines = ["## Made of", ""]
    if licenses := provenance.get("licenses"):
        lines.append(f"* prompts by licence: {_counts(licenses)}")
    if sources := provenance.get("sources"):
        largest = dict(sorted(sources.items(), key=lambda each: -each[1])[:_SOURCES])
        more = len(sources) - len(largest)
        rest = f", and {more} more" if more else ""
        lines.append(f"* prompts by source: {_counts(largest)}{rest}")
    for stage, reasons in provenance.get("rejected", {}).items():
        if reasons:
            counts = ", ".join(
                f"{markdown_text(name)} {count:,}" for name, count in reasons.items()
            )
            lines.append(f"* left out in {markdown_text(stage)}: {counts}")
    for stage, value in provenance.get("manifests", {}).items():
        lines.append(f"* manifest of {markdown_text(stage)}: {_code(str(value))}")
    if made := provenance.get("imported from"):
        lines.append(f"* imported from {markdown_text(str(made))}; nothing else is known")
    return "\n".join(lines) if len(lines) > 2 else ""


def _code(digest: str) -> str:
    """A digest as a span of code; what could end the span is not of a digest."""
    return f"`{re.sub(r'[^0-9A-Za-z:._-]', '?', digest[:80])}`"


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{markdown_text(name)} {count:,}" for name, count in numbers.items())


def _limits(card: HeadCard) -> str:
    coverage = card.metrics.get("coverage")
    known = f" They cover {100 * coverage:.1f} % of its training labels." if coverage else ""
    return (
        "## Limits\n\nA draft head changes the speed of its target and not what it says: the "
        "target's own limits and biases stay. On texts unlike its training data it accepts less. "
        f"Tokens outside the draft vocabulary are never proposed.{known}"
    )
