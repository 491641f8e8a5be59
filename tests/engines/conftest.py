"""The run that engines are held against, and copies of its head to plant faults in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.lines import Line, make_line


@pytest.fixture(scope="session")
def line() -> Line:
    return make_line()


CopyOf = Callable[[Path], Path]


@pytest.fixture
def copy_of(tmp_path: Path) -> CopyOf:
    """A copy of a directory, to plant a fault in."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / folder.name))

    return copy
