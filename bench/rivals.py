"""Rivals in this process: Hugging Face `generate`, and llama.cpp where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

#: Greedy replies to all of some prompts, of so many tokens each.
Generate = Callable[[Sequence[Sequence[int]], int], object]


def decoding_rate(generate: Generate, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Tokens/s over all prompts, without prefill, which a run of one token times."""
    times = [time.perf_counter()]
    for count in (1, new_tokens):
        generate(prompts, count)
        times.append(time.perf_counter())
    started, prefilled, done = times
    return len(prompts) * (new_tokens - 1) / (done - prefilled - (prefilled - started))


@torch.inference_mode()
def hf_generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    stop_ids: Sequence[int] = (),
) -> tuple[int, float]:
    """Tokens and seconds of a transformers model's greedy `generate` on left-padded prompts.

    Every reply has `new_tokens` tokens, or ends at the first of `stop_ids`, which counts.
    """
    length, pad = max(map(len, prompts)), stop_ids[0] if stop_ids else 0
    padded = [([pad] * (length - len(prompt)), list(prompt)) for prompt in prompts]
    rows = [left + prompt for left, prompt in padded]
    ids = torch.tensor(rows, device=model.device)  # [B, T]
    mask = torch.tensor(
        [[0] * len(left) + [1] * len(prompt) for left, prompt in padded], device=model.device
    )
    limits = {"eos_token_id": list(stop_ids)} if stop_ids else {"min_new_tokens": new_tokens}
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pad,
        **limits,
    )
    replies = output[:, length:].tolist()
    seconds = time.perf_counter() - started
    ends = (
        next((at for at, token in enumerate(reply, 1) if token in stop_ids), len(reply))
        for reply in replies
    )
    return sum(ends), seconds


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
