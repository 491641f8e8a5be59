"""Records what a real llama-server answers, for tests without one.

    python -m tests.engines.record_llama      → tests/serve_eval/recordings/llamacpp.json

The first golden prompts of a report in fp32 are sent as `eagle3 check-serving` sends them.
EAGLE3_HEAD=DIR takes a trained head, as for `make test-engines`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from pipeline.exchange.export import export_head
from pipeline.serve_eval.servers.kinds import LiveServer
from tests.engines.environments import LLAMA, ROOT
from tests.engines.gguf_files import in_float32, target_in_float32
from tests.engines.lines import make_line
from tests.engines.servers import llama_server

FILE = ROOT / "tests/serve_eval/recordings/llamacpp.json"
PROMPTS = 2


def main() -> None:
    line = make_line()
    golden = line.report.golden
    assert golden is not None
    with_shapes = [each for each in golden.prompts if each.shapes][:PROMPTS]
    golden = golden.model_copy(update={"prompts": tuple(with_shapes)})
    recording: dict[str, Any] = {
        "server": LLAMA.requirements[0],
        "golden": golden.model_dump(mode="json"),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export_head(str(line.head), format="gguf", out=str(folder / "exported.gguf"))
        head = in_float32(folder / "exported.gguf", folder / "head.gguf")
        target = target_in_float32(folder / "target.gguf")
        with (
            llama_server(target, head, folder / "log") as server,
            httpx.Client(base_url=server.url, timeout=600) as client,
        ):
            for page in ("models", "props"):
                path = "/v1/models" if page == "models" else "/props"
                recording[page] = json.loads(client.get(path).text.replace(temporary, "/models"))
            recording["streams"] = [
                _stream(client, prompt.prompt_ids, golden.max_new_tokens, golden.stop_ids)
                for prompt in golden.prompts
            ]
            too_long = {"prompt": [1] * 5000, "n_predict": 1}
            refused = client.post("/completion", json=too_long)
            recording["refused"] = {"status": refused.status_code, "body": refused.json()}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(recording, indent=1).replace(temporary, "/models") + "\n")


def _stream(
    client: httpx.Client, ids: tuple[int, ...], new: int, stop_ids: tuple[int, ...]
) -> list[dict[str, Any]]:
    server = LiveServer("llamacpp", "")
    body = server.body(ids, new, stop_ids)
    with client.stream("POST", server.path, json=body, headers=server.headers) as reply:
        assert reply.status_code == 200
        lines = [each.removeprefix("data: ") for each in reply.iter_lines() if each]
    return [json.loads(each) for each in lines]


if __name__ == "__main__":
    main()
