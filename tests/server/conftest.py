"""A real server on a free loopback port, over the tiny target with a random head."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from bench.random_target import random_head
from pipeline.config import ServeSection, TargetSection, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.server.start import ServerApp, _listen, make_server, run_server
from pipeline.target.open import Target, open_target
from pipeline.target.template import ChatTemplate

TREE = TreeSection(top_k=3, steps=3, nodes=8)
MODEL = "tiny"
PROMPTS = ["What is 2 plus 5?", "Why?", "What is 6 minus 9, and why would that be so?"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    section = TargetSection(source=str(tiny_target), dtype="float32", device="cpu")
    return open_target(section, decoded=True)


@pytest.fixture(scope="session")
def model(target: Target) -> DecoderModel:
    return DecoderModel.load(
        target.directory,
        target.contract.capture_layers,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_length=256,
    )


@pytest.fixture(scope="session")
def template(target: Target) -> ChatTemplate:
    return target.template()


def drafting_engine(model: DecoderModel, **options: Any) -> Engine:
    chosen = torch.arange(0, model.vocabulary, 2)
    head = random_head(model.config, chosen, intermediate_size=48, seed=3, scale=12)
    return Engine(model, drafter=Eagle3Drafter(head, model, TREE), **options)


@dataclass
class Running:
    """A server that runs, and what belongs to it."""

    app: ServerApp
    engine: Engine
    port: int
    thread: threading.Thread
    server: Any
    key: str | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        key = self.key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str = "completions", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=60)

    def metrics(self) -> dict[str, float]:
        """Samples by name; labels other than the model's are part of it."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        labels = f'model_name="{MODEL}"'
        return {
            name.replace(f"{labels},", "").replace(f",{labels}", "").replace(f"{{{labels}}}", ""): (
                float(value)
            )
            for name, value in samples
        }

    def wait_idle(self, seconds: float = 10) -> None:
        """Until no request is here; then every page of both pools has to be free."""
        until = time.monotonic() + seconds
        while self.app.worker.open_jobs or self.engine.busy:
            assert time.monotonic() < until, "requests are still here"
            time.sleep(0.01)
        for pool in (self.engine.pools.shared, self.engine.pools.drafter_pages):
            assert pool.free_pages == pool.capacity

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


Start = Callable[..., Running]


@pytest.fixture
def start(model: DecoderModel, template: ChatTemplate) -> Iterator[Start]:
    """`start(engine=…, key=…, max_waiting=…)` → a server; all are stopped at the end."""
    running: list[Running] = []

    def begin(engine: Engine | None = None, key: str | None = None, **settings: Any) -> Running:
        section = ServeSection(port=0, slots=4, **settings)
        engine = engine or drafting_engine(model, slots=section.slots)
        app = ServerApp(engine, template, section, model=MODEL, key=key)
        server, listening = make_server(app, section), _listen(section)
        run = threading.Thread(target=run_server, args=(server, app, [listening], 5.0))
        run.start()
        until = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        port = listening.getsockname()[1]
        running.append(Running(app, engine, port, run, server, key))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


def slow_down(engine: Engine, seconds: float) -> None:
    """Let every step of an engine take longer, so that a test can act in the middle of a reply."""
    step = engine.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slowly  # type: ignore[method-assign]


def plain_ids(
    model: DecoderModel, prompt: list[int], new: int, stop: tuple[int, ...], **sampling: Any
) -> tuple[int, ...]:
    """What plain decoding makes of a prompt that is alone."""
    request = Request("alone", tuple(prompt), new, stop, **sampling)
    (done,) = Engine(model).generate([request])
    return done.token_ids
