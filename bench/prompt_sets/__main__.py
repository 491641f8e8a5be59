"""Write every set as a JSONL file into configs/prompts."""

from __future__ import annotations

import json
import os
import sys

from bench.prompt_sets import READERS, prompt_set
from pipeline.errors import Eagle3Error
from pipeline.records import Prompt


def main() -> int:
    try:
        for name, read in READERS.items():
            _write(prompt_set(name), [_line(prompt) for prompt in read()])
    except Eagle3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _line(prompt: Prompt) -> str:
    fields = {"id": prompt.sample_id, "source": prompt.source, "license": prompt.license}
    record = {**fields, "category": prompt.category, "turns": prompt.turns}
    return json.dumps(record, ensure_ascii=False) + "\n"


def _write(path: str, lines: list[str]) -> None:
    """Whole or not at all."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(file.name, path)


if __name__ == "__main__":
    sys.exit(main())
