"""Where the Triton kernels run: on a GPU if there is one, else in Triton's interpreter.

Whether kernels are interpreted is settled when Triton is first imported, and other tests, or
transformers, have imported it by now. So without a GPU the tests of each `test_triton*.py` run in
one process of their own, and each reports here what became of it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from pipeline.decoder.ops.layer import AttentionMetadata
from pipeline.decoder.ops.triton.launch import INTERPRETED
from tests.interpreter import remember

_ROOT = Path(__file__).resolve().parents[3]
_OUTCOMES = pytest.StashKey[dict[Path, dict[str, str | None]]]()

remember()


def attention_metadata(
    block_table: Tensor, seq_lens: Tensor, counts: Sequence[int], mask: Tensor | None
) -> AttentionMetadata:
    """Metadata of counts[b] tokens in row b: block_table [B, P], seq_lens [B], mask [T].

    Without rotary tables, positions and slots: for attention alone.
    """
    device = seq_lens.device
    none = torch.zeros(sum(counts), dtype=torch.int64, device=device)
    table = torch.zeros(0, 2, device=device)
    starts = torch.tensor([0, *accumulate(counts)], device=device)
    return AttentionMetadata(
        (table, table), none, none, block_table, seq_lens, starts, max(counts), mask
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
    session, path = pyfuncitem.session, pyfuncitem.path
    # By file, as workers share the tests out: each knows all of them, and runs some files.
    by_file = session.stash.setdefault(_OUTCOMES, {})
    if path not in by_file:
        by_file[path] = _interpret([item.nodeid for item in session.items if item.path == path])
    outcomes = by_file[path]
    name = ".".join([*path.relative_to(_ROOT).with_suffix("").parts, pyfuncitem.name])
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
        report = Path(directory) / "report.xml"
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
