"""The C++ kernels of src: compiled once for each level and type, loaded, and what they read.

A library is kept in ${XDG_CACHE_HOME:-~/.cache}/eagle3/native under a hash of everything that
shapes it: sources, flags, compiler. It is written to a temporary name and renamed, so that two
processes may race and a killed compiler leaves nothing that looks finished. It is code, so it is
loaded only from a directory that belongs to the user and that nobody else can write.

Structures follow kernels.h and draft.cpp, field by field.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # loads the OpenMP runtime that the kernels share
from torch import Tensor

from pipeline.config import cache_directory
from pipeline.decoder.ops.layer import AttentionMetadata, LayerStack

_SOURCES = Path(__file__).parent / "src"
# Without -ffp-contract=off the compiler may fuse a product and a sum in one instance of a kernel
# and not in another, and a token's result would depend on how many rows stand beside it.
_FLAGS = ("-O3", "-fopenmp", "-ffp-contract=off", "-shared", "-fPIC", "-std=c++17")
#: Levels of config/isa.py → what the compiler may use.
_LEVEL_FLAGS = {
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "amx": ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
# Arguments of each function: p a pointer, i an int64, f a float; before the colon, what it returns.
_PROTOTYPES = {
    "packed_size": "i:iii",
    "pack": ":ppiiii",
    "linear": ":ppppiip",
    "add_rms_norm": ":ppppppfiii",
    "embed_concat": "i:ppppppfiii",
    "gate_mul": ":ppiiii",
    "compute_slot_mapping": ":ppppppii",
    "layers": ":pipppppipifi",
    "draft_beams": "i:ppppipppppppiiifi",
    "rope_write": ":pppppppfiiii",
    "tree_attention": ":pppppiiii",
    "argmax": ":ppiii",
    "most_proposed": "i:",
    "propose": ":pppiiii",
    "perturb_drafts": ":ppppppiiiii",
    "select_beams": ":ppppppppppppiii",
    "grow_tree": ":ppppppppiii",
    "sample": ":pppppppppiiii",
    "verify": ":ppppppiii",
    "compact": ":ppppiiiiiiiii",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class Unavailable(Exception):
    """Why this machine cannot run the kernels."""


def load_library(level: str, dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels of a level for activations of a type, compiled if they are not in the cache.

    Raises Unavailable with the reason.
    """
    path = _compiled(level, dtype, _openmp_runtime())
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"cannot load {path}: {error}") from error
    if len(_openmp_runtimes()) > 1:
        # Two thread pools on the same cores would wait for each other.
        runtimes = ", ".join(_openmp_runtimes())
        raise Unavailable(f"the compiler brought a second OpenMP runtime: {runtimes}")
    for name, prototype in _PROTOTYPES.items():
        result, _, arguments = prototype.partition(":")
        function = getattr(library, f"eagle3_{name}")
        function.argtypes = [_TYPES[kind] for kind in arguments]
        function.restype = _TYPES[result] if result else None
    return library


def _openmp_runtime() -> str:
    """Torch's OpenMP runtime; linked to this very file, kernels and torch share one thread pool."""
    runtimes = _openmp_runtimes()
    if len(runtimes) != 1:
        raise Unavailable(f"torch must have loaded one OpenMP runtime, found {runtimes or 'none'}")
    return runtimes[0]


def _openmp_runtimes() -> list[str]:
    mapped = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"(/\S*/lib(?:gomp|i?omp5?)[-.]\S*)$", mapped, re.MULTILINE)))


def _compiled(level: str, dtype: torch.dtype, runtime: str) -> Path:
    compiler = _compiler()
    wide = ("-DEAGLE3_FLOAT32",) if dtype is torch.float32 else ()
    flags = *_FLAGS, *_LEVEL_FLAGS[level], *wide
    sources = sorted(_SOURCES.glob("*.cpp"))
    try:
        version = _run([*compiler, "--version"], timeout=60)
        content = [file.read_text() for file in (*sources, *sorted(_SOURCES.glob("*.h")))]
        shaping = *content, *flags, *compiler, version, runtime
        key = hashlib.sha256("\0".join(shaping).encode()).hexdigest()[:32]
        path = cache_directory() / "native" / f"{level}-{key}.so"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(path.parent)
        if not path.exists():
            _compile([*compiler, *flags], sources, runtime, path)
        _refuse_foreign(path)
    except subprocess.CalledProcessError as error:
        problem = error.stderr.strip()[-500:] or error.returncode
        raise Unavailable(f"{shlex.join(compiler)} failed: {problem}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"cannot compile the kernels: {error}") from error
    return path


def _refuse_foreign(path: Path) -> None:
    """Raise Unavailable for what somebody else made, or could have changed."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "can be written by others"
    else:
        return
    fix = f"remove it, or `chmod -R go-w {path}` if you trust what is in it"
    raise Unavailable(f"no code is loaded from {path}: it {problem} (fix: {fix})")


def _compile(command: list[str], sources: list[Path], runtime: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as directory:
        output = Path(directory) / path.name
        # Torch's runtime comes first and satisfies every symbol, so the compiler's own is not
        # recorded. A process may load two types: each library's calls stay inside it (-Bsymbolic).
        linked = "-Wl,--as-needed", "-Wl,-Bsymbolic", *map(str, sources), runtime
        _run([*command, *linked, "-o", str(output)], timeout=600)
        output.chmod(0o700)
        output.replace(path)


def _run(command: list[str], timeout: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout)
    return done.stdout


def _compiler() -> list[str]:
    """$CXX, or GCC: clang's OpenMP needs a runtime of its own."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "c++"):
        if shutil.which(name):
            return [name]
    raise Unavailable("there is no C++ compiler (install g++, or set CXX)")


class MatrixStruct(ctypes.Structure):
    """`Matrix` of kernels.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "wide")),
    ]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [outputs, inputs] in the layout of linear.cpp."""

    data: Tensor  # uint8
    struct: MatrixStruct
    address: int  # of `struct`
    outputs: int
    inputs: int


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Pointers for a call, null for what is missing; the caller keeps the tensors alive."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


#: `kInside` of kernels.h.
_INSIDE = -(2**63)


def refuse_outside(token: int, vocabulary: int) -> None:
    """Raise IndexError, as torch does, for a token that a kernel found no embedding of."""
    if token != _INSIDE:
        raise IndexError(f"token {token} is outside the embedding of {vocabulary} tokens")


def _fields(*, pointers: str, numbers: str) -> list[tuple[str, Any]]:
    fields = [(name, ctypes.c_void_p) for name in pointers.split()]
    return [*fields, *((name, ctypes.c_int64) for name in numbers.split())]


class LayerStruct(ctypes.Structure):
    """`Layer`: the addresses of a LayerWeights and of the norm after it, and its sizes."""

    _fields_ = _fields(
        pointers="qkv output gate_up down qkv_bias output_bias query_norm key_norm post_norm norm "
        "attended_norm fed_norm",
        numbers="heads groups size gelu local captured",
    )


class DraftHeadStruct(ctypes.Structure):
    """`DraftHead`: the addresses of a DraftHead."""

    _fields_ = _fields(
        pointers="layer lm_head embedding embed_norm hidden_norm target_ids",
        numbers="norm_output norm_before_residual layers vocabulary",
    )


class MetadataStruct(ctypes.Structure):
    """`Metadata`: the addresses of an AttentionMetadata, and its sizes."""

    _fields_ = _fields(
        pointers="cos sin positions slot_mapping block_table seq_lens cu_seqlens_q mask first_seen "
        "local",
        numbers="rows tokens pages",
    )
    source: AttentionMetadata | None = None
    pointed: tuple[Any, ...] = ()  # what the addresses point into


def layer_structs(
    stack: LayerStack, dtype: torch.dtype, *, groups: int, size: int
) -> ctypes.Array[LayerStruct]:
    structs = (LayerStruct * len(stack.layers))()
    for index, (weights, norm) in enumerate(zip(stack.layers, stack.norms, strict=True)):
        none = None, None
        biases = weights.qkv_bias, weights.output_bias
        norms = *(weights.head_norms or none), weights.post_norm, norm
        norms = *norms, *(weights.update_norms or none)
        assert all(each is None or each.dtype is dtype for each in biases)
        assert all(each is None or each.dtype is torch.float32 for each in norms)
        matrices = weights.qkv, weights.output, weights.gate_up, weights.down
        pointers = *(matrix.address for matrix in matrices), *addresses(*biases, *norms)
        captured = stack.captured.index(index) if index in stack.captured else -1
        sizes = weights.output.inputs // size, groups, size
        structs[index] = LayerStruct(*pointers, *sizes, weights.gelu, weights.local, captured)
    return structs


def metadata_struct(metadata: AttentionMetadata) -> MetadataStruct:
    cos, sin = metadata.rotary
    assert cos.is_contiguous() and sin.is_contiguous()
    indices = metadata.positions, metadata.slot_mapping, metadata.block_table, metadata.seq_lens
    optional = metadata.mask, metadata.first_seen
    tensors = (
        cos,
        sin,
        *(tensor.contiguous() for tensor in (*indices, metadata.cu_seqlens_q)),
        *(None if tensor is None else tensor.contiguous() for tensor in optional),
    )
    local = None if metadata.local is None else metadata_struct(metadata.local)
    at = None if local is None else ctypes.addressof(local)
    sizes = len(metadata.seq_lens), len(metadata.positions), metadata.block_table.shape[1]
    struct = MetadataStruct(*addresses(*tensors), at, *sizes)
    struct.source, struct.pointed = metadata, (*tensors, local)
    return struct
