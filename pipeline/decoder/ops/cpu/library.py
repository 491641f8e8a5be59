"""Compile the C++ kernels of src once a machine, and load them.

The library is kept in ${XDG_CACHE_HOME:-~/.cache}/eagle3/native under a hash of everything that
shapes it: sources, flags, compiler, processor. It is written to a temporary name and renamed, so
that two processes may race and a killed compiler leaves nothing that looks finished.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401 — loads the OpenMP runtime that the kernels share

from pipeline.config import cache_directory

_SOURCES = Path(__file__).parent / "src"
# Without -ffp-contract=off the compiler may fuse a product and a sum in one instance of a kernel
# and not in another, and a token's result would depend on how many rows stand beside it.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-shared", "-fPIC", "-std=c++17")
_REQUIRED = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}

# Arguments of each function: p a pointer, i an int64, f a float; before the colon, what it returns.
_PROTOTYPES = {
    "packed_size": "i:ii",
    "pack": ":ppiii",
    "linear": ":ppppiiii",
    "add_rms_norm": ":pppppfiii",
    "silu_mul": ":ppiii",
    "layer": ":pppppppppfi",
    "rope_write": ":ppppppppppfiiiiii",
    "tree_attention": ":ppppppppi",
    "argmax": ":ppiii",
    "most_proposed": "i:",
    "propose": ":pppiiii",
    "grow_tree": ":ppppppppiii",
    "sample": ":pppppppppiiii",
    "verify": ":ppppppiii",
    "compact": ":ppppiiiiiiiii",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class Unavailable(Exception):
    """Why this machine cannot run the kernels."""


def load_library() -> ctypes.CDLL:
    """The kernels, compiled if they are not in the cache. Raises Unavailable with the reason."""
    processor, runtime = _processor(), _openmp_runtime()
    path = _compiled(processor, runtime)
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


def _processor() -> str:
    """Model and features of the processor, which decide what -march=native means."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise Unavailable(f"the kernels are for x86-64 Linux, not {machine} {system}")
    about = Path("/proc/cpuinfo").read_text()
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", about, re.MULTILINE))
    missing = _REQUIRED - set(fields.get("flags", "").split())
    if missing:
        raise Unavailable(f"the processor lacks {', '.join(sorted(missing))}")
    return f"{fields.get('model name')} {fields['flags']}"


def _openmp_runtime() -> str:
    """Torch's OpenMP runtime; linked to this very file, kernels and torch share one thread pool."""
    runtimes = _openmp_runtimes()
    if len(runtimes) != 1:
        raise Unavailable(f"torch must have loaded one OpenMP runtime, found {runtimes or 'none'}")
    return runtimes[0]


def _openmp_runtimes() -> list[str]:
    mapped = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"(/\S*/lib(?:gomp|i?omp5?)[-.]\S*)$", mapped, re.MULTILINE)))


def _compiled(processor: str, runtime: str) -> Path:
    compiler = _compiler()
    sources = sorted(_SOURCES.glob("*.cpp"))
    try:
        version = _run([*compiler, "--version"], timeout=60)
        content = [file.read_text() for file in (*sources, *sorted(_SOURCES.glob("*.h")))]
        shaping = *content, *_FLAGS, *compiler, version, processor, runtime
        key = hashlib.sha256("\0".join(shaping).encode()).hexdigest()[:32]
        path = cache_directory() / "native" / f"{key}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, sources, runtime, path)
    except subprocess.CalledProcessError as error:
        problem = error.stderr.strip()[-500:] or error.returncode
        raise Unavailable(f"{shlex.join(compiler)} failed: {problem}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"cannot compile the kernels: {error}") from error
    return path


def _compile(compiler: list[str], sources: list[Path], runtime: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as directory:
        output = Path(directory) / path.name
        # Torch's runtime comes first and satisfies every symbol, so the compiler's own is not
        # recorded.
        linked = "-Wl,--as-needed", *map(str, sources), runtime
        _run([*compiler, *_FLAGS, *linked, "-o", str(output)], timeout=600)
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
