"""One sample overfitted: with data, training and drafting aligned, nearly all drafts pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pipeline.cli import main


def test_a_head_that_knows_one_answer_drafts_it(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    prompt = tmp_path / "one.jsonl"
    labels = {"id": "one", "source": "ours", "license": "MIT", "category": "math"}
    prompt.write_text(json.dumps({**labels, "turns": ["What is 1 plus 2, and why?"]}) + "\n")
    config = write_config(
        synth={
            "sources": [{"source": str(prompt)}],
            "max_new_tokens": 40,
            "max_turns": 1,
            "pii": {"enabled": False},
            "max_prompt_tokens": 200,
        },
        train={
            "ttt_steps": 5,
            "epochs": 900,
            "batch_tokens": 128,
            "learning_rate": 5e-3,
            "clip_norm": 1.0,
            "log_every": 100,
            "checkpoint_every": 1000,
        },
        eval={
            "prompts": str(prompt),
            "max_new_tokens": 40,
            "hf_prompts": 0,
            # A chain: this target's distributions are flat, so a tree would spend nodes on breadth.
            "tree": {"top_k": 1, "steps": 5, "nodes": 6},
        },
    )
    assert main(["run", "-c", str(config)]) == 0
    report = json.loads((tmp_path / "run/eval/report.json").read_text())
    # The loss ends at ln 200 a label, to five digits: of 200 draft tokens the teacher prefers none
    # by much, and its states are rounded to bfloat16. 0.85 to 0.94 of the tokens come first.
    # A chain of 5 then has 4.4 tokens a round, give or take one; one that knows nothing has 1.
    assert report["acceptance_length"] >= 3, report["alpha"]
    assert report["lossless"]["greedy_fp32"] is True
