"""Single tensors of a target directory, read from its safetensors without building the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.errors import TargetError


class TargetWeights:
    """Tensors by Hugging Face name over all safetensors files of a directory (memory-mapped)."""

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.directory = directory
        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise TargetError(
                    f"cannot be read: {error}",
                    where=str(path),
                    fix="download or convert the target again",
                ) from error
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a mapping
                self._files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise TargetError(
                f"has no tensor {name!r}",
                where=str(self.directory),
                fix="use a dense causal language model of the Llama family",
            )
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def embedding(self) -> Tensor:
        """Token embedding [V, H]."""
        return self["model.embed_tokens.weight"]

    def lm_head(self) -> Tensor:
        """Output rows [V, H]; the embedding when they are tied."""
        return self["lm_head.weight"] if "lm_head.weight" in self else self.embedding()

    def final_norm(self) -> Tensor:
        """Weight of the norm before lm_head [H]."""
        return self["model.norm.weight"]

    def layer(self, index: int) -> dict[str, Tensor]:
        """All tensors of decoder layer `index`, names relative to it."""
        prefix = f"model.layers.{index}."
        return {name.removeprefix(prefix): self[name] for name in self if name.startswith(prefix)}
