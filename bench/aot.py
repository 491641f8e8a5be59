"""Compile every Triton kernel for GPUs that are not here: `python -m bench.aot [--known TABLE]
[kernel …]`.

The operations run once on tensors without data, and each launch, instead of reaching a device,
names a kernel with the types, constants and divisibilities that the real launch would have. What is
compiled is therefore what is launched. A kernel that does not compile, or needs more shared memory
than the architecture gives a program, ends the command with an error. `programs` is how many of it
a multiprocessor holds at a time, `occupancy` the share of its 64 warps that these are.

tests/decoder/ops/aot-*.txt are what the command prints, each of a version of Triton and its
assembler. `source` is a digest of what a kernel is compiled from, Triton's first representation of
it. With `--known` a row of such a table is taken over where version, launch and source are the
same: what was changed is compiled, which takes seconds instead of minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton._C.libtriton import ir  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource, make_backend  # type: ignore[import-untyped]

from pipeline.config.train import Loss
from pipeline.decoder.ops.draft import Candidates, DraftNoise
from pipeline.decoder.ops.layer import PAGE, AttentionMetadata, LayerStack, LayerWeights
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.decoder.ops.tree import SamplingTensors, root_only
from pipeline.decoder.ops.triton.launch import INTERPRETED
from pipeline.decoder.ops.triton.ops import TritonOps
from pipeline.learning.losses_kernel import compare_in_place

#: Bytes of shared memory that one program may have, by compute capability (CUDA C++ Programming
#: Guide).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: What a multiprocessor has, by the same source: shared memory, of which each program takes 1 KiB
#: more than it asks for; four parts of 16,384 registers, given to warps in blocks of 256; warps;
#: programs.
_SHARED = {arch: limit + 1024 for arch, limit in SHARED_LIMIT.items()}
_PARTS, _PART_REGISTERS, _REGISTER_BLOCK, _WARPS, _PROGRAMS = 4, 16384, 256, 64, 32

_TYPES = {
    **{torch.bfloat16: "bf16", torch.float32: "fp32"},
    **{torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"},
}


@dataclass(frozen=True)
class Variant:
    """A kernel as one launch specialises it."""

    kernel: Any
    label: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[int, ...]  # indices of the arguments that are multiples of 16
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def specialisation(self) -> str:
        """Equal where Triton would compile the same."""
        return str((self.name, self.signature, self.constants, self.divisible))


@dataclass(frozen=True)
class Compiled:
    """What became of a variant on one architecture."""

    variant: Variant
    arch: int
    shared: int  # bytes
    registers: int | None  # a thread; None where cuobjdump does not run
    spilled: int | None  # bytes a thread

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_LIMIT[self.arch]

    @property
    def programs(self) -> int | None:
        """How many of them a multiprocessor holds."""
        if self.registers is None:
            return None
        of_warp = -(-self.registers * 32 // _REGISTER_BLOCK) * _REGISTER_BLOCK
        warps = min(_WARPS, _PARTS * (_PART_REGISTERS // of_warp))
        shared = _SHARED[self.arch] // (self.shared + 1024)
        return min(_PROGRAMS, warps // self.variant.warps, shared)


@dataclass
class Recorder(TritonOps):
    """Operations that record their launches; call them with tensors on the meta device."""

    dtype: torch.dtype = torch.bfloat16
    label: str = ""
    variants: list[Variant] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.dtype)

    def _start(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        warps: int,
        stages: int,
        **constants: Any,
    ) -> None:
        signature: dict[str, str] = {}
        divisible = []
        for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=False)):
            name, fixed = parameter.name, not parameter.do_not_specialize
            signature[name] = _type_of(value, fixed)
            if signature[name] == "constexpr":
                constants[name] = value
            elif fixed and _is_divisible(value):
                divisible.append(index)
        signature |= dict.fromkeys(constants, "constexpr")
        specialised = signature, constants, tuple(divisible)
        self.variants.append(Variant(kernel, self.label, *specialised, warps, stages))


@cache
def variants() -> tuple[Variant, ...]:
    """Every kernel, in the types, head sizes and forms that a decoder or trainer launches.

    No two are alike.
    """
    recorder = Recorder()
    for dtype in (torch.bfloat16, torch.float32):
        _record_rows(recorder, dtype)
        for size in (64, 128):
            _record_attention(recorder, dtype, size)
            _record_products(recorder, dtype, size)
        if dtype == torch.bfloat16:  # Gemma's
            _record_attention(recorder, dtype, 256)
        for loss in get_args(Loss):
            _record_loss(recorder, dtype, loss)
    recorder.label = "int64"
    _record_trees(recorder)
    unlike = {variant.specialisation: variant for variant in reversed(recorder.variants)}
    return tuple(reversed(unlike.values()))


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile for sm_<arch>; needs no GPU. Raises what Triton or its assembler raises."""
    kernel = triton.compile(_ast(variant), target=_target(arch), options=_options(variant))
    return Compiled(variant, arch, int(kernel.metadata.shared), *_resources(kernel.asm["cubin"]))


def source_of(variant: Variant, arch: int) -> str:
    """Digest of the module that Triton makes of the kernel before its first pass, without the
    lines of files that it comes from."""
    backend = make_backend(_target(arch))
    options = backend.parse_options(_options(variant))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generated = backend.get_codegen_implementation(options), backend.get_module_map()
    module = _ast(variant).make_ir(_target(arch), options, *generated, context)
    return sha256(module.str_nodebug().encode()).hexdigest()[:12]


def _ast(variant: Variant) -> ASTSource:
    attributes = {(index,): [["tt.divisibility", 16]] for index in variant.divisible}
    return ASTSource(variant.kernel, variant.signature, variant.constants, attributes)


def _target(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, 32)


def _options(variant: Variant) -> dict[str, int]:
    return {"num_warps": variant.warps, "num_stages": variant.stages}


def compile_all(jobs: Sequence[tuple[int, int]], workers: int = 2) -> Iterator[Compiled]:
    """Each variant, by its index, on the architecture beside it, in order.

    By `workers` processes: the compiler holds Python's lock. A few take less time here than those
    take to start.
    """
    if len(jobs) <= _FEW:
        yield from (compile_variant(variants()[index], arch) for index, arch in jobs)
        return
    # A kernel cannot be sent to another process, but its index in the list can.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        resources = pool.map(_compile_index, *zip(*jobs, strict=True))
        for (index, arch), used in zip(jobs, resources, strict=True):
            yield Compiled(variants()[index], arch, *used)


_FEW = 8
_LAUNCH = "{:24} {:22} {:>6} {:>5} {:>6} {:>12}"
_USED = " {:>8} {:>9} {:>7} {:>8} {:>9}"
_HEADINGS = (
    *("kernel", "variant", "arch", "warps", "stages", "source"),
    *("shared", "registers", "spilled", "programs", "occupancy"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table of the named kernels, or of all; 1 if one does not fit."""
    parser = ArgumentParser(prog="python -m bench.aot")
    parser.add_argument("kernels", nargs="*", metavar="kernel", help="all where none is named")
    parser.add_argument("--known", type=Path, help="a table of which rows are taken over")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        problem = "TRITON_INTERPRET is set: kernels are interpreted in this process"
        raise RuntimeError(f"{problem}, unset it to compile them")
    known = _known(options.known) if options.known else {}
    print(_version())
    print((_LAUNCH + _USED).format(*_HEADINGS))
    chosen = [i for i, v in enumerate(variants()) if v.name in (options.kernels or {v.name})]
    launches = {(i, arch): _launch(variants()[i], arch) for i in chosen for arch in SHARED_LIMIT}
    compiled = compile_all([job for job, launch in launches.items() if launch not in known])
    too_large = 0
    for launch in launches.values():
        if launch in known:
            print(known[launch])
            continue
        result = next(compiled)
        too_large += not result.fits
        verdict = "" if result.fits else f"  needs more than {SHARED_LIMIT[result.arch]}"
        print(f"{launch}{_used(result)}{verdict}", flush=True)
    if too_large:
        problem = f"{too_large} kernels need more shared memory than their architecture has"
        print(problem, file=sys.stderr)
    return int(too_large > 0)


def _version() -> str:
    return f"triton {triton.__version__}"


def _known(table: Path) -> dict[str, str]:
    """A table's rows by launch and source; none where another Triton made it."""
    version, _, *rows = table.read_text(encoding="utf-8").splitlines()
    used = len(_USED.format(*[""] * 5))
    return {row[:-used]: row for row in rows} if version == _version() else {}


def _launch(variant: Variant, arch: int) -> str:
    """A row's beginning: all that decides what follows."""
    launch = variant.name, variant.label, f"sm_{arch}", variant.warps, variant.stages
    return _LAUNCH.format(*launch, source_of(variant, arch))


def _used(compiled: Compiled) -> str:
    programs = compiled.programs
    occupancy = "-" if programs is None else f"{programs * compiled.variant.warps / _WARPS:.0%}"
    numbers = compiled.registers, compiled.spilled, programs
    return _USED.format(compiled.shared, *map(_or_dash, numbers), occupancy)


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _compile_index(index: int, arch: int) -> tuple[int, int | None, int | None]:
    """A worker's job: shared memory, registers and spilled bytes of one variant."""
    compiled = compile_variant(variants()[index], arch)
    return compiled.shared, compiled.registers, compiled.spilled


def _is_divisible(value: Any) -> bool:
    """Whether a multiple of 16; of a tensor, its address (zero on the meta device)."""
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _type_of(value: Any, fixed: bool) -> str:
    """A launch argument's type as Triton would specialise it.

    An integer 1 becomes a constant, if it is `fixed`.
    """
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if fixed and value == 1:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _record_rows(ops: Recorder, dtype: torch.dtype) -> None:
    """The kernels that work on rows of hidden states and logits, at an 8B model's sizes."""
    ops.label = _TYPES[dtype]
    hidden, logits = _empty(4, 4096, dtype=dtype), _empty(2, 8, 128256, dtype=dtype)
    gain = _empty(4096, dtype=torch.float32)
    ops.embed_concat(_empty(4), hidden, hidden, gain, gain, 1e-5)
    for form, norm in (("", None), (" update norm", gain)):
        ops.label = f"{_TYPES[dtype]}{form}"
        ops.add_rms_norm(hidden, hidden, gain, 1e-5, norm)
    for gelu in (False, True):
        ops.label = f"{_TYPES[dtype]}{' gelu' if gelu else ''}"
        ops.gate_mul(_empty(4, 28672, dtype=dtype), gelu=gelu)
    ops.label = _TYPES[dtype]
    beams, scores = _empty(2, 10), _empty(2, 10, dtype=torch.float32)
    ops.select_beams(
        scores, scores[:, :, None].expand(2, 10, 10), beams[:, :, None].expand(2, 10, 10),
        beams, _empty(20, 4096, dtype=dtype), beams,
    )  # fmt: skip
    ops.argmax(logits)
    ops.propose(logits[0], 10)
    ops.propose(logits[0], 10, beams.flatten())
    noise = DraftNoise(_empty(2, dtype=torch.float32), _empty(2), _empty(2))
    for target_ids in (None, _empty(128256)):
        ops.perturb_drafts(logits.flatten(0, 1), noise, target_ids)
    tree = root_only(_empty(2))
    fraction = _empty(2, dtype=torch.float32)
    sampling = SamplingTensors(fraction, fraction, _empty(2), _empty(2))
    ops.sample(logits, tree, sampling, _empty(2, 8), 6)


def _record_attention(ops: Recorder, dtype: torch.dtype, size: int) -> None:
    """The kernels that know a head's size: 32 query heads in 8 groups, two rows."""
    planes = _empty(4, 2, 32, 8, PAGE, size, dtype=dtype)
    keys, values = planes[0]
    block_table, seq_lens = _empty(2, 128), _empty(2)  # 8192 tokens
    rotary = _empty(8192, size, dtype=dtype), _empty(8192, size, dtype=dtype)
    qkv, tokens = _empty(8, 48 * size, dtype=dtype), _empty(8)

    def metadata(max_query_len: int, mask: Tensor | None) -> AttentionMetadata:
        return AttentionMetadata(
            rotary, tokens, tokens, block_table, seq_lens, _empty(3), max_query_len, mask
        )

    gain = _empty(size, dtype=torch.float32)
    for norms in (None, (gain, gain)):
        ops.label = f"{_TYPES[dtype]} d={size}{' norms' if norms else ''}"
        ops.rope_write(qkv, norms, 1e-5, metadata(4, None), keys, values)
    ops.label = f"{_TYPES[dtype]} d={size}"
    ops.compact(planes, block_table, seq_lens, _empty(2, 7))
    # float32 is for checks; its products take the compiler long, and differ in no way between these
    # forms.
    for count in (16,) if dtype == torch.float32 or size == 256 else (1, 16, 64):
        ops.label = f"{_TYPES[dtype]} d={size} nodes={count}"
        query, mask = _empty(2 * count, 32, size, dtype=dtype), _empty(2 * count)
        ops.tree_attention(query, keys, values, metadata(count, mask))
        if count == 16:  # behind a sliding window, rows are masked in every page
            ops.label = f"{_TYPES[dtype]} d={size} sliding"
            sliding = replace(metadata(count, mask), first_seen=mask)
            ops.tree_attention(query, keys, values, sliding)
    if dtype != torch.float32 or size == 64:
        ops.label = f"{_TYPES[dtype]} d={size} prefill"
        query = _empty(2048, 32, size, dtype=dtype)
        ops.tree_attention(query, keys, values, metadata(2000, None))
    if size == 256:
        ops.label = f"{_TYPES[dtype]} d={size} prefill sliding"
        sliding = replace(metadata(2000, None), first_seen=_empty(2048))
        ops.tree_attention(query, keys, values, sliding)


class _AloneInIt(TensorGroup):
    """What others would send is not waited for."""

    def sum(self, part: Tensor) -> Tensor:
        return part


def _record_products(ops: Recorder, dtype: torch.dtype, size: int) -> None:
    """An 8B model's layers with heads of `size`: plain decoding, a tree, the most that are fused;
    with the biases and head norms of other families, and with a draft head's in float8."""
    plane = _empty(2, 2, 32, 8, PAGE, size, dtype=dtype)
    rotary = _empty(8192, size, dtype=dtype), _empty(8192, size, dtype=dtype)
    gain = _empty(4096, dtype=torch.float32)
    queries = 4096 // size
    qkv = 4096 + 16 * size
    plain = LayerWeights(
        qkv=_empty(qkv, 4096, dtype=dtype),
        qkv_bias=None,
        head_norms=None,
        output=_empty(4096, queries * size, dtype=dtype),
        output_bias=None,
        post_norm=gain,
        gate_up=_empty(28672, 4096, dtype=dtype),
        down=_empty(4096, 14336, dtype=dtype),
    )
    other = replace(plain, qkv_bias=_empty(qkv, dtype=dtype), head_norms=(gain[:size], gain[:size]))
    matrices = {name: getattr(plain, name) for name in ("qkv", "output", "gate_up", "down")}
    rounded = {name: ops.pack_float8(each) for name, each in matrices.items()}
    float8 = replace(plain, **rounded)
    divided = replace(plain, group=_AloneInIt(0, 2))
    # float32 is for checks, as above.
    forms = [(16, plain), (16, float8)]
    if dtype != torch.float32:
        forms += [(64, plain), (16, other), (64, float8), (16, divided)]
    names = {id(other): " bias, norms", id(float8): " fp8", id(divided): " divided"}
    for tokens, weights in forms:
        other_form = names.get(id(weights), "")
        ops.label = f"{_TYPES[dtype]} d={size} tokens={tokens}{other_form}"
        hidden, index = _empty(tokens, 4096, dtype=dtype), _empty(tokens)
        metadata = AttentionMetadata(
            rotary, index, index, _empty(1, 128), _empty(1), _empty(2), tokens, index
        )
        stack = LayerStack((weights, weights), (gain, gain), 1e-5, ())
        ops.layers(stack, metadata, hidden, hidden, plane)
        if weights is float8:
            ops.label = f"{_TYPES[dtype]} tokens={tokens} fp8"
            ops.linear(hidden, ops.pack_float8(_empty(32000, 4096, dtype=dtype)))


def _record_trees(ops: Recorder) -> None:
    """The kernels on integers: 10 candidates a step, six steps, 60 nodes."""
    tokens, scores = _empty(2, 510), _empty(2, 510, dtype=torch.float32)
    ops.compute_slot_mapping(_empty(2, 128), _empty(2), _empty(20), _empty(20))
    tree = ops.grow_tree(_empty(2), tokens, tokens, scores, 60)
    ops.verify(tree, tree.tokens, 7)
    # Lookups over 8192 tokens: eight chains, as they are by default, and the most there may be,
    # beside the four beams of a small draft and ten of a large one.
    history, seq_lens = _empty(2, 8448), _empty(2)
    ops.write_history(history, seq_lens, _empty(3), 7, _empty(14), _empty(14), seq_lens)
    for most, candidates in ((8, 68), (64, 510)):
        ops.label = f"int64 chains={most}"
        lengths, chains = ops.look_up(history, seq_lens, max_match=8, least=1, most=most, steps=6)
        looked_up = ops.tree_of_chains(chains, lengths, 10)
        tokens, scores = _empty(2, candidates), _empty(2, candidates, dtype=torch.float32)
        drafted = Candidates(tokens, tokens, scores, _empty(candidates))
        ops.merge_candidates(drafted, looked_up, 6)


def _record_loss(ops: Recorder, dtype: torch.dtype, loss: Loss) -> None:
    """A training loss at an 8B model's sizes: five steps, a draft vocabulary of 32,000."""
    ops.label = f"{_TYPES[dtype]} {loss}"
    logits = _empty(5, 8, 32000, dtype=dtype), _empty(8, 32000, dtype=dtype)
    scales = _empty(5, 8, dtype=torch.float32)
    overlaps = scales if loss == "ce_tv" else None
    compare_in_place(*logits, scales, _empty(5, 8), loss, overlaps, start=ops._start)


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers and bytes of stack a thread, read from a binary by Triton's own cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(tool), "-res-usage", str(file)]
        try:
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None, None
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    return (int(match[1]), int(match[2])) if match else (None, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
