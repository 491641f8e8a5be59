"""The model card of an exported head: what the hub parses, and what people copy from it."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

from pipeline.cli import main
from pipeline.config import TreeSection
from pipeline.errors import DataError
from pipeline.exchange.model_card import model_card
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import save_head
from pipeline.reports import Estimate, EvalReport, GoldenFigure
from tests.heads.test_checkpoint import CONTRACT, SHAPE
from tests.serve_eval.test_pages import whole_report

PROVENANCE: dict[str, Any] = {
    "licenses": {"MIT": 812, "CC-BY-4.0": 3},
    "sources": {"a|b <script>": 700, **{f"set {n}": n for n in range(30)}},
    "rejected": {"synth": {"pii:EMAIL_ADDRESS": 12}, "features": {}},
    "manifests": {"synth": "0c" * 32},
}
HUB = CONTRACT.model_copy(update={"source": "org/model", "revision": "main"})


def head() -> Eagle3Head:
    made = Eagle3Head(SHAPE)
    made.set_vocabulary(torch.arange(SHAPE.draft_vocab_size))
    return made


def evaluated(**changes: Any) -> EvalReport:
    shapes = whole_report().shapes
    own = shapes[0].model_copy(
        update={"name": "5/4/16", "own": True, "steps": 5, "top_k": 4, "nodes": 16}
    )
    report = whole_report().model_copy(
        update={"contract": HUB, "provenance": PROVENANCE, "shapes": (*shapes, own)}
    )
    return report.model_copy(update=changes)


def front_matter(text: str) -> dict[str, Any]:
    _, metadata, _ = text.split("---\n", 2)
    parsed = yaml.safe_load(metadata)
    assert isinstance(parsed, dict)
    return parsed


def command_of(text: str) -> list[str]:
    (block,) = re.findall(r"```bash\n(.*?)\n```", text, re.S)
    return shlex.split(block.replace("\\\n", " "))


def test_the_hub_reads_its_metadata() -> None:
    card = HeadCard(HUB, PROVENANCE, {"coverage": 0.97})
    metadata = front_matter(model_card(head(), card, format="sglang", report=evaluated()))
    assert metadata["base_model"] == "org/model"
    assert {"speculative-decoding", "eagle3"} <= set(metadata["tags"])
    ((result,),) = [each["results"] for each in metadata["model-index"]]
    figures = {each["type"]: each["value"] for each in result["metrics"]}
    assert figures == {"acceptance_length": 1.714, "speedup": 1.244}
    assert "license" not in metadata, "nobody has said under which licence the head is given"


def test_without_a_report_nothing_is_said_of_speed() -> None:
    text = model_card(head(), HeadCard(CONTRACT, PROVENANCE, {}), format="sglang")
    assert "model-index" not in front_matter(text) and "base_model" not in front_matter(text)
    assert "## Measured" not in text and "×" not in text and "With this draft τ" not in text


@pytest.mark.parametrize("format", ["sglang", "speculators"])
def test_the_command_has_the_shape_that_was_measured(format: str) -> None:
    text = model_card(head(), HeadCard(HUB, PROVENANCE, {}), format=format, report=evaluated())
    words = command_of(text)
    if format == "sglang":
        assert words[:2] == ["sglang", "serve"]
        options = dict(zip(words[2::2], words[3::2], strict=True))
        assert options["--model-path"] == "org/model"
        assert options["--speculative-algorithm"] == "EAGLE3"
        named = ("num-steps", "eagle-topk", "num-draft-tokens")
        assert [options[f"--speculative-{each}"] for each in named] == ["5", "4", "16"]
        assert "This is the draft of which τ is above." in text
    else:
        assert words[:4] == ["vllm", "serve", "org/model", "--speculative-config"]
        spoken = json.loads(words[4])
        assert spoken == {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}
        assert re.search(r"With this draft τ is .* on the first turns of \d+ prompts, where", text)
    assert "it was not run for this head" in text


def test_the_golden_figure_is_what_servers_are_held_against() -> None:
    golden = GoldenFigure(
        head_fingerprint="ab" * 32,
        target_fingerprint=HUB.fingerprint,
        drafter="eagle3",
        tree=TreeSection(top_k=4, steps=5, nodes=16),
        temperature=0.0,
        max_new_tokens=48,
        stop_ids=(2,),
        prompts_digest="cd" * 32,
        acceptance_length=Estimate(value=1.8765, low=1.7, high=2.0),
        prompts=(),
    )
    card = HeadCard(HUB, PROVENANCE, {})
    text = model_card(head(), card, format="sglang", report=evaluated(golden=golden))
    assert "golden τ 1.877" in text and "`abababababababab`" in text and "check-serving" in text
    assert "golden" not in model_card(head(), card, format="sglang", report=evaluated())


def test_figures_with_a_lookup_are_not_said_of_the_head() -> None:
    """The head's own is what was replayed of the report's tree, which servers draft."""
    report, card = evaluated(), HeadCard(HUB, PROVENANCE, {})
    own = report.shapes[-1].acceptance
    beside = report.drafter.model_copy(update={"lookup": {"min_match": 1}})
    both = evaluated(drafter=beside, acceptance_length=3.456)
    assert both.of_drafter_alone == own and report.of_drafter_alone == report.acceptance
    text = model_card(head(), card, format="sglang", report=both)
    value = own.acceptance_length.value
    assert f"acceptance length τ **{value:.2f}** (95 %" in text and "of the head alone" in text
    assert "acceptance length τ with a lookup of earlier text **3.46**" in text
    result = front_matter(text)["model-index"][0]["results"][0]
    named = [(each["name"], each["value"]) for each in result["metrics"]]
    assert named[0] == ("acceptance length τ", round(value, 3))
    assert named[1] == ("acceptance length τ with a lookup of earlier text", 3.456)
    assert all("lookup" in name for name, _ in named[1:])
    assert "lookup" not in model_card(head(), card, format="sglang", report=report)
    unknown = model_card(
        head(), card, format="sglang", report=both.model_copy(update={"shapes": ()})
    )
    assert "of the head alone" not in unknown


def test_where_it_comes_from_and_no_markup_of_data() -> None:
    text = model_card(head(), HeadCard(HUB, PROVENANCE, {}), format="sglang", report=evaluated())
    assert "MIT 812, CC-BY-4.0 3" in text and "pii:EMAIL_ADDRESS 12" in text
    assert "and 11 more" in text and "0c0c" in text
    assert "<script" not in text and "a\\|b &lt;script&gt; 700" in text


def test_another_heads_report_is_refused() -> None:
    card = HeadCard(HUB, PROVENANCE, {})
    with pytest.raises(DataError, match="of another head"):
        model_card(head(), card, format="sglang", report=evaluated(provenance={}))
    with pytest.raises(DataError, match="of no trained head"):
        model_card(head(), card, format="sglang", report=evaluated(head=None))
    other = HUB.model_copy(update={"fingerprint": "00" * 32})
    with pytest.raises(DataError, match="of another target"):
        model_card(head(), card, format="sglang", report=evaluated(contract=other))


def test_export_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_head(tmp_path / "head", head(), HeadCard(HUB, PROVENANCE, {}))
    (tmp_path / "report.json").write_text(evaluated().model_dump_json())
    command = ["export", str(tmp_path / "head"), "--format", "sglang", "--out"]
    report = ["--report", str(tmp_path / "report.json")]
    assert main([*command, str(tmp_path / "given"), *report]) == 0
    text = (tmp_path / "given/README.md").read_text()
    assert "τ **1.71**" in text
    assert main(["inspect", str(tmp_path / "given")]) == 0
    assert main([*command, str(tmp_path / "plain")]) == 0
    assert "## Measured" not in (tmp_path / "plain/README.md").read_text()
    assert main([*command, str(tmp_path / "none"), "--report", str(tmp_path / "no.json")]) == 2
    assert not (tmp_path / "none").exists()
    capsys.readouterr()


HOSTILE = [
    "a/b\n---\nlicense: mit\n---\n# owned",
    "a/b\n```\n<script>alert(1)</script>\n```bash\nrm -rf ~",
    "a/$(rm -rf ~)`id`",
    "a/b; rm -rf ~ #",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1)) ![y](https://evil.example/p.png)",
    "a|b\n|---|\n| c | d |",
    "\r\n# heading\u2028# heading\u2029\x85# heading\x0c# heading",
    "`` ` ``` ~~~ ** __ ~~ $x$ @everyone #1 \\",
    "\u202egnp.exe\u200b \x1b[31m",
    "<!-- --> <details> &lt;script&gt; &#60;b&#62;",
]


cached_report = cache(evaluated)


@cache
def hostile_card(text: str, format: str) -> str:
    """A card whose every free text is `text`."""
    contract = HUB.model_copy(
        update=dict.fromkeys(("source", "revision", "fingerprint", "chat_template_hash"), text)
    )
    texts = dict.fromkeys((text, text + "2"), 3)
    provenance: dict[str, Any] = {
        **dict.fromkeys(("licenses", "sources"), texts),
        "rejected": {text: texts},
        "manifests": {text: text},
        "imported from": text,
    }
    whole = cached_report()
    changes = {
        "contract": contract,
        "provenance": provenance,
        "by_category": dict.fromkeys(texts, next(iter(whole.by_category.values()))),
        "speedup": {text: 1.5, "plain": 1.2},
        "settings": whole.settings.model_copy(update={"device": text, "dtype": text}),
        "prompts": tuple(each.model_copy(update={"source": text}) for each in whole.prompts),
    }
    report = whole.model_copy(update=changes)
    card = HeadCard(contract, provenance, {"coverage": 0.9})
    return model_card(head(), card, format=format, verifier=text, report=report)


def markup(text: str) -> list[str]:
    """Kinds of all blocks and spans that a Markdown reader sees, links and HTML among them."""
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    blocks = reader.parse(text.split("\n---\n", 1)[1])
    spans = [span for block in blocks for span in block.children or ()]
    return [each.type for each in (*blocks, *spans) if each.type not in ("text", "text_special")]


@pytest.mark.parametrize("format", ["sglang", "speculators"])
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_data_is_no_markup(text: str, format: str) -> None:
    hostile = hostile_card(text, format)
    same = markup(hostile) == markup(hostile_card("ordinary", format))
    assert same, "data has become markup"
    assert "<" not in hostile.split("\n---\n", 1)[1]
    (block,) = re.findall(r"^```bash\n(.*?)\n```$", hostile, re.S | re.M)
    assert "rm -rf" not in block and "$(" not in block
    # As huggingface_hub cuts it out.
    cut = re.match(r"^(\s*---[\r\n]+)([\S\s]*?)([\r\n]+---(\r\n|\n|\Z))", hostile)
    assert cut is not None
    metadata = yaml.safe_load(cut[2])
    assert set(metadata) == {"tags", "pipeline_tag", "model-index"}
    assert "license" not in metadata
