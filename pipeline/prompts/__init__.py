"""Where prompts come from: files and hub data sets.

sources.py      load_prompts, stream_prompts: every configured source, in order, with unique ids;
                Hugging Face data sets
files.py        JSONL and Parquet
parquet.py      the process that unpacks Parquet
records.py      one raw record → Prompt
bad_records.py  records that cannot be used: an error, or counted
draw.py         balanced draws, also of more prompts than memory holds
demo_sets.py    the demo's prompts from pip packages, as `make setup` writes them
changes.py      whether files are still those that a run has read

Only user turns are taken; a reply in a source is never used.
"""

from __future__ import annotations

from pipeline.prompts.draw import balanced
from pipeline.prompts.sources import load_prompts, stream_prompts

__all__ = ["balanced", "load_prompts", "stream_prompts"]
