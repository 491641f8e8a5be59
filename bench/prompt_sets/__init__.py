"""The demo's prompts from pip packages, as prompts files: `python -m bench.prompt_sets FOLDER`.

    data_package.py   an installed package as a folder of files: none of its code runs, so it can be
                      installed without its dependencies
    benchmarks.py     HumanEval and MT-bench
    chitchat.py       conversations between two people
    evals.py          OpenAI Evals
    modules.py        modules of Python's own library: long contexts

The set-up writes them beside configs/prompts/instructions.jsonl, which was written for this project
(Apache-2.0): everyday requests, because packages lean towards puzzles and small talk, and a head
trained on those alone is weak where people use a model most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bench.prompt_sets.benchmarks import read_human_eval, read_mt_bench
from bench.prompt_sets.chitchat import read_chitchat
from bench.prompt_sets.evals import read_evals
from bench.prompt_sets.modules import read_modules
from pipeline.records import Prompt

FOLDER = Path(__file__).resolve().parents[2] / "configs/prompts"

READERS: dict[str, Callable[[], Iterator[Prompt]]] = {
    "chitchat": read_chitchat,
    "evals": read_evals,
    "human_eval": read_human_eval,
    "modules": read_modules,
    "mt_bench": read_mt_bench,
}


def prompt_set(name: str) -> str:
    """The file of one set."""
    return str(FOLDER / f"{name}.jsonl")
