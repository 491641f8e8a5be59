"""The model card's vLLM commands, as they are written: only HEAD and TARGET become paths.

And what they serve: a block drafter in speculators' dialect takes our decoder's rounds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pipeline.api import open_engine
from pipeline.config import TreeSection
from pipeline.decoder.request import Request
from pipeline.exchange.export import export_head
from pipeline.reports.acceptance import VllmNames
from tests.engines.environments import VLLM
from tests.engines.lines import BLOCKS, Line, make_line
from tests.engines.servers import VLLM_VARIABLES, EngineServer, answering, running, vllm_server

#: vLLM's default, which the card's commands leave as it is.
URL = "http://127.0.0.1:8000"
#: Seconds until a server answers that compiles its model first.
START = 900.0


@contextmanager
def started(command: str, log: Path) -> Iterator[EngineServer]:
    """A shell's command that starts a server, until it is no longer needed."""
    path = f"{VLLM.make().parent}:{os.environ['PATH']}"
    environment = {**os.environ, **VLLM_VARIABLES, "PATH": path}
    with running(["bash", "-c", command], environment, log) as process:
        yield answering(lambda: process.poll() is None, EngineServer(URL, log), within=START)


def card_command(head: Path, target: Path) -> str:
    """The command of a card, with paths in place of HEAD and TARGET."""
    text = (head / "README.md").read_text()
    found = re.search(r"```bash\n(vllm .*?)\n```", text, re.S)
    assert found is not None, text
    return found[1].replace("HEAD", str(head)).replace("TARGET", str(target))


def drafts(server: EngineServer, prompt: list[int]) -> dict[str, float]:
    """What the server counts for one reply."""
    assert len(server.complete(prompt, 32, ignore_eos=True)) == 32
    return server.counters()


def check_drafts(server: EngineServer, line: Line, tokens: int) -> None:
    """Raise where it does not draft so many tokens a round, or none is accepted."""
    assert line.report.golden is not None
    counted = drafts(server, list(line.report.golden.prompts[0].prompt_ids))
    assert counted["num_draft_tokens"] == tokens * counted["num_drafts"] > 0
    assert counted["num_accepted_tokens"] > 0


def test_the_cards_command_serves_the_head(line: Line, tmp_path: Path) -> None:
    """And `vllm serve HEAD` alone does, where the export names the verifier's path."""
    with pytest.raises(httpx.TransportError):
        httpx.get(URL)  # nobody else uses vLLM's port
    head = tmp_path / "head"
    verifier = str(line.target)
    export_head(
        str(line.head), format="speculators", out=str(head), target=verifier, verifier=verifier
    )
    with started(card_command(head, line.target), tmp_path / "log") as server:
        check_drafts(server, line, tokens=3)
    with started(f"vllm serve {head}", tmp_path / "log") as server:
        check_drafts(server, line, tokens=4)  # as many as it was unrolled for


def test_a_block_drafter_takes_the_decoders_rounds(line: Line, tmp_path: Path) -> None:
    """In fp32, with whole blocks: the same tokens, drafts and accepted ones. By the card's command
    too it drafts."""
    target, given = str(line.target), tmp_path / "given"
    block_head = make_line(BLOCKS).head
    export_head(
        str(block_head), format="speculators", out=str(given), target=target, verifier=target
    )
    assert line.report.golden is not None
    prompts = [each.prompt_ids for each in line.report.golden.prompts[:4]]
    chain = TreeSection(top_k=1, steps=7, nodes=8)
    engine, _ = open_engine(target, head=str(block_head), tree=chain, dtype="float32")
    ours = [*engine.generate([Request(str(i), ids, 48, ()) for i, ids in enumerate(prompts)])]
    ours.sort(key=lambda completion: int(completion.request_id))
    counted = VllmNames.of([completion.statistics.counters() for completion in ours])
    print(f"ours: τ {counted.spec_decode_acceptance_length:.3f}")
    served = vllm_server(
        line.target, given, tmp_path / "log", speculative={"method": "dflash"}, drafts=7
    )
    with served as server:
        replies = [server.complete(ids, 48, ignore_eos=True) for ids in prompts]
        theirs = server.counters()
    print("vLLM's:", theirs)
    assert replies == [list(completion.token_ids) for completion in ours]
    assert theirs == {name: getattr(counted, name) for name in theirs}
    assert counted.num_accepted_tokens > 0
    with started(card_command(given, line.target), tmp_path / "log") as server:
        check_drafts(server, line, tokens=7)
