"""llama.cpp serves our GGUF heads: in fp32 every prompt takes the decoder's rounds.

Server, scheduler, graphs, drafting and counters are llama.cpp's own (tests/engines/llama_server.py
says what is set). The target is SmolLM2 with the same weights, as GGUF.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pipeline.config import LiveServerSection, load
from pipeline.exchange.export import export_head
from pipeline.serve_eval.questions import Question
from pipeline.serve_eval.servers.check import compare_golden, replay_rounds
from pipeline.serve_eval.servers.client import open_client
from pipeline.serve_eval.servers.kinds import identify
from pipeline.serve_eval.servers.load import LiveMeasure, LiveReply
from tests.engines.conftest import CopyOf
from tests.engines.gguf_files import in_float32, target_in_float32
from tests.engines.lines import DEMO, EAGLE3, Line
from tests.engines.plans import changed, fc_permuted
from tests.engines.servers import llama_server
from tests.engines.test_vllm import errors


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_in_float32(tmp_path_factory.mktemp("target") / "target.gguf")


def exported(head: Path, folder: Path) -> Path:
    """As `eagle3 export` writes it, in bfloat16."""
    export_head(str(head), format="gguf", out=str(folder / "exported.gguf"))
    return folder / "exported.gguf"


@pytest.mark.parametrize("drafts", [pytest.param(3, id="quick-3"), 5])
def test_a_right_server_in_fp32_takes_the_decoders_rounds(
    line: Line, target: Path, tmp_path: Path, drafts: int
) -> None:
    head = in_float32(exported(line.head, tmp_path), tmp_path / "head.gguf")
    with llama_server(target, head, tmp_path / "log", drafts=drafts) as server:
        seen, findings = line.held_against(server)
    assert errors(findings) == {} and seen.server.kind == "llamacpp"
    assert seen.shape is not None and seen.shape.label == f"{drafts}/1/{drafts + 1}"
    assert len(seen.reported) == 16 and seen.partings == [] and len(seen.expected) >= 10
    line.assert_same_rounds(line.head, seen, tmp_path / "disturbed")
    assert seen.paired is not None and seen.paired.decoder.value > 1.2


def test_the_head_as_it_is_exported(line: Line, target: Path, tmp_path: Path) -> None:
    """In bfloat16, with keys and values in float16, which is llama.cpp's default."""
    head = exported(line.head, tmp_path)
    with llama_server(target, head, tmp_path / "log", kv_type="F16") as server:
        seen, findings = line.held_against(server)
    assert errors(findings) == {}
    assert seen.paired is not None and not seen.paired.differs(0.01)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_types(
    line: Line, target: Path, tmp_path: Path, copy_of: CopyOf, rope: dict[str, Any]
) -> None:
    """The head was trained with the default: with another type it accepts less, here as there."""
    other, uri = copy_of(line.head), tmp_path / "run"
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], **rope}
    config["rope_scaling"] = rope
    (other / "config.json").write_text(json.dumps(config))
    settings = [f"run.uri={uri}", f"eval.head={other}", "target.dtype=float32"]
    own = load(DEMO, [*settings, *EAGLE3.evaluation])
    golden = line.report.golden
    assert golden is not None
    golden = golden.model_copy(update={"prompts": golden.prompts[:4]})
    report = line.report.model_copy(update={"golden": golden})
    head = in_float32(exported(other, tmp_path), tmp_path / "head.gguf")
    with llama_server(target, head, tmp_path / "log", drafts=8) as server:
        section = LiveServerSection(url=server.url)
        replay = partial(replay_rounds, own)
        seen, findings = compare_golden(report, section, where="the report", replay=replay)
    assert errors(findings) == {} and seen.paired is not None and len(seen.expected) == 4
    line.assert_same_rounds(other, seen, tmp_path / "disturbed")


@pytest.mark.parametrize("backend_sampling", [False, True])
def test_two_requests_at_a_time(
    line: Line, target: Path, tmp_path: Path, backend_sampling: bool
) -> None:
    """Drafts of several requests are right where they are sampled on the host, and lost by build
    11549's default (docs/head-format.md): if this fails with the default, it was mended."""
    head = in_float32(exported(line.head, tmp_path), tmp_path / "head.gguf")
    served = llama_server(
        target, head, tmp_path / "log", slots=2, backend_sampling=backend_sampling
    )
    with served as server:
        replies = asyncio.run(_two_at_a_time(line, server.url))
    golden = line.report.golden
    assert golden is not None
    prompts = {each.id: each for each in golden.prompts}
    made, own = 0, 0
    for reply in replies:
        prompt = prompts[reply.question.request_id]
        assert reply.token_ids == prompt.reply_ids and reply.rounds is not None
        made, own = made + reply.rounds.rounds, own + prompt.shapes["3/1/4"].rounds
    assert made == own if not backend_sampling else made > 1.05 * own


async def _two_at_a_time(line: Line, url: str) -> tuple[LiveReply, ...]:
    golden = line.report.golden
    assert golden is not None
    known = [each for each in golden.prompts if each.shapes][:4]
    questions = [Question(each.id, "", each.prompt_ids) for each in known]
    async with open_client(LiveServerSection(url=url)) as client:
        measure = LiveMeasure(
            client,
            await identify(client, url, "auto", None),
            url=url,
            new_tokens=golden.max_new_tokens,
            stop_ids=golden.stop_ids,
        )
        return (await measure.run(questions, 2, lambda amount: None)).replies


@dataclass(frozen=True)
class Fault:
    """What is wrong with the head's file, or with the server."""

    fields: dict[str, Any] = field(default_factory=dict)
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None
    drafter: bool = True
    drafts: int = 3
    named: tuple[str, ...] = ("rounds_differ", "acceptance_differs")


def shift_ids(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"].roll(1, 0)


_QUICK = {"all aux layers later"}
FAULTS = {
    "all aux layers later": Fault(fields={"eagle3.target_layers": [3, 16, 28]}),
    "fc's inputs permuted": Fault(change=changed("fc.weight", fc_permuted)),
    "rotary base of another model": Fault(fields={"eagle3.rope.freq_base": 1000.0}),
    "d2t shifted": Fault(change=shift_ids),
    "the hidden norm twice as large": Fault(
        change=changed("blk.0.attn_norm_2.weight", lambda each: 2 * each)
    ),
    "no drafter": Fault(drafter=False, named=("no_acceptance",)),
    "another draft length": Fault(drafts=12, named=("tree_differs",)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, id="quick " * (name in _QUICK) + name) for name in FAULTS]
)
def test_a_fault_is_found_and_named(line: Line, target: Path, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    source = exported(line.head, tmp_path)
    head = in_float32(source, tmp_path / "head.gguf", fields=fault.fields, change=fault.change)
    served = llama_server(
        target, head if fault.drafter else None, tmp_path / "log", drafts=fault.drafts
    )
    with served as server:
        _, findings = line.held_against(server)
    assert set(errors(findings)) & set(fault.named), findings
