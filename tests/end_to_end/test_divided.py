"""A target over the processes of a launcher: synth, eval and the server, beside one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.api import open_engine, read_samples
from pipeline.cli import main
from pipeline.decoder.request import Request
from pipeline.store.manifest import read_report
from tests.forked import group

TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def divided_words(stage: str, config: Path, *overrides: str) -> list[str]:
    return [stage, "-c", str(config), f"{stage}.parallel=tensor", *overrides]


def divide(stage: str, config: Path, *overrides: str) -> None:
    """Run a stage by two processes, which see what a launcher would tell them."""
    words, printed = divided_words(stage, config, *overrides), config.with_suffix(".printed")
    forked = group(words, 2, printed, environment={"OMP_NUM_THREADS": "1"})
    assert [each.wait(timeout=300) for each in forked] == [0, 0], printed.read_text()[-3000:]


def test_synth_and_eval_say_what_one_process_says(folder: Path) -> None:
    config, sampling = folder / "run.yaml", "synth.temperature=1"
    runs = [f"run.uri={folder / name}" for name in ("alone", "divided")]
    assert main(["synth", "-c", str(config), runs[0], sampling]) == 0
    divide("synth", config, runs[1], sampling)
    alone, divided = (
        {each.sample_id: (each.token_ids, each.supervised) for each in read_samples(str(uri))}
        for uri in (folder / "alone", folder / "divided")
    )
    assert alone == divided and len(alone) == 24
    few = ["eval.shape_prompts=2", "eval.shapes=[{top_k: 2, steps: 3, nodes: 6}]"]
    few += ["eval.hf_prompts=1"]
    assert main(["eval", "-c", str(config), *few]) == 0
    first = read_report(str(folder / "run"))
    (folder / "run" / "eval").rename(folder / "eval-alone")
    divide("eval", config, *few, "eval.tree=auto")
    second = read_report(str(folder / "run"))
    assert second.is_lossless and second.settings.tree_auto is not None
    assert second.lossless.transformers is not None and second.lossless.transformers.same
    shapes = [{each.name: each.acceptance for each in report.shapes} for report in (first, second)]
    assert shapes[0]["3/2/6"] == shapes[1]["3/2/6"]


@contextmanager
def server(config: Path) -> Iterator[str]:
    """Its address; its processes, of a real launcher, have ended by themselves afterwards."""
    words = divided_words("serve", config, "serve.port=0", "serve.slots=2")
    command = [*TWO, "-m", "pipeline.cli", *words]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        yield next(line for line in lines if "listening at" in line).split()[-1]
        process.send_signal(signal.SIGTERM)
        assert any("serve ended" in line for line in lines)
        process.wait(timeout=60)
    finally:
        process.terminate()  # the launcher, which ends the others
        process.communicate()


def test_a_server_says_what_one_process_says(folder: Path, tiny_target: Path) -> None:
    """Requests side by side, one of which ends by a stop string and one with its client."""
    engine, _ = open_engine(str(tiny_target), slots=4, max_length=512, dtype="float32")
    prompts = [(5, 6, 7), tuple(range(9, 90)), (3, 3, 3, 3), (8, 1)]
    asked = [Request(str(n), each, 40, (), seed=n) for n, each in enumerate(prompts)]
    alone = {each.request_id: each.token_ids for each in engine.generate(asked)}

    def ask(url: str, number: int, **fields: Any) -> list[int]:
        body = {"prompt": [list(prompts[number])], "max_tokens": 40, "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True, **fields}
        reply = httpx.post(f"{url}/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return list(reply.json()["choices"][0]["token_ids"])

    with server(folder / "run.yaml") as url, ThreadPoolExecutor(4) as pool:
        stream = {"prompt": [[5, 6]], "max_tokens": 300, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/completions", json=stream, timeout=60) as leaving:
            next(leaving.iter_lines())
            stopped = pool.submit(ask, url, 0, stop=list("aeiou "), temperature=1, seed=1)
            said = list(pool.map(partial(ask, url), range(4)))
            assert len(stopped.result()) < 40
        assert [tuple(each) for each in said] == [alone[str(n)] for n in range(4)]
        again = list(pool.map(partial(ask, url), range(4)))
        assert again == said


def test_one_process_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ("synth", "eval", "serve"):
        uri = [f"run.uri={folder / 'new'}"] if stage == "synth" else []
        words = [stage, "-c", str(folder / "run.yaml"), f"{stage}.parallel=tensor", *uri]
        assert main(words) == 2
        assert "one process cannot split the target" in capsys.readouterr().err
