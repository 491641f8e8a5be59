"""A real vLLM serves our heads: a right one passes, and every planted fault is found and named.

The engine, its scheduler, models, loader and counters are vLLM's own, from the CPU wheel. These
are the plans that `tests.engines.record` keeps for `make test`, served anew; ARGS='-k quick' takes
two of them, and two of llama.cpp's: continuous integration runs these. They need one report alone,
in fp32 and without a lookup, as each takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.lines import LOOKUP, Line, make_line
from tests.engines.plans import FAULTS, Plan
from tests.engines.servers import vllm_server

_QUICK = {"the low aux layer one later, fp32"}


def errors(findings: list[Any]) -> dict[str, str]:
    return {each.name: each.text for each in findings if each.severity == "error"}


@pytest.mark.parametrize("drafts", [pytest.param(3, id="quick-3"), 5])
def test_a_right_server_in_fp32_takes_the_decoders_rounds(
    line: Line, tmp_path: Path, drafts: int
) -> None:
    with vllm_server(line.target, line.head, tmp_path / "log", drafts=drafts) as server:
        seen, findings = line.held_against(server)
        beside_lookup = make_line(LOOKUP).held_against(server)[1] if drafts != 3 else []
    assert errors(findings) == errors(beside_lookup) == {}
    assert seen.shape is not None and seen.shape.label == f"{drafts}/1/{drafts + 1}"
    assert seen.exact and len(seen.reported) == len(seen.compared) == 16
    assert seen.measured_noise is not None and seen.measured_noise < 0.001
    paired = seen.paired
    assert paired is not None and paired.server == paired.decoder.value > 1.2


@pytest.mark.parametrize("report", ["float32", "bfloat16"])
@pytest.mark.parametrize("metrics", ["none", "detailed"])
def test_a_right_server_in_bf16(line: Line, tmp_path: Path, report: str, metrics: str) -> None:
    """With vLLM's list of rounds and without, where replies that part are asked for again."""
    served = vllm_server(
        line.target,
        line.head,
        tmp_path / "log",
        dtype="bfloat16",
        options=("--per-request-spec-decode-metrics", metrics),
    )
    with served as server:
        seen, findings = line.held_against(server, dtype=report)
    assert errors(findings) == {}
    assert len(seen.compared) >= 14
    assert all(bool(each.theirs.in_order) == (metrics == "detailed") for each in seen.compared)


@pytest.mark.parametrize(
    "plan", FAULTS, ids=[f"{'quick ' * (each.name in _QUICK)}{each.name}" for each in FAULTS]
)
def test_a_fault_is_found_and_named(line: Line, tmp_path: Path, plan: Plan) -> None:
    target, head = plan.plant(line.target, line.head, tmp_path)
    served = vllm_server(
        target,
        head if plan.drafter else None,
        tmp_path / "log",
        dtype=plan.dtype,
        drafts=plan.drafts,
        speculative=dict(plan.speculative),
        options=plan.options,
    )
    with served as server:
        reports = [line] if plan.name in _QUICK else [line, make_line(LOOKUP)]
        held = [each.held_against(server, dtype=plan.dtype) for each in reports]
    for _, findings in held:
        assert set(errors(findings)) & set(plan.found), findings
