"""Single tensors of a target directory, read from its safetensors without building the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.errors import TargetError

#: safetensors' names of the types that weights are computed in.
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


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
                fix = "download or convert the target again"
                raise TargetError(f"cannot be read: {error}", where=str(path), fix=fix) from error
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            fix = "use a dense causal language model of the Llama family"
            raise TargetError(f"has no tensor {name!r}", where=str(self.directory), fix=fix)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def count_parameters(self, *, tied: bool) -> int:
        """Parameters, by shapes alone; `tied` leaves out an lm_head that copies the embedding."""
        return sum(
            prod(file.get_slice(name).get_shape())
            for name, file in self._files.items()
            if not (tied and name == "lm_head.weight")
        )

    def stored_dtype(self) -> str:
        """Type that most parameters are stored in, as torch spells it; from headers alone."""
        counts: Counter[str] = Counter()
        for name, file in self._files.items():
            part = file.get_slice(name)
            counts[part.get_dtype()] += prod(part.get_shape())
        name = counts.most_common(1)[0][0]
        return _TORCH_NAMES.get(name, name.lower())

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
