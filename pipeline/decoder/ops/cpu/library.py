"""Compile the C++ kernels of src once a level and type, and load them.

A library is kept in ${XDG_CACHE_HOME:-~/.cache}/eagle3/native under a hash of everything that
shapes it: sources, flags, compiler. It is written to a temporary name and renamed, so that two
processes may race and a killed compiler leaves nothing that looks finished. It is code, so it is
loaded only from a directory that belongs to the user and that nobody else can write.
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
from pathlib import Path

import torch  # loads the OpenMP runtime that the kernels share

from pipeline.config import cache_directory

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
    "add_rms_norm": ":pppppfiii",
    "embed_concat": "i:ppppppfiii",
    "silu_mul": ":ppiii",
    "compute_slot_mapping": ":ppppppii",
    "layers": ":pipppppipifi",
    "draft_beams": "i:ppppippppiiifi",
    "rope_write": ":pppppppfiiii",
    "tree_attention": ":pppppiiii",
    "argmax": ":ppiii",
    "most_proposed": "i:",
    "propose": ":pppiiii",
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
