"""Every kernel compiles for three generations of GPUs, none of them here, and fits into each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import BaseBackend  # type: ignore[import-untyped]
from triton.compiler.errors import CompilationError  # type: ignore[import-untyped]

from bench import aot
from bench.aot import SHARED_LIMIT, Compiled, Recorder, source_of, variants
from pipeline.decoder.ops.layer import PAGE, AttentionMetadata, LayerStack, LayerWeights
from pipeline.decoder.ops.tree import SamplingTensors
from pipeline.decoder.ops.triton.ops import TritonOps

ROOT = Path(__file__).resolve().parents[3]
KERNELS = [
    *(ROOT / "pipeline/decoder/ops/triton").glob("*.py"),
    ROOT / "pipeline/learning/losses_kernel.py",
]


def run(*arguments: str, cache: Path, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Python in a process whose kernels are compiled, whatever this one does with them."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(cache)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one, so that this process compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_every_kernel_is_recorded() -> None:
    """A kernel that no operation launches, or that is not compiled ahead of time, goes untested.

    Recording also shows that shapes alone decide every grid and allocation: the tensors have no
    values.
    """
    defined = {
        name
        for file in KERNELS
        for name in re.findall(
            r"^@jit\ndef (\w+)_kernel\(", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert {variant.name for variant in variants()} == defined
    narrow = {v.name for v in variants() if "*bf16" in v.signature.values()}
    assert narrow == {
        *("add_rms_norm", "embed_concat", "gate_mul", "rope_write", "tree_attention"),
        *("project_heads", "add_product", "gated_product", "product"),
        *("compact", "select_beams"),
        *("argmax", "propose_part", "perturb_drafts", "threshold", "draw"),
        *("normaliser", "compare"),
    }
    wide = {v.name for v in variants() if "*bf16" not in v.signature.values()}
    assert wide == defined
    assert {
        (v.constants["DIM"], v.constants["CAUSAL"])
        for v in variants()
        if v.name == "tree_attention"
    } == {(d, c) for d in (64, 128, 256) for c in (True, False)}


def _prefill(length: int, row: int) -> Recorder:
    """What the forward of `length` tokens in slot `row` of eight launches, on tiny tensors."""
    ops = Recorder(torch.bfloat16)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    # Real tensors: a slot's row of a table begins at a multiple of 16 bytes, or does not.
    seq_lens, block_table = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 65, dtype=torch.int64)
    rotary, tokens = (empty(4096, 64), empty(4096, 64)), torch.zeros(length, dtype=torch.int64)
    tables = block_table[row : row + 1], seq_lens[row : row + 1], torch.tensor([0, length])
    metadata = AttentionMetadata(rotary, tokens, tokens, *tables, length, None)
    plane = empty(2, 2, 9, 2, PAGE, 64)
    hidden, norm = empty(length, 256), torch.empty(256, device="meta")
    layer = LayerWeights(
        qkv=empty(8 * 64, 256),
        qkv_bias=None,
        head_norms=None,
        output=empty(256, 4 * 64),
        output_bias=None,
        post_norm=norm,
        gate_up=empty(1024, 256),
        down=empty(256, 512),
    )
    ops.compute_slot_mapping(*tables[:2], tokens, tokens)
    ops.layers(LayerStack((layer, layer), (norm, norm), 1e-5, ()), metadata, hidden, hidden, plane)
    ops.embed_concat(tokens, empty(500, 256), hidden, norm, norm, 1e-5)
    numbers, settings = torch.zeros(8, dtype=torch.int64), torch.zeros(8)
    own = slice(row, row + 1)
    history = torch.zeros(8, 4353, dtype=torch.int64)[own]
    ops.write_history(history, *tables[1:], length, tokens, tokens, numbers[own])
    ops.look_up(history, tables[1], max_match=8, least=1, most=8, steps=5)
    sampling = SamplingTensors(settings[own], settings[own], numbers[own], numbers[own])
    ops.draw(empty(1, 500), sampling, numbers[own])
    return ops


def test_the_lengths_of_prompts_and_the_slots_compile_nothing() -> None:
    """More than warming up has compiled, or a server would stop for seconds at such a prompt."""
    warm = {
        each.specialisation
        for length in (*TritonOps.warm_up_lengths, 2048)
        for each in _prefill(length, 0).variants
    }
    # Every length that a tile, a chunk or a multiple of 16 could tell apart.
    for length in {*range(1, 200), *range(200, 4097, 13), *range(208, 4097, 16)}:
        for variant in _prefill(length, length % 8).variants:
            assert variant.specialisation in warm, (length, variant.name)
    names = {each.name for each in _prefill(1, 0).variants}
    assert {"tree_attention", "project_heads", "slot_mapping", "draw"} <= names
    assert {each.name for each in _prefill(4096, 0).variants} >= {"rope_write", "gate_mul"}


def test_launches_are_recorded_as_triton_specialises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type and divisibility of every argument, as Triton's own launcher decides them."""
    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    compared = 0
    record = Recorder._start

    def start(
        self: Recorder, kernel: Any, grid: Any, arguments: Any, *rest: Any, **more: Any
    ) -> None:
        nonlocal compared
        record(self, kernel, grid, arguments, *rest, **more)
        variant = self.variants[-1]
        for index, value in enumerate(arguments):
            one = kernel.params[index]
            free = one.do_not_specialize, one.do_not_specialize_on_alignment
            kind, key = native(BaseBackend, value, False, not free[0], not free[1])
            assert variant.signature[one.name] == kind, (variant.name, one.name)
            assert (index in variant.divisible) == (key == "D"), (variant.name, one.name)
            compared += 1

    monkeypatch.setattr(Recorder, "_start", start)
    for length in (1, 16, 17, 100):
        for row in (0, 1):
            _prefill(length, row)
    assert compared > 500


#: What `python -m bench.aot` prints, of each version of Triton; after a change: `… --known TABLE`.
TABLES = {path.stem.removeprefix("aot-"): path for path in Path(__file__).parent.glob("aot-*.txt")}
PINNED = TABLES.get(triton.__version__, TABLES["3.7.0"])


def test_programs_of_a_multiprocessor() -> None:
    """Registers, shared memory, warps or the number of programs: what is short decides."""

    def programs(registers: int, shared: int, warps: int, arch: int = 90) -> int | None:
        variant = replace(variants()[0], warps=warps)
        return Compiled(variant, arch, shared, registers, 0).programs

    assert programs(32, 0, 1) == 32
    assert programs(32, 0, 4) == 16
    assert programs(255, 0, 4) == 2
    assert programs(168, 0, 4) == 3
    assert programs(64, 100 * 1024, 4) == 2
    assert programs(64, 81 * 1024, 4, arch=80) == 2
    assert programs(64, 82 * 1024, 4, arch=80) == 1


def test_compiles_for_every_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into what is pinned. What the pinned table says of a source, it says of the same source made
    by the same Triton; the next test holds it against the compiler."""
    done = run("-m", "bench.aot", "--known", str(PINNED), cache=tmp_path)
    with capsys.disabled():  # the table is worth a look in every run
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    version, _, *lines = done.stdout.splitlines()
    pinned = PINNED.read_text(encoding="utf-8").splitlines()
    if version == pinned[0]:
        assert done.stdout.splitlines() == pinned
    rows = [line.split() for line in lines]
    assert len(rows) == len(variants()) * len(SHARED_LIMIT)
    shared = {
        (row[0], arch): int(row[row.index(arch) + 4])
        for row in rows
        for arch in row
        if re.fullmatch(r"sm_\d+", arch)
    }
    assert set(shared) == {
        (variant.name, f"sm_{arch}") for variant in variants() for arch in SHARED_LIMIT
    }
    assert shared["tree_attention", "sm_90"] > 0
    # The default tree: 16 nodes in groups of four query heads.
    default = [row for row in rows if {"tree_attention", "bf16", "d=128", "nodes=16"} <= {*row}]
    assert {row[4] for row in default} == {f"sm_{arch}" for arch in SHARED_LIMIT}
    for row in default:
        assert int(row[-2]) >= 2, f"two programs do not fit on one multiprocessor of {row[4]}"


def test_every_table_has_every_launch() -> None:
    """One that was not made again after a change would pin what nobody launches."""
    launches = sorted(
        f"{each.name} {each.label} sm_{arch} {each.warps} {each.stages}"
        for each in variants()
        for arch in SHARED_LIMIT
    )
    for version, path in TABLES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0] == f"triton {version}"
        # What stands before source, shared memory, registers, spilled, programs, occupancy.
        assert sorted(" ".join(line.split()[:-6]) for line in lines[2:]) == launches, version


def test_the_pinned_table_is_the_compilers(tmp_path: Path) -> None:
    """Of those that compile fast, compiled anew in every run."""
    quick = "add_rms_norm", "rope_write", "compact", "select_beams", "argmax", "verify", "compare"
    done = run("-m", "bench.aot", *quick, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    pinned = PINNED.read_text(encoding="utf-8").splitlines()
    if done.stdout.splitlines()[0] == pinned[0]:
        of_these = [row for row in pinned[2:] if row.split()[0] in quick]
        assert done.stdout.splitlines()[2:] == of_these and len(of_these) > 50


@pytest.mark.usefixtures("cache")
def test_a_row_of_another_source_is_not_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What such a row says is wrong here, and does not come out."""
    rows = PINNED.read_text(encoding="utf-8").splitlines(keepends=True)
    source = source_of(next(each for each in variants() if each.name == "verify"), 90)
    table = tmp_path / "table.txt"
    known = "".join(rows).replace(source, "0" * len(source)).replace("50%\n", " 1%\n")
    table.write_text(known, encoding="utf-8")
    assert aot.main(["--known", str(table), "verify"]) == 0
    version, _, *made = capsys.readouterr().out.splitlines()
    if version == rows[0].strip():
        pinned = [row.strip() for row in rows if row.startswith("verify ")]
        assert made == pinned and len(pinned) == len(SHARED_LIMIT)


def test_a_change_gives_another_source() -> None:
    """With another constant, and where an argument is no multiple of 16."""
    variant = next(each for each in variants() if each.name == "add_product")
    sources = {
        source_of(each, 90)
        for each in (
            variant,
            replace(variant, constants={**variant.constants, "SHARE": 128}),
            replace(variant, divisible=variant.divisible[1:]),
        )
    }
    assert len(sources) == 3


@pytest.mark.usefixtures("cache")
def test_fails_where_shared_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a limit of 16 bytes, RMS norm's sum over eight warps no longer fits."""
    monkeypatch.setattr(aot, "SHARED_LIMIT", {90: 16})
    assert aot.main(["add_rms_norm"]) == 1
    printed = capsys.readouterr()
    assert "needs more than 16" in printed.out
    assert "6 kernels need more shared memory" in printed.err


@pytest.mark.usefixtures("cache")
def test_fails_where_a_kernel_does_not_compile() -> None:
    variant = variants()[0]
    odd = replace(variant, constants={**variant.constants, "BLOCK": 100})
    with pytest.raises(CompilationError, match="power of 2"):
        aot.compile_variant(odd, 90)


def test_refuses_to_compile_in_the_interpreter(tmp_path: Path) -> None:
    done = run("-m", "bench.aot", "verify", cache=tmp_path, interpret=True)
    assert done.returncode != 0
    assert "TRITON_INTERPRET is set" in done.stderr
