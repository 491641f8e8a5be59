"""datasheet.md: the audit of a run for people, rendered from audit.json and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from pipeline.console import markdown_text
from pipeline.synth.audit import Audit, HistogramBin, Lengths

DATASHEET = "datasheet.md"
Rows = list[tuple[str, ...]]

_BAR = 40  # characters of the longest bar
_MOST_ROWS = 30  # of a table that grows with the data
_LONGEST_CELL = 300  # characters

#: Reasons as people read them; a reason with a colon goes by what stands before it.
_MEANING = {
    "record": "record that cannot be read",
    "license": "licence not on the allow-list",
    "duplicate": "said before",
    "contaminated": "matches an evaluation prompt",
    "max_prompts": "beyond the run's number of prompts",
    "pii": "personal data or a secret",
    "prompt_too_long": "prompt longer than the limit",
    "too_short": "reply shorter than the limit",
    "length": "reply cut off at the limit, and such are dropped",
    "long": "more characters than the limit",
    "tools_not_in_template": "has tools, which the chat template does not show",
    "not_rendered": "the chat template fails on it",
    "remote": "a server's answer could not be used",
}

_ENDED = {
    "complete": "every turn was answered",
    "length": "the last reply reached the length limit",
    "prompt_too_long": "the next turn would have made the prompt too long",
    "no_tool_call": "a tool's answer came next, and the target had called none",
    "template_rewrites": "the chat template would have changed earlier turns",
    "other_stop_token": "the reply ended with a stop token that the template does not write",
    "not_rendered": "the chat template fails on the next turn",
    "not_aligned": "the chat template's tokens are of another text than was read and generated",
}

_HISTOGRAMS = {"prompt": "First prompts", "reply": "Replies", "conversation": "Conversations"}
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "samples")
_CONTRACT = ("source", "revision", "fingerprint", "dtype", "tokenizer_hash", "chat_template_hash")


def write_datasheet(audit: Audit) -> str:
    """Markdown."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"number": _number, "listed": _listed, "table": _table, "drawn": _drawn}
    source = resources.files("pipeline.synth").joinpath("datasheet.md.j2")
    policy = dict(audit.personal_data["policy"])
    largest_first = sorted(audit.categories.items(), key=lambda item: (-item[1], item[0]))
    shown = [name for name in _HISTOGRAMS if name in audit.lengths]
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        audit=audit,
        sources=_sources(audit),
        categories=_counted(dict(largest_first)),
        rejected=_rejected(audit),
        policy={"enabled": policy.pop("enabled", False), "settings": policy},
        personal_data=_personal_data(audit),
        histograms=[(_HISTOGRAMS[name], audit.lengths[name]) for name in shown],
        generators=_counted(audit.generators),
        sampling=[tuple(f"{setting[name]:g}" for name in _SAMPLING) for setting in audit.sampling],
        sampling_columns=_SAMPLING,
        variants=_counted(audit.variants),
        coverage=[
            (_number(int(size)), f"{share:.2%}")
            for size, share in audit.forecast["coverage"].items()
        ],
        ended=[
            (_ENDED.get(reason, reason), _number(count)) for reason, count in audit.ended.items()
        ],
        target=_target(audit),
    )


def _sources(audit: Audit) -> Rows:
    rows = []
    for name, source in audit.sources.items():
        licenses = source["licenses"]
        listed = ", ".join(
            f"{license} ({count:,})" if len(licenses) > 1 else license
            for license, count in licenses.items()
        )
        counts = (source[key] for key in ("samples", "tokens", "supervised_tokens"))
        rows.append((name, listed, *map(_number, counts)))
    return rows


def _rejected(audit: Audit) -> Rows:
    return [
        (reason, _MEANING.get(reason.split(":")[0], ""), _number(count))
        for reason, count in audit.rejected.items()
    ]


def _personal_data(audit: Audit) -> Rows:
    """Each type, with its findings and then what was dropped for it; labels drop nothing."""
    data, where = audit.personal_data, ("prompts", "replies", "metadata")
    findings = [
        {entity: counts["findings"] for entity, counts in data["findings"].get(key, {}).items()}
        for key in where
    ]
    columns = [*findings, *(data[f"dropped_{key}"] for key in where[:2])]
    entities = sorted({entity for column in columns for entity in column})
    return [
        (entity, *(_number(column.get(entity, 0)) for column in columns)) for entity in entities
    ]


def _target(audit: Audit) -> Rows:
    contract = audit.target.model_dump(mode="json")
    prompt = audit.settings.get("system_prompt") or "none: the template's own default"
    template = [
        (f"template {name}", str(value))
        for name, value in sorted(audit.template.items())
        if name not in _CONTRACT
    ]
    return [
        *((name, str(contract[name])) for name in _CONTRACT),
        *template,
        ("system prompt of the run", prompt),
    ]


def _counted(counts: Mapping[str, int]) -> Rows:
    return [(name, _number(count)) for name, count in counts.items()]


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _drawn(bar: HistogramBin, lengths: Lengths) -> str:
    """A line of a histogram."""
    most = max(bar.count for bar in lengths.bars)
    drawn = "█" * round(_BAR * bar.count / most) or ("▏" if bar.count else "")
    return f"{bar.start:>6,}+ {drawn:<{_BAR}} {bar.count:,}"


def _table(rows: Sequence[Sequence[str]], *columns: str) -> str:
    """A Markdown table; text from the data stays text of its cell."""
    if not rows:
        return "None."
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(markdown_text(cell, _LONGEST_CELL) for cell in row) + " |"
        for row in rows[:_MOST_ROWS]
    ]
    if len(rows) > _MOST_ROWS:
        lines.append(f"\nand {len(rows) - _MOST_ROWS:,} more, in audit.json")
    return "\n".join(lines)


def _listed(values: Mapping[str, Any]) -> str:
    pairs = (f"{name} {_shown(value)}" for name, value in values.items())
    return "; ".join(markdown_text(pair, _LONGEST_CELL) for pair in pairs) or "none"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
