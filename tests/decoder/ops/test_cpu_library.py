"""Compiling, caching, and machines that cannot."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.decoder.ops.cpu import library as cpu_library
from pipeline.decoder.ops.cpu import ops as cpu_ops
from pipeline.decoder.ops.cpu.ops import WeightMemory
from pipeline.errors import ConfigError

BF16 = torch.bfloat16


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and no memory of an earlier attempt before and after."""
    if cpu_ops.load(BF16) is None:
        pytest.skip(cpu_ops.why_not(BF16))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_ops._attempt.cache_clear()
    yield tmp_path / "eagle3" / "native"
    cpu_ops._attempt.cache_clear()


@pytest.fixture
def library(fresh: Path) -> Path:
    """The compiled kernels of this machine in the cache, copied there."""
    cached = Path("~/.cache/eagle3/native").expanduser()
    if cached.is_dir():
        shutil.copytree(cached, fresh, ignore=shutil.ignore_patterns("compiling-*"))
    loaded = cpu_ops.load(BF16)
    assert loaded is not None
    cpu_ops._attempt.cache_clear()
    return Path(loaded._library._name)


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_compiles_once_and_leaves_one_file_for_its_user_alone(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fresh.parents[1] / "calls"
    script = f'echo "$1" >> {calls}; exec g++ "$@"'
    monkeypatch.setenv("CXX", compiler(calls.with_name("counting"), script))
    before = os.umask(0)
    try:
        for _ in range(2):
            cpu_ops._attempt.cache_clear()
            assert cpu_ops.load(BF16) is not None and cpu_ops.why_not(BF16) == ""
    finally:
        os.umask(before)
    assert calls.read_text().split() == ["--version", "-O3", "--version"]
    (library,) = fresh.iterdir()
    assert library.suffix == ".so"
    assert stat.S_IMODE(fresh.stat().st_mode) == stat.S_IMODE(library.stat().st_mode) == 0o700


def test_a_type_and_a_level_have_libraries_of_their_own(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = cpu_ops.load(torch.float32)
    assert wide is not None and wide.arithmetic_name in ("avx2", "avx512")
    monkeypatch.setenv("EAGLE3_ISA", "avx2")
    lowest = cpu_ops.load(torch.float32)
    assert lowest is not None and lowest.arithmetic_name == "avx2"
    assert cpu_ops.load(torch.float16) is None and "float16" in cpu_ops.why_not(torch.float16)
    assert len(list(fresh.iterdir())) == len({wide.arithmetic_name, "avx2"})


def test_a_level_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_ISA", "avx1024")
    with pytest.raises(ConfigError, match="'avx1024' is not a level that this processor has"):
        cpu_ops.load(BF16)


def test_kernels_and_torch_share_one_openmp_runtime() -> None:
    if cpu_ops.load(BF16) is None:
        pytest.skip(cpu_ops.why_not(BF16))
    (runtime,) = cpu_library._openmp_runtimes()
    assert Path(runtime).is_relative_to(Path(torch.__file__).resolve().parents[1])


@pytest.mark.parametrize("at", ["library", "folder"])
@pytest.mark.parametrize(
    ("plant", "why"),
    [
        pytest.param(
            lambda path: os.chown(path, 12345, 12345),
            "belongs to user 12345",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
        (lambda path: path.chmod(0o777), "can be written by others (fix: remove it"),
    ],
)
def test_code_that_others_could_have_written_is_not_loaded(
    library: Path, at: str, plant: Callable[[Path], None], why: str
) -> None:
    plant(library if at == "library" else library.parent)
    assert cpu_ops.load(BF16) is None and why in cpu_ops.why_not(BF16)


BROKEN = 'test "$1" = --version || { echo "no such option" >&2; exit 1; }'
KILLED = 'test "$1" = --version && exit; for last; do :; done; echo half > "$last"; kill -9 $$'


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("CXX", BROKEN, "no such option"),
        ("CXX", KILLED, ""),
        ("CXX", "/does/not/exist", "/does/not/exist"),
        ("PATH", "", "no C++ compiler"),
        ("XDG_CACHE_HOME", __file__, "cannot compile"),
        ("EAGLE3_ISA", "none", "AVX2"),
        ("EAGLE3_CPU_KERNELS", "0", "EAGLE3_CPU_KERNELS switches them off"),
    ],
)
def test_a_machine_that_cannot_says_why_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if value in (BROKEN, KILLED):
        value = compiler(fresh.parents[1] / "compiler", value)
    monkeypatch.setenv(variable, value)
    assert cpu_ops.load(BF16) is None
    assert why in cpu_ops.why_not(BF16) != ""
    assert not fresh.exists() or list(fresh.iterdir()) == []


def test_small_weights_lie_side_by_side_and_none_overlaps() -> None:
    memory = WeightMemory()
    sizes = [1, 63, 64, 65, 5_000_000, 20_000_000, *[15_000_000] * 5]
    pieces = [memory.empty(size).fill_(index) for index, size in enumerate(sizes)]
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    for index, piece in enumerate(pieces):  # no piece is a part of another
        assert int(piece[0]) == int(piece[-1]) == index
    chunks = [piece.untyped_storage().data_ptr() for piece in pieces]
    assert len(set(chunks[:5])) == 1, "small weights share a chunk"
    assert chunks[5] != chunks[4] and len(set(chunks)) == 3, "a large one has its own"
