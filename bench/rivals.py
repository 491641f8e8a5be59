"""The CPU benchmark's rivals: Hugging Face `generate`, and llama.cpp where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.target.forward import LoadedTarget


def hf_rate(hf: LoadedTarget, prompt: Sequence[int], new_tokens: int) -> float:
    """Decoding rate of `generate` at batch 1, without a run of one token, which is all prefill."""
    _, prefill = hf_generate(hf, [prompt], 1)
    tokens, whole = hf_generate(hf, [prompt], new_tokens)
    return (tokens - 1) / (whole - prefill)


@torch.inference_mode()
def hf_generate(
    hf: LoadedTarget, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[int, float]:
    """Tokens and seconds of greedy `generate` on left-padded prompts, without stop tokens."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
    inputs, attention_mask = torch.tensor(ids), torch.tensor(mask)
    started = time.perf_counter()
    output = hf.model.generate(
        inputs,
        attention_mask=attention_mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return (output.shape[1] - longest) * len(prompts), time.perf_counter() - started


def llama_cpp(
    gguf: Path, folder: Path, *, threads: int, context: int
) -> Callable[[Sequence[int], int], float] | None:
    """(prompt ids, new tokens) → decoded tokens per second; None without the package.

    The target's quantised GGUF is dequantised to 16 bits first, so that it reads as many bytes as
    we do.
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
    replaced = "general.architecture", "general.file_type"
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in replaced:
            continue
        kind = field.types[0]
        of = field.types[-1] if kind == library.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, of)
    writer.add_file_type(library.LlamaFileType.MOSTLY_BF16)
    float32, bfloat16 = library.GGMLQuantizationType.F32, library.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        values = library.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        if values.ndim == 1:  # norms stay float32, as llama.cpp wants them
            writer.add_tensor(tensor.name, values, raw_dtype=float32)
        else:
            packed = library.quantize(values, bfloat16)
            writer.add_tensor(tensor.name, packed, raw_dtype=bfloat16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(str(target) + ".partial").rename(target)
    return target
