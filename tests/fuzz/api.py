"""Schemathesis asks a running server what its own OpenAPI document says may be asked, and more."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import build_tiny_target
from tests.engines.environments import Environment
from tests.engines.servers import EngineServer, answering, free_port, running

SCHEMATHESIS = Environment("schemathesis", ("schemathesis==4.32.5",))
#: What holds whatever is sent; a body of the right shape may still be too long for the context.
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "ignored_auth"),
)


def fuzz_server(seed: int, seconds: float) -> int:
    """Schemathesis's exit status: 1 where it has findings."""
    with tempfile.TemporaryDirectory() as folder:
        target, config, port = Path(folder, "target"), Path(folder, "run.yaml"), free_port()
        build_tiny_target(target)
        config.write_text(f"run: {{uri: {folder}/run}}\n")
        command = [sys.executable, "-m", "pipeline.cli", "serve", "-c", str(config)]
        command += [
            f"target.source={target}",
            "target.capture_layers=[1, 3, 4]",
            "serve.plain=true",
        ]
        command += [f"serve.port={port}", "serve.max_length=64", "serve.api_key_env=EAGLE3_FUZZ"]
        log, key = Path(folder, "log"), "a-key"
        with running(command, {**os.environ, "EAGLE3_FUZZ": key}, log) as process:
            server = EngineServer(f"http://127.0.0.1:{port}", log)
            answering(lambda: process.poll() is None, server, within=600)
            program = str(SCHEMATHESIS.make().with_name("schemathesis"))
            asked = [program, "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
            asked += ["--seed", str(seed), "--header", f"Authorization: Bearer {key}"]
            asked += ["--max-time", f"{seconds:g}", "--generation-database", "none"]
            status = subprocess.run(asked, cwd=folder, check=False).returncode
            if process.poll() is not None:
                print(f"api: the server has ended: {log.read_text()[-500:]}", flush=True)
                return 1
        if "Traceback" in log.read_text():
            print(f"api: a traceback in the server's log: {log.read_text()[-2000:]}", flush=True)
            return 1
    return status
