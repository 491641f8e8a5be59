"""Long contexts: modules of Python's own library, whole, and something to do with each.

They are on every machine that runs this, and have what long prompts have in use: names and phrases
that come back, and replies that quote them.
"""

from __future__ import annotations

import ast
import platform
import sysconfig
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from pipeline.records import Prompt

#: Characters of a module: about 4,000 to 7,000 tokens.
SHORTEST, LONGEST = 13_000, 28_000
LICENSE = "PSF-2.0"

#: (category, what is asked); {name} is a function of the module.
_TASKS = (
    ("long-edit", "Write the function `{name}` again, with a docstring and type hints."),
    ("long-summary", "What is this module for? Describe its main functions and classes."),
    ("long-qa", "Explain what `{name}` does and quote the lines that matter."),
)


def read_modules() -> Iterator[Prompt]:
    """Each module with one of the tasks, by turns."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    tasks = cycle(_TASKS)
    for file in sorted(folder.glob("[a-z]*.py")):
        text = file.read_text(encoding="utf-8")
        names = [
            node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
        ]
        if not SHORTEST <= len(text) <= LONGEST or not names:
            continue
        category, task = next(tasks)
        asked = task.format(name=names[len(names) // 2])
        yield Prompt(
            sample_id=f"{file.stem}",
            source=f"python-library=={platform.python_version()}",
            license=LICENSE,
            category=category,
            turns=(f"```python\n{text.strip()}\n```\n\n{asked}",),
        )
