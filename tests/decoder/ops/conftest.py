"""Where the Triton kernels run: on a GPU if there is one, else in Triton's interpreter.

Whether kernels are interpreted is settled when Triton is first imported, and other tests, or
transformers, have imported it by now. So without a GPU the tests of `test_triton*.py` run in one
process of their own, and each reports here what became of it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.layer import PAGE, AttentionMetadata
from pipeline.decoder.ops.triton.launch import INTERPRETED

_ROOT = Path(__file__).resolve().parents[3]
_OUTCOMES = pytest.StashKey[dict[str, str | None]]()


def tree_metadata(block_table: Tensor, seq_lens: Tensor, mask: Tensor) -> AttentionMetadata:
    """Metadata of trees of N nodes a row: block_table [B, P], seq_lens [B], mask [B, N].

    Without rotary tables and with positions of zero: for attention alone.
    """
    rows, count = mask.shape
    return _metadata(block_table, seq_lens, [count] * rows, mask.flatten())


def chain_metadata(
    block_table: Tensor, seq_lens: Tensor, counts: Sequence[int]
) -> AttentionMetadata:
    """Metadata of a chain of counts[b] tokens in row b; otherwise as `tree_metadata`."""
    return _metadata(block_table, seq_lens, counts, None)


def slot_metadata(
    rotary: tuple[Tensor, Tensor], positions: Tensor, slots: Tensor
) -> AttentionMetadata:
    """Metadata of tokens with these positions and slots [T], for `rope_write` alone."""
    none = torch.zeros(1, dtype=torch.int64, device=slots.device)
    starts = torch.tensor([0, len(slots)], device=slots.device)
    return AttentionMetadata(
        rotary, positions, slots, none[None], none, starts, max_query_len=len(slots), mask=None
    )


def _metadata(
    block_table: Tensor, seq_lens: Tensor, counts: Sequence[int], mask: Tensor | None
) -> AttentionMetadata:
    device = seq_lens.device
    tokens_of = torch.tensor(counts, device=device)  # [B]
    ends = tokens_of.cumsum(0)
    row = torch.arange(len(counts), device=device).repeat_interleave(tokens_of)  # [T]
    within = torch.arange(sum(counts), device=device) - (ends - tokens_of)[row]
    entries = seq_lens[row] + within
    # A table may be narrower than what follows the last entry that anybody sees.
    page = (entries // PAGE).clamp(max=block_table.shape[1] - 1)
    table = torch.zeros(0, 2, device=device)
    return AttentionMetadata(
        rotary=(table, table),
        positions=torch.zeros_like(entries),
        slot_mapping=block_table[row, page] * PAGE + entries % PAGE,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=torch.cat((ends.new_zeros(1), ends)),
        max_query_len=max(counts),
        mask=mask,
    )


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a kernel's test here if kernels run here, else answer with its interpreted outcome."""
    if not _is_kernel_test(pyfuncitem) or INTERPRETED or torch.cuda.is_available():
        return None
    session = pyfuncitem.session
    if _OUTCOMES not in session.stash:
        session.stash[_OUTCOMES] = _interpret(
            [item.nodeid for item in session.items if _is_kernel_test(item)]
        )
    outcomes = session.stash[_OUTCOMES]
    name = ".".join([*pyfuncitem.path.relative_to(_ROOT).with_suffix("").parts, pyfuncitem.name])
    if name not in outcomes:
        pytest.fail(f"the interpreter's process did not run this test: {outcomes}", pytrace=False)
    problem = outcomes[name]
    if problem is not None:
        pytest.fail(problem, pytrace=False)
    return True


def _is_kernel_test(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent and item.path.name.startswith("test_triton")


def _interpret(tests: list[str]) -> dict[str, str | None]:
    """Module and name of each test → what was wrong with it, None if nothing was."""
    with TemporaryDirectory() as directory:
        return _run(tests, Path(directory) / "report.xml")


def _run(tests: list[str], report: Path) -> dict[str, str | None]:
    quietly = "-q", "-p", "no:cacheprovider", f"--junitxml={report}"
    command = [sys.executable, "-m", "pytest", *quietly, *tests]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=interpreted, capture_output=True, text=True)
    if not report.exists():
        return {"no report": done.stdout + done.stderr}
    return {
        f"{case.attrib['classname']}.{case.attrib['name']}": _problem(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


def _problem(case: ElementTree.Element) -> str | None:
    return next(
        (
            child.text or child.attrib.get("message", "")
            for child in case
            if child.tag in ("failure", "error", "skipped")
        ),
        None,
    )
