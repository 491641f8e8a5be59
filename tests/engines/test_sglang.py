"""A real SGLang serves our heads: a right one passes, and planted faults are found and named.

Server, scheduler, EAGLE worker, model classes, loader and counters are SGLang's own, from PyPI's
wheel. Its compiled operations are not in there for a CPU: plain torch of ours takes their place
(tests/engines/sglang_cpu/).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.config import LiveServerSection
from pipeline.reports import ServerFinding
from pipeline.serve_eval.questions import Question
from pipeline.serve_eval.servers.client import open_client
from pipeline.serve_eval.servers.findings import SeenServer, findings_of
from pipeline.serve_eval.servers.kinds import identify
from pipeline.serve_eval.servers.load import LiveMeasure
from tests.engines.conftest import CopyOf
from tests.engines.lines import EAGLE3, EAGLE31, Drafter, Line, make_line
from tests.engines.servers import sglang_server

#: Of one request, on cores that others use too.
SECONDS = 600


def errors(findings: list[ServerFinding]) -> dict[str, str]:
    return {each.name: each.text for each in findings if each.severity == "error"}


@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 4, 8)], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", [EAGLE3, EAGLE31], ids=["EAGLE-3", "EAGLE-3.1"])
def test_a_right_server_takes_the_decoders_rounds(
    tmp_path: Path, drafter: Drafter, shape: tuple[int, int, int]
) -> None:
    line = make_line(drafter)
    with sglang_server(line.target, line.head, tmp_path / "log", shape=shape) as server:
        seen, findings = line.held_against(server, timeout_seconds=SECONDS)
    assert errors(findings) == {}
    assert seen.shape is not None and seen.shape.label == "/".join(map(str, shape))
    assert len(seen.reported) == 16
    assert_same_rounds(seen)


def assert_same_rounds(seen: SeenServer) -> None:
    """Text, rounds, drafted tokens and histograms, prompt by prompt."""
    assert seen.exact and not seen.partings and seen.expected
    for name in seen.expected.keys() & seen.reported.keys():
        ours, theirs = seen.expected[name], seen.reported[name].counters
        assert theirs is not None
        assert theirs.rounds == ours.rounds and theirs.tokens == ours.tokens, name
        assert theirs.drafted == ours.drafted, name
        assert theirs.accepted_lengths == ours.accepted_lengths, name


def test_no_false_alarm_under_load(line: Line, tmp_path: Path) -> None:
    with sglang_server(line.target, line.head, tmp_path / "log") as server:
        section = LiveServerSection(url=server.url, timeout_seconds=SECONDS)
        seen = asyncio.run(under_load(line, section))
    assert [len(run.replies) for run in seen.runs] == [6, 8, 32]
    assert not any(run.failed for run in seen.runs)
    assert {each.name for each in findings_of(seen)} <= {"tree_differs", "near_ties"}
    assert_same_rounds(seen)


async def under_load(line: Line, section: LiveServerSection) -> SeenServer:
    """What `eagle3 eval --server` measures, on a few of the golden prompts."""
    golden = line.report.golden
    assert golden is not None
    prompts = [each for each in golden.prompts if each.shapes][:6]
    questions = [Question(each.id, "", each.prompt_ids) for each in prompts]
    new_tokens, url = golden.max_new_tokens, str(section.url)
    async with open_client(section) as client:
        server = await identify(client, url, section.kind, section.model)
        measure = LiveMeasure(
            client, server, url=url, new_tokens=new_tokens, stop_ids=golden.stop_ids
        )
        runs = [await measure.run(questions, level, lambda _: None) for level in (1, 4, 16)]
    own = {each.id: each.counters for each in prompts}
    return SeenServer(server, section, runs, new_tokens, report=line.report, own=own)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a server, and by which findings it may be named."""

    named: tuple[str, ...]
    head: Callable[[dict[str, Tensor]], None] | None = None
    config: Callable[[dict[str, Any]], None] | None = None
    shape: tuple[int, int, int] = (3, 1, 4)
    options: tuple[str, ...] = ()


def roll_d2t(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"].roll(1, 0)


def noise(tensors: dict[str, Tensor]) -> None:
    torch.manual_seed(1)
    tensor = tensors["lm_head.weight"].float()
    tensors["lm_head.weight"] = (tensor + tensor.std() * torch.randn_like(tensor)).bfloat16()


def shift_layers(by: int) -> Callable[[dict[str, Any]], None]:
    def plant(config: dict[str, Any]) -> None:
        key = "eagle_aux_hidden_state_layer_ids"
        config["eagle_config"][key] = [each + by for each in config["eagle_config"][key]]

    return plant


def other_base(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1000.0


ROUNDS = "rounds_differ", "acceptance_differs"
FAULTS = {
    "all aux layers later": Fault(ROUNDS, config=shift_layers(1)),
    "all aux layers earlier": Fault(ROUNDS, config=shift_layers(-1)),
    "noise in lm_head": Fault(ROUNDS, head=noise),
    "rotary base of another model": Fault(ROUNDS, config=other_base),
    "d2t shifted": Fault(ROUNDS, head=roll_d2t),
    "another draft length": Fault(("tree_differs",), shape=(11, 1, 12)),
    "a context that is too short": Fault(
        ("context_cut", "requests_failed"), options=("--context-length", "160")
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(line: Line, tmp_path: Path, copy_of: CopyOf, name: str) -> None:
    fault, head = FAULTS[name], copy_of(line.head)
    if fault.head:
        tensors = load_file(head / "model.safetensors")
        fault.head(tensors)
        save_file(tensors, head / "model.safetensors", {"format": "pt"})
    if fault.config:
        config = json.loads((head / "config.json").read_text())
        fault.config(config)
        (head / "config.json").write_text(json.dumps(config))
    served = sglang_server(
        line.target, head, tmp_path / "log", shape=fault.shape, options=fault.options
    )
    with served as server:
        _, findings = line.held_against(server, check_prompts=4, timeout_seconds=SECONDS)
    assert set(errors(findings)) & set(fault.named), findings
