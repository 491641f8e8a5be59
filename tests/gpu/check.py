"""`make gpu-check`: the decoder on this GPU, in minutes, with torch, triton and transformers only.

    python -m tests.gpu.check [--device cuda|cpu] [--out FILE]

Random models of every family, so nothing is downloaded. The Triton kernels compute one side of each
comparison and plain torch operations the other. The last line is JSON; the exit status is 1 if a
check fails. `--device cpu` runs the same checks with the CPU's operations, which tests this file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.random_target import random_head, random_model
from bench.report import ROOT, machine
from pipeline.config import TreeSection
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops import pick_ops
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.request import Request
from pipeline.eagle3.head import Eagle3Head
from pipeline.tuning.score import draw_gap, greedy_gaps, log_probabilities

VOCABULARY = 512
KERNEL_TESTS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests/decoder/ops").glob("test_triton*.py"))
]


def shape_of(queries: int, groups: int, hidden: int, **more: int) -> dict[str, Any]:
    """A configuration's keys."""
    heads = {"num_attention_heads": queries, "num_key_value_heads": groups}
    return {**heads, "hidden_size": hidden, **more}


SHAPES = {
    "llama": shape_of(8, 2, 512),
    "one group, d 128": shape_of(4, 4, 512),
    "d 80": shape_of(6, 2, 480, head_dim=80),
    "d 96, ratio 8": shape_of(8, 1, 256, head_dim=96),
}
TREES = {
    "chain": TreeSection(top_k=1, steps=4, nodes=5),
    "tree": TreeSection(top_k=4, steps=5, nodes=16),
    "wide": TreeSection(top_k=10, steps=6, nodes=60),
}
#: A token of the speculative output may be this much less likely than the best one, in bf16.
NEAR_TIE = 0.3
#: A random number may lie this far outside the stretch of the token that it drew, in fp32.
DRAW_GAP = 1e-4

Check = Callable[[], dict[str, Any]]


def model_of(
    shape: dict[str, Any], device: torch.device, dtype: torch.dtype, ops: TorchOps
) -> DecoderModel:
    """A random Llama; the same weights for every `ops`."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        intermediate_size=768,
        num_hidden_layers=6,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **shape,
    )
    layers = (1, 2, 4)
    return random_model(
        config, layers, device=device, dtype=dtype, max_length=1024, scale=0.08, ops=ops
    )


def head_of(model: DecoderModel) -> Eagle3Head:
    """A random head: it drafts badly, which losslessness must survive."""
    return random_head(model.config, torch.arange(0, VOCABULARY, 2), scale=6)


def requests(temperature: float = 0.0) -> list[Request]:
    """Eleven of them: prompts of 3 to 260 tokens, limits of 1 to 48."""
    generator = torch.Generator().manual_seed(7)
    prompts = [
        tuple(torch.randint(0, VOCABULARY, (3 + 26 * index,), generator=generator).tolist())
        for index in range(10)
    ]
    prompts.append(prompts[3][:64])
    return [
        Request(str(index), prompt, 1 + (17 * index) % 48, (), temperature=temperature, seed=index)
        for index, prompt in enumerate(prompts)
    ]


def decode(engine: Engine, wanted: list[Request]) -> dict[str, tuple[int, ...]]:
    return {done.request_id: done.token_ids for done in engine.generate(wanted)}


def logits_agree(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Logits of a prompt in fp32: this device's operations against plain torch ones."""
    largest = []
    for ops in (pick_ops(device, torch.float32), TorchOps()):
        model = model_of(shape, device, torch.float32, ops)
        largest.append(log_probabilities(model, range(200), range(100, 140)))
    difference = float((largest[0] - largest[1]).abs().max())
    assert difference < 1e-3, f"log-probabilities differ by {difference}"
    return {"largest_difference": difference}


def greedy_is_lossless(
    shape: dict[str, Any], tree: TreeSection, device: torch.device
) -> dict[str, Any]:
    """fp32: with a drafter, in batches of 1, 3 and 8, every token is the plain one."""
    model = model_of(shape, device, torch.float32, pick_ops(device, torch.float32))
    plain = decode(Engine(model), requests())
    for slots in (1, 3, 8):
        engine = Engine(model, drafter=Eagle3Drafter(head_of(model), model, tree), slots=slots)
        assert decode(engine, requests()) == plain, f"batch {slots} differs"
    return {"tokens": 3 * sum(map(len, plain.values()))}


def sampling_is_lossless(device: torch.device) -> dict[str, Any]:
    """fp32: with a drafter, every token is the one that its seed draws from the plain model."""
    model = model_of(SHAPES["llama"], device, torch.float32, pick_ops(device, torch.float32))
    drafter = Eagle3Drafter(head_of(model), model, TREES["tree"])
    done = decode(Engine(model, drafter=drafter, slots=4), requests(0.8))
    worst = max(draw_gap(model, request, done[request.request_id]) for request in requests(0.8))
    assert worst <= DRAW_GAP, f"a draw is {worst} away from the plain model's"
    return {"worst_gap": worst, "tokens": sum(map(len, done.values()))}


def near_ties(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """bf16: no speculative token is much less likely to the plain model than its best one."""
    model = model_of(shape, device, torch.bfloat16, pick_ops(device, torch.bfloat16))
    drafter = Eagle3Drafter(head_of(model), model, TREES["tree"])
    done = decode(Engine(model, drafter=drafter, slots=4), requests())
    replies = [(request.prompt_ids, done[request.request_id]) for request in requests()]
    gaps = [greedy_gaps(model, *reply) for reply in replies]
    worst = max(gap.worst for gap in gaps)
    assert worst <= NEAR_TIE, f"a token is {worst} below the best one"
    return {
        "worst_log_probability_gap": worst,
        "near_ties": sum(gap.near_ties for gap in gaps),
        "tokens": sum(gap.tokens for gap in gaps),
    }


def kernels() -> dict[str, Any]:
    """Every Triton kernel against its definition: the suite's own tests, on this GPU."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed; the other checks ran the same kernels"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNEL_TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return {"summary": done.stdout.strip().splitlines()[-1]}


def checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    for name, shape in SHAPES.items():
        yield f"logits, {name}", partial(logits_agree, shape, device)
        yield f"near ties in bf16, {name}", partial(near_ties, shape, device)
        for title, tree in TREES.items():
            yield f"greedy, {name}, {title}", partial(greedy_is_lossless, shape, tree, device)
    yield "sampling", lambda: sampling_is_lossless(device)
    if device.type == "cuda":
        yield "kernels", kernels


def run(device: torch.device) -> dict[str, Any]:
    """Every check, to the end; a failed one is printed with its trace."""
    results: dict[str, Any] = {}
    for name, check in checks(device):
        started = time.perf_counter()
        try:
            results[name] = {"passed": True, **check()}
        except Exception as error:  # whatever breaks on a new GPU is a result, too
            traceback.print_exc()
            results[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
        results[name]["seconds"] = round(time.perf_counter() - started, 2)
        verdict = "pass" if results[name]["passed"] else "FAIL"
        print(f"{verdict}  {name}  {results[name]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the last line")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu runs the same checks with the CPU's operations")
    results = run(device)
    record = {
        "check": "decoder",
        "machine": machine(device),
        "passed": all(result["passed"] for result in results.values()),
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    raise SystemExit(not record["passed"])


if __name__ == "__main__":
    main()
