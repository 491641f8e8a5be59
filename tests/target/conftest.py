"""What the target's tests share: a copy of the tiny target to damage, and a cache of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def target_copy(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
