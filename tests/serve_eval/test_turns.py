"""Later turns, refused prompts and dates in an evaluation, from prompts to report."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig, parse
from pipeline.records import Prompt
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.stage import run
from pipeline.store.manifest import read_begin, read_report, stage_location
from pipeline.store.stage_run import open_stage
from pipeline.target.open import open_target
from tests.conftest import CHATML, QUESTIONS, save_tiny_llama
from tests.target.test_alignment import TEMPLATES, after_last_reply
from tests.target.tokenizers import metaspace

DATED = "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHATML
REFUSING = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + DATED
#: The mark that a reply never holds, so that turns are rewritten.
NUMBERED = "{{ messages | length }}" + REFUSING


def config_of(tmp_path: Path, target: Path, **section: Any) -> RunConfig:
    tree = {
        "run": {"uri": str(tmp_path / "run"), "threads": 1},
        "target": {"source": str(target), "dtype": "float32", "device": "cpu"},
        "synth": {"sources": [{"source": str(tmp_path / "p.jsonl")}]},
        "eval": {
            "prompts": str(tmp_path / "p.jsonl"),
            "drafter": {"name": "ngram"},
            "max_new_tokens": 6,
            "max_turns": 2,
            "hf_prompts": 0,
            "tree": {"top_k": 1, "steps": 3, "nodes": 4},
            **section,
        },
    }
    return parse(tree)


def test_contexts_of_later_turns_are_transformers_own(tmp_path: Path) -> None:
    """Replies are cut at the limit, or end by themselves."""
    tokenizer = metaspace("first")
    tokenizer.chat_template, end = TEMPLATES["TinyLlama"]
    save_tiny_llama(tmp_path / "target", tokenizer, seed=3)
    end_id = tokenizer.convert_tokens_to_ids(end)
    config = config_of(tmp_path, tmp_path / "target", max_turns=3)
    target = open_target(config.target)
    template = target.template()
    own = Comparison(config, target, None, template, dtype=torch.float32, max_length=400)
    prompts = [
        Prompt(sample_id=turn, source="s", license="MIT", category="c", turns=(turn, "Why?", "So?"))
        for turn in QUESTIONS[:8]
    ]
    measured, _ = own.measure(prompts)
    later = [each.question for each in measured if each.question.turn > 1]
    assert len(later) >= 8, "most go on"
    for question in later:
        [prompt] = [each for each in prompts if question.prompt == f"s/{each.sample_id}"]
        last = question.replies[-1]
        said = [
            template.text(question.context[each.start : each.end], special=True)
            for each in question.replies
        ]
        expected = after_last_reply(tokenizer, prompt.turns[: question.turn], said, end_id)
        assert question.context[last.end] == end_id
        assert list(question.context[last.end + 1 :]) == expected


@pytest.mark.parametrize("of_synth", [True, False])
def test_refused_prompts_are_counted_and_dates_are_the_run_s(
    tmp_path: Path, tiny_target: Path, of_synth: bool
) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    (target / "chat_template.jinja").write_text(NUMBERED)
    plain = [{"id": str(n), "turns": [text, "Why?"]} for n, text in enumerate(QUESTIONS[:3])]
    system = [{"role": "system", "content": "Hm."}, {"role": "user", "content": "Hi."}]
    records = [*plain, {"id": "system", "messages": system}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    config, moment = config_of(tmp_path, target), datetime(2024, 7, 6, tzinfo=UTC)
    if of_synth:
        open_stage(config, "synth", None, clock=moment)
    before = datetime.now(UTC)
    run(config)
    report = read_report(config.run.uri)
    assert report.settings.left_out == {
        "prompt_too_long": 0,
        "not_rendered": 1,
        "template_rewrites": 3,
    }
    begun = read_begin(stage_location(config.run.uri, "eval"))
    assert begun is not None and begun.clock is not None
    assert begun.clock == moment if of_synth else before <= begun.clock <= datetime.now(UTC)
    template = open_target(config.target).template()
    assert report.golden is not None
    for prompt in report.golden.prompts:
        assert f"\n{begun.clock:%d %b %Y}<" in template.text(prompt.prompt_ids, special=True)
