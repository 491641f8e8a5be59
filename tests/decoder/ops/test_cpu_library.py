"""Compiling, caching, and machines that cannot."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.decoder.ops.cpu import library as cpu_library
from pipeline.decoder.ops.cpu import ops as cpu_ops


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and no memory of an earlier attempt before and after."""
    if cpu_ops.load() is None:
        pytest.skip(cpu_ops.why_not())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_ops._attempt.cache_clear()
    yield tmp_path / "eagle3" / "native"
    cpu_ops._attempt.cache_clear()


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_compiles_once_and_leaves_one_file(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CXX", compiler(tmp_path / "counting", f'echo "$1" >> {tmp_path}/calls; exec g++ "$@"')
    )
    assert cpu_ops.available(torch.bfloat16) and not cpu_ops.available(torch.float32)
    cpu_ops._attempt.cache_clear()
    assert cpu_ops.load() is not None and cpu_ops.why_not() == ""
    assert (tmp_path / "calls").read_text().split() == ["--version", "-O3", "--version"]
    assert [file.suffix for file in fresh.iterdir()] == [".so"]


def test_kernels_and_torch_share_one_openmp_runtime() -> None:
    if cpu_ops.load() is None:
        pytest.skip(cpu_ops.why_not())
    runtimes = cpu_library._openmp_runtimes()
    assert len(runtimes) == 1 and Path(runtimes[0]).is_relative_to(Path(torch.__file__).parents[1])


def test_a_compiler_that_fails_says_why(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CXX",
        compiler(
            tmp_path / "broken", 'test "$1" = --version || { echo "no such option" >&2; exit 1; }'
        ),
    )
    assert cpu_ops.load() is None
    assert "no such option" in cpu_ops.why_not()


def test_a_killed_compiler_leaves_nothing(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CXX",
        compiler(
            tmp_path / "killed",
            'test "$1" = --version && exit; for last; do :; done; echo half > "$last"; kill -9 $$',
        ),
    )
    assert cpu_ops.load() is None
    assert list(fresh.iterdir()) == []


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert cpu_ops.load() is None
    assert "no C++ compiler" in cpu_ops.why_not()
    monkeypatch.setenv("CXX", "/does/not/exist")
    cpu_ops._attempt.cache_clear()
    assert cpu_ops.load() is None
    assert "/does/not/exist" in cpu_ops.why_not()


def test_a_cache_that_cannot_be_written(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cpu_ops.load() is None
    assert "cannot compile" in cpu_ops.why_not()


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0")
    assert cpu_ops.load() is None and not cpu_ops.available(torch.bfloat16)
    assert cpu_ops.why_not() == "run.cpu_kernels or EAGLE3_CPU_KERNELS switches them off"
