"""A finished run over the tiny target, and servers on free loopback ports."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import RunConfig, load
from pipeline.records import STAGES
from pipeline.runtime import run
from pipeline.server.start import _listen, make_app, make_server, run_server
from tests.conftest import QUESTIONS

#: Starts a server of a configuration, gives its URL, and stops it at the end of the test.
Serving = Callable[..., str]


@pytest.fixture(scope="session")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run whose stages are done; the head has learnt what is asked."""
    folder = tmp_path_factory.mktemp("finished")
    prompts = folder / "prompts.jsonl"
    records = [
        {"id": f"p{index}", "source": "ours", "license": "MIT", "turns": [text]}
        for index, text in enumerate(QUESTIONS)
    ]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    tree: dict[str, Any] = {
        "run": {"uri": str(folder / "run"), "threads": 1},
        "target": {"source": str(tiny_target), "dtype": "float32", "device": "cpu"},
        "synth": {
            "sources": [{"source": str(prompts)}],
            "pii": {"enabled": False},
            "max_new_tokens": 24,
            "max_turns": 1,
            "max_prompt_tokens": 200,
        },
        "features": {"shard_tokens": 300},
        "train": {
            "head_config": {
                "draft_vocab_size": 200,
                "intermediate_size": 32,
                "max_share_of_target": 5.0,
            },
            "ttt_steps": 3,
            "epochs": 20,
            "learning_rate": 3e-3,
            "batch_tokens": 128,
            "dtype": "float32",
            "wandb": "disabled",
        },
        "eval": {
            "prompts": str(prompts),
            "max_prompts": 8,
            "max_new_tokens": 24,
            "hf_prompts": 0,
            "shapes": [{"top_k": 1, "steps": 3, "nodes": 4}],
            "tree": {"top_k": 2, "steps": 3, "nodes": 6},
        },
        "serve": {"port": 0, "model": "tiny"},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    for stage in STAGES:
        run(load(file), stage)
    return file


@pytest.fixture
def serving() -> Iterator[Serving]:
    """`serving(config)` → URL of our own server."""
    stops: list[Callable[[], None]] = []

    def begin(config: RunConfig) -> str:
        app = make_app(config, None)
        server, listening = make_server(app, config.serve), _listen(config.serve)
        thread = threading.Thread(target=run_server, args=(server, app, [listening], 5.0))
        thread.start()
        _wait(server)

        def stop() -> None:
            server.should_exit = True
            thread.join(30)

        stops.append(stop)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield begin
    for stop in stops:
        stop()


@contextmanager
def listening_app(app: Any) -> Iterator[tuple[str, Any]]:
    """Any ASGI application behind a real port: its URL, and the server."""
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", 0))
    settings = uvicorn.Config(
        app, log_config=None, lifespan="off", timeout_graceful_shutdown=1, loop="asyncio"
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    _wait(server)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def _wait(server: Any) -> None:
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
