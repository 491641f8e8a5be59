"""Single tensors of a target directory, read from its safetensors without building the model.

Names and conventions are Llama's, whatever the target's: what stands before `embed_tokens` stands
before the layers too, and the factors of an `Architecture` are folded into the weights. The
embedding is as stored: a served head reads that table, and norms it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.documents import check_header
from pipeline.errors import TargetError
from pipeline.target.architecture import Architecture
from pipeline.target.files import weight_files

#: safetensors' names of the types that weights are computed in.
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class TargetWeights:
    """Tensors by Hugging Face name, of the files that transformers would load (memory-mapped)."""

    def __init__(self, directory: Path, architecture: Architecture | None = None) -> None:
        """Without an `architecture` Llama's is assumed, and all stored tensors are read.

        Raises TargetError for files that cannot be read, or that are not the architecture's.
        """
        from safetensors import SafetensorError, safe_open

        self.directory = directory
        self._architecture = architecture or Architecture()
        self._files: dict[str, Any] = {}
        #: Stored tensors that are not part of the model; they are not read.
        self.surplus: list[str] = []
        for path in weight_files(directory):
            try:
                check_header(path)
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                fix = "download or convert the target again"
                raise TargetError(f"cannot be read: {error}", where=str(path), fix=fix) from error
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]
        if self._architecture.tied is not None:
            self._check_output(tied=self._architecture.tied)
        if self._architecture.tensors is not None:
            self._keep(self._architecture.tensors)

    def _check_output(self, *, tied: bool) -> None:
        """Raise TargetError where lm_head is not what the configuration says of it."""
        name, flag = self._output_name, f"tie_word_embeddings={str(tied).lower()}"
        if not tied:
            if name is None and not any("lm_head." in each for each in self):
                problem = f"holds no lm_head.weight, and config.json says {flag}: "
                problem += "transformers would make up random weights"
                fix = "set tie_word_embeddings to true if the model is tied, or add lm_head.weight"
                raise TargetError(problem, where=str(self.directory), fix=fix)
            return
        packed = next((each for each in self if "lm_head." in each and each != name), None)
        if packed is None and (name is None or torch.equal(self[name], self.embedding())):
            return
        where = f"{self.directory}: {packed or name}"
        problem = f"differs from {self._embedding_name}, but config.json says {flag}"
        fix = "set tie_word_embeddings to false if the stored lm_head is the model's, or remove "
        raise TargetError(problem, where=where, fix=f"{fix}that tensor if the embedding is")

    def _keep(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """Drop stored tensors that the configuration's model does not have.

        Raises TargetError for a tensor that it has and the files lack, or hold in another shape.
        """
        where, files = str(self.directory), {}
        for name, shape in tensors.items():
            stored = name if name in self else name.removeprefix("model.")
            if stored not in self:
                problem = f"has no tensor {name!r}, which a model of its config.json has"
                fix = "correct config.json, or download or convert the whole target again"
                raise TargetError(problem, where=where, fix=fix)
            has = tuple(self._files[stored].get_slice(stored).get_shape())
            if has != shape:
                problem = f"{stored} has shape {list(has)}, by config.json it has {list(shape)}"
                raise TargetError(problem, where=where, fix="correct config.json or the weights")
            files[stored] = self._files[stored]
        self.surplus = sorted(self._files.keys() - files.keys())
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            fix = "choose a target of docs/targets.md, in safetensors"
            raise TargetError(f"has no tensor {name!r}", where=str(self.directory), fix=fix)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def count_parameters(self, *, tied: bool) -> int:
        """Parameters, by shapes alone; `tied` leaves out an lm_head that copies the embedding."""
        return sum(
            prod(file.get_slice(name).get_shape())
            for name, file in self._files.items()
            if not (tied and _is_output(name))
        )

    def stored_dtype(self) -> str:
        """Type that most parameters are stored in, as torch spells it; from headers alone."""
        counts: Counter[str] = Counter()
        for name, file in self._files.items():
            part = file.get_slice(name)
            counts[part.get_dtype()] += prod(part.get_shape())
        name = counts.most_common(1)[0][0]
        return _TORCH_NAMES.get(name, name.lower())

    def check(self) -> None:
        """Raise TargetError where embedding or lm_head are missing or quantised, or any weight is
        and config.json does not say so."""
        for name in (self._embedding_name, self._output_name or self._embedding_name):
            self._whole(name)
        for name in () if self._architecture.quantised else self:
            kind = self._files[name].get_slice(name).get_dtype()
            if name.endswith(".weight") and kind not in _TORCH_NAMES:
                problem = f"is quantised ({kind}), and config.json has no quantization_config"
                fix = "use the checkpoint that is stored in 16 bits"
                raise TargetError(problem, where=f"{self.directory}: {name}", fix=fix)

    def embedding(self) -> Tensor:
        """Token embedding [V, H], as stored."""
        return self._whole(self._embedding_name)

    def lm_head(self) -> Tensor:
        """Rows [V, H] whose products with a final state are the logits; tied or not."""
        name, scale = self._output_name, self._architecture.logit_scale
        rows = self._whole(name) if name else self.embedding()
        return rows if scale == 1 else rows * scale

    def final_norm(self) -> Tensor:
        """What the norm before lm_head multiplies by [H]."""
        name = f"{self.prefix}norm.weight"
        if name in self:
            return self._norm(self[name])
        return torch.ones(self.embedding().shape[1])  # of a norm without a weight

    def last_norm(self) -> dict[str, Tensor]:
        """That norm's tensors as stored, names relative to it."""
        prefix = f"{self.prefix}norm."
        return {name.removeprefix(prefix): self[name] for name in self if name.startswith(prefix)}

    def layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of decoder layer `index`, names relative to it.

        Quantised tensors are left out: they are not weights by themselves.
        """
        prefix, architecture = f"{self.prefix}layers.{index}.", self._architecture
        stored = {name.removeprefix(prefix): self[name] for name in self if name.startswith(prefix)}
        layer = {name: tensor for name, tensor in stored.items() if _is_number(tensor)}
        scaled = "self_attn.q_norm." if "self_attn.q_norm.weight" in stored else "self_attn.q_"
        for name, tensor in layer.items():
            if name.endswith("norm.weight"):
                layer[name] = self._norm(tensor)
            if name.startswith(scaled) and architecture.query_scale != 1:
                layer[name] = layer[name] * architecture.query_scale
        return layer

    def _norm(self, weight: Tensor) -> Tensor:
        offset = self._architecture.norm_offset
        return weight if offset == 0 else weight.float() + offset

    def _whole(self, name: str) -> Tensor:
        """A tensor in a type that can be computed with. Raises TargetError."""
        tensor = self[name]
        if not _is_number(tensor):
            problem = f"{name} is quantised to {str(tensor.dtype).removeprefix('torch.')}"
            fix = "use a checkpoint whose embedding and lm_head are stored in 16 bits"
            raise TargetError(problem, where=str(self.directory), fix=fix)
        return tensor

    @cached_property
    def prefix(self) -> str:
        """`model.`, or what a wrapper of several models puts before its language model."""
        ends = [name for name in self if name.endswith("embed_tokens.weight")]
        return ends[0].removesuffix("embed_tokens.weight") if len(ends) == 1 else "model."

    @property
    def _embedding_name(self) -> str:
        return f"{self.prefix}embed_tokens.weight"

    @property
    def _output_name(self) -> str | None:
        return next((name for name in self if _is_output(name)), None)


def _is_output(name: str) -> bool:
    return name == "lm_head.weight" or name.endswith(".lm_head.weight")


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() >= 2
