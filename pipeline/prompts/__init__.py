"""Where prompts come from: files, hub data sets, pip packages that carry data, and our own.

    sources.py   load_prompts: every configured source, in order; balanced draws
    files.py     JSONL and Parquet
    hub.py       Hugging Face data sets
    builtin.py   requests written for this project
    packages/    one reader for each supported pip package
    records.py   one raw record → Prompt

Only user turns are taken; a reply in a source is never used.
"""

from __future__ import annotations

from pipeline.prompts.sources import balanced, load_prompts

__all__ = ["balanced", "load_prompts"]
