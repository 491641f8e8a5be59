"""The decoder on a GPU: the shape of Llama-3.1-8B with random weights in bf16, acceptance imposed.

Everything but the weights is real: captured rounds, paged memory, tree verification, drafting with
a head of the usual shape. Speculative figures are simulated in the engine's sense.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.random_target import LLAMA_8B, random_head, random_model
from bench.report import interleaved, matmul_rate, read_bandwidth, rounded
from pipeline.config import TreeSection
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.graphs import RoundRunner
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request, pool_acceptance
from pipeline.eagle3.head import Eagle3Head
from pipeline.tuning.cost import measure_costs, open_batch
from pipeline.tuning.roofline import Roofline, best_speedup, eta, floor_seconds
from pipeline.tuning.simulate import ImposedAcceptance

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TREE = TreeSection(top_k=4, steps=5, nodes=16)
PATTERN = (3, 2, 4, 2, 3)  # accepted drafts a round: τ = 3.8
PROMPT, NEW_TOKENS = 256, 128


def measure(*, runs: int) -> Iterator[dict[str, Any]]:
    """Groups of figures, as they are ready: the machine, then one group a batch size."""
    from transformers import LlamaConfig

    device, dtype = torch.device("cuda"), torch.bfloat16
    config, length = LlamaConfig(**LLAMA_8B), PROMPT + NEW_TOKENS
    model = random_model(config, (1, 15, 28), device=device, dtype=dtype, max_length=length)
    head = random_head(config, torch.arange(32000))
    bandwidth, flops = read_bandwidth(device, megabytes=4096), matmul_rate(device, size=8192)
    yield {
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "matmul_tflop_s": flops / 1e12,
        "acceptance_is_simulated": True,
        "pattern": list(PATTERN),
    }
    for rows in BATCHES:
        roofline = Roofline(bandwidth, flops, rows=rows, context=PROMPT + NEW_TOKENS // 2)
        yield {f"batch_{rows}": _batch(model, head, roofline, runs)}


def _batch(
    model: DecoderModel, head: Eagle3Head, roofline: Roofline, runs: int
) -> dict[str, float]:
    """Plain and speculative decoding of a batch, their rooflines and the yardstick η."""
    rows = roofline.rows
    drafter = Eagle3Drafter(head, model, TREE)
    costs = measure_costs(model, drafter, rows, roofline.context, repeats=runs)
    plain = Engine(model, slots=rows, buckets=(rows,))
    speculative = Engine(
        model,
        drafter=Eagle3Drafter(head, model, TREE),
        slots=rows,
        buckets=(rows,),
        verify=ImposedAcceptance(PATTERN, model.device),
    )
    cases = {
        "plain": lambda: _decode(plain, rows)[0],
        "speculative": lambda: _decode(speculative, rows)[0],
    }
    rates = interleaved(cases, runs=runs)
    tau = _decode(speculative, rows)[1]
    best = best_speedup(model, drafter, TREE, tau, roofline)
    speedup, predicted = rates["speculative"] / rates["plain"], costs.speedup(TREE, tau)
    kernels, wall = _round_overhead(model, head, rows)
    return rounded(
        {
            "plain_tokens_per_second": rates["plain"],
            "plain_share_of_roofline": floor_seconds(model, 1, roofline) / (rows / rates["plain"]),
            "speculative_tokens_per_second_simulated": rates["speculative"],
            "tau_simulated": tau,
            "speedup_simulated": speedup,
            "s_max": best,
            "eta": eta(speedup, best),
            "predicted_speedup": predicted,
            "cost_model_error": predicted / speedup - 1,
            "t_ar_ms": costs.plain_seconds * 1e3,
            "t_verify_ms": costs.verify_seconds(TREE.nodes) * 1e3,
            "t_draft_ms": costs.draft_seconds(TREE.top_k) * 1e3,
            "t_extend_ms": costs.extend_seconds(TREE.steps) * 1e3,
            "round_ms": wall * 1e3,
            "round_kernels_ms": kernels * 1e3,
            "round_overhead_share": wall / kernels - 1,
        }
    )


def _decode(engine: Engine, rows: int) -> tuple[float, float]:
    """(tokens per second of the whole batch while all rows decode, τ)."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 32000, (rows, PROMPT), generator=generator).tolist()
    requests = [
        Request(str(row), tuple(prompt), NEW_TOKENS, ()) for row, prompt in enumerate(prompts)
    ]
    done = [completion.statistics for completion in engine.generate(requests)]
    # Of the last request to join: from then on all decode.
    seconds = min(each.decode_seconds for each in done)
    tokens = sum(each.round_tokens for each in done)
    return tokens / seconds, pool_acceptance(done).tau


def _round_overhead(model: DecoderModel, head: Eagle3Head, rows: int) -> tuple[float, float]:
    """Seconds of a captured round: its kernels one by one, and the whole replay back to back."""
    drafter, launches = Eagle3Drafter(head, model, TREE), 32
    emitted = TREE.steps + 1
    entries = PROMPT + (launches + 8) * emitted + TREE.nodes + drafter.lookahead
    batch, plane = open_batch(model, drafter, rows, entries, emitted=emitted)
    batch.seq_lens.fill_(PROMPT)
    verify = ImposedAcceptance(PATTERN, model.device)
    with torch.inference_mode():
        runner = RoundRunner(model, plane, drafter, batch, buckets=(rows,), verify=verify)
    batch.seq_lens.fill_(PROMPT)

    def replay(times: int) -> None:
        for _ in range(times):
            runner.run(rows, sampling=False)
        torch.cuda.synchronize()

    replay(3)
    started = time.perf_counter()
    replay(20)
    wall = (time.perf_counter() - started) / 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay(5)
    kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 5
    return kernels * 1e-6, wall
