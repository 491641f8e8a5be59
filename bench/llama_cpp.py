"""llama.cpp as a rival, when `pip install llama-cpp-python` was run: the same weights at 16 bits."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def rival(
    gguf: Path, folder: Path, *, threads: int, context: int
) -> Callable[[Sequence[int], int], float] | None:
    """(prompt ids, new tokens) → decoded tokens per second; None without the package.

    The target's quantised GGUF is dequantised to 16 bits first, so that it reads as many bytes as we do.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    model: Any = importlib.import_module("llama_cpp").Llama(
        str(_sixteen_bit(gguf, folder)),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def rate(prompt_ids: Sequence[int], new_tokens: int) -> float:
        model.reset()
        tokens = model.generate(list(prompt_ids), temp=0.0, repeat_penalty=1.0)
        next(tokens)  # prefill
        started = time.perf_counter()
        for _ in range(new_tokens - 1):
            next(tokens)
        return (new_tokens - 1) / (time.perf_counter() - started)

    return rate


def _sixteen_bit(gguf: Path, folder: Path) -> Path:
    """The same file with every quantised matrix as bfloat16."""
    import gguf as library

    target = folder / f"{gguf.stem}-bf16.gguf"
    if target.exists():
        return target
    reader: Any = library.GGUFReader(str(gguf))
    writer: Any = library.GGUFWriter(str(target) + ".partial", "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
        ):
            continue
        kind = field.types[0]
        writer.add_key_value(
            field.name,
            field.contents(),
            kind,
            field.types[-1] if kind == library.GGUFValueType.ARRAY else None,
        )
    writer.add_file_type(library.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = library.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        small = values.ndim == 1  # norms stay float32, as llama.cpp wants them
        kind = library.GGMLQuantizationType.F32 if small else library.GGMLQuantizationType.BF16
        writer.add_tensor(
            tensor.name, values if small else library.quantize(values, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(str(target) + ".partial").rename(target)
    return target
