"""The parts of a report that not every evaluation has, on the page and in Markdown."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.reports import (
    Estimate,
    EvalReport,
    LoadCurve,
    LoadPoint,
    PairedComparison,
    Percentiles,
    ServerFinding,
    ServerResult,
    ServerWorkload,
    ShapeAcceptance,
)
from pipeline.serve_eval.intervals import acceptance_figures
from pipeline.serve_eval.pages import write_html, write_markdown
from pipeline.serve_eval.summary import grouped_acceptance
from tests.serve_eval.test_acceptance import counted
from tests.serve_eval.test_report import category, made_up_report

NASTY = r"<script>alert(1)</script> $\frac$ a|b & `x` *y*"


def times(seconds: float) -> Percentiles:
    return Percentiles(mean=seconds, p50=seconds, p90=2 * seconds, p99=3 * seconds)


def curve(name: str, **settings: Any) -> LoadCurve:
    figures = acceptance_figures([counted(2, 1, 0)] * 9, [str(n) for n in range(9)])
    points = tuple(
        LoadPoint(
            concurrency=count,
            temperature=0.0,
            requests=9,
            failed=count // 8,
            seconds=10.0,
            tokens=400 * count,
            throughput=40.0 * count,
            ttft_seconds=times(0.012 * count),
            tpot_seconds=times(0.0345 / count),
            acceptance=None if name == "plain" else figures,
            round_seconds={} if name == "plain" else {"verify": 0.011, "draft": 0.0021},
            efficiency=None if name == "plain" else 0.77,
        )
        for count in (1, 4, 8)
    )
    return LoadCurve(name=name, settings=settings, points=points)


def whole_report() -> EvalReport:
    report = made_up_report()
    prompts = tuple(
        each.model_copy(
            update={
                "counters": counted(2, 1, 0, index % 3),
                "turn": 1 + index % 2,
                "context_tokens": 30 << index % 4,
                "category": NASTY if index < 4 else each.category,
            }
        )
        for index, each in enumerate(report.prompts)
    )
    categories = {NASTY: category(acceptance_length=1.83)}
    categories |= {name: row for name, row in report.by_category.items() if name != "writing"}
    grouped = grouped_acceptance(prompts)
    assert grouped.acceptance is not None
    rival = PairedComparison(
        rival=NASTY,
        settings={"head": NASTY},
        requests=32,
        prompts=32,
        acceptance_length=Estimate(value=1.61, low=1.5, high=1.7),
        difference=Estimate(value=0.104, low=0.062, high=0.148),
        speed_ratio=Estimate(value=1.07, low=1.01, high=1.13),
        verdict="better",
        smallest_seen=0.043,
    )
    finding = ServerFinding(
        severity="error",
        name="head_not_loaded",
        text=f"its τ is 1.02, the head was not loaded {NASTY}",
        fix="start it with --speculative-draft-model-path",
    )
    server = ServerResult(
        url="http://127.0.0.1:30000",
        kind="sglang",
        version="0.5.6",
        model=NASTY,
        created="2026-11-23T12:00:00+00:00",
        workload=ServerWorkload(
            prompts=32, prompts_digest="cd" * 32, max_new_tokens=64, temperature=0.0
        ),
        server_settings={"speculative_num_steps": 3},
        curve=curve("sglang", model=NASTY),
        pooled=(),
        failures={},
        expected=None,
        prompts=(),
        findings=(finding,),
    )
    changes: dict[str, Any] = {
        "prompts": prompts,
        "by_category": categories,
        **grouped._asdict(),
        "shapes": (
            ShapeAcceptance(
                name="3/1/4", own=False, steps=3, top_k=1, nodes=4, acceptance=grouped.acceptance
            ),
        ),
        "comparisons": (rival,),
        "load": (curve("plain", temperature=0.0), curve("speculative", temperature=0.0)),
        "servers": (server,),
        "lossless": report.lossless.model_copy(update={"sampled_fp32": {"1": True}}),
    }
    return report.model_copy(update=changes)


@pytest.fixture(scope="module")
def page() -> str:
    return write_html(whole_report())


def test_every_part_has_its_figure(page: str) -> None:
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles == [
        "Acceptance by draft position",
        "Tokens that a round accepted",
        "Acceptance length by category",
        "Acceptance length by turn",
        "Acceptance length by tokens of context",
        "Acceptance length with the drafts of servers",
        "Speed by way of decoding",
        "What acceptance buys",
        "Time per output token against concurrency",
        "Throughput against concurrency",
        "Against rivals",
    ]
    assert page.count("<svg") == len(titles)


def test_figures_stand_in_the_tables(page: str) -> None:
    text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page)))
    assert "+0.104 (+0.062 … +0.148)" in text and "1.07 (1.01 … 1.13)×" in text and "better" in text
    assert "verify 11.0, draft 2.1" in text and "0.77" in text and "9, 1 failed" in text
    assert "sglang at http://127.0.0.1:30000: its τ is 1.02, the head was not loaded" in text
    assert "num_draft_tokens" in text or "num draft tokens" in text


def test_no_text_of_data_becomes_markup(page: str) -> None:
    assert "<script" not in page
    assert page.count(r"$\frac$") >= 6, "drawn as it is, in figures and in tables"


def test_no_element_and_no_attribute_comes_from_data() -> None:
    """As a parser sees the page, with every text of the report hostile: licences, names of prompts,
    of targets, of servers and of what they say."""
    spoiled = _with_texts(
        whole_report(), """\"'><script>alert(1)</script><img src=x onerror=a()>"""
    )
    seen, expected = _elements(write_html(spoiled)), _elements(write_html(whole_report()))
    assert "alert(1)" in spoiled.model_dump_json() and len(expected) > 20
    assert seen <= expected
    assert not {tag for tag, _ in seen} & {"script", "img", "iframe", "object", "a"}


def _with_texts(report: EvalReport, text: str) -> EvalReport:
    """With `text` in every key and value that may be any text."""

    def spoil(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(items):
            if isinstance(each, dict | list):
                spoil(each)
            elif isinstance(each, str):
                value[key] = f"{each}{text}"
                if not _is_valid(tree):
                    value[key] = each
            if isinstance(key, str):
                value[f"{key}{text}"] = value.pop(key)
                if not _is_valid(tree):
                    value[key] = value.pop(f"{key}{text}")

    tree = report.model_dump(mode="json")
    spoil(tree)
    return EvalReport.model_validate(tree)


def _is_valid(tree: dict[str, Any]) -> bool:
    try:
        EvalReport.model_validate(tree)
    except ValidationError:
        return False
    return True


def _elements(page: str) -> set[tuple[str, tuple[str, ...]]]:
    """Tags with the names of their attributes."""
    found: set[tuple[str, tuple[str, ...]]] = set()

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.add((tag, tuple(sorted(name for name, _ in attrs))))

    Parser().feed(page)
    return found


def test_a_plain_report_has_no_empty_parts() -> None:
    page = write_html(made_up_report())
    for part in ("Against rivals", "Under load", "Under the names of others", "drafts of servers"):
        assert part not in page
    assert "|" not in write_markdown(made_up_report(by_category={}))


def test_markdown_for_a_pull_request() -> None:
    text = write_markdown(whole_report())
    assert "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    tables: list[int] = []
    for row in rows:
        cells = len(re.findall(r"(?<!\\)\|", row)) - 1
        if not tables or ("---" not in row and cells != tables[-1]):
            tables.append(cells)
        assert cells == tables[-1], f"a cell of data ends early: {row}"
    assert tables == [4, 3, 4, 7]
    assert "τ **1.71** (" in text and "**1.24×** over plain" in text
    assert "| speculative, temperature 0 | 8 | 320.0 | 1.00× | 96.0 | 4.3 | 2.00 |" in text
    assert "* **error** at http\\://127.0.0.1:30000: its τ is 1.02" in text
    assert "token-identical to plain decoding in fp32, 32 requests" in text


def test_names_on_the_pages_show_every_character() -> None:
    """Terminals obey ESC when they show the page's source or its Markdown."""
    nasty = "chat\x1b]0;title\x07\u202e\nnext"
    report = whole_report()
    report = report.model_copy(
        update={
            "by_category": {nasty: next(iter(report.by_category.values()))},
            "contract": report.contract.model_copy(update={"source": nasty}),
        }
    )
    for page in (write_html(report), write_markdown(report)):
        assert not set("\x1b\x07\u202e") & set(page)
        assert "next" in page and "\nnext" not in page
    assert r"chat\x1b]0;title\x07\u202e\nnext" in write_html(report)
