"""The decoder on a GPU: the shape of Llama-3.1-8B with random weights in bf16, acceptance imposed.

    part             rows            entries of a row
    batches 1-8      1, 2, 4, 8      256 + 128
    batches 16-64    16, 32, 64      256 + 128
    context 4k       1, 8, 32        4,096
    context 16k      1, 8            16,384
    context 32k      1, 4            32,768
    ragged           16              one of 32,768 among 256s; a prompt of 16,384 that joins
    products         1               256, with a layer's products fused and without
    rivals generate  1, 8            256 + 128, in turns with transformers' `generate`
    rivals vllm      1, 8            the same with vLLM, plain and drafting chains
    rivals sglang    1, 8            the same with SGLang

Everything but the weights is real: captured rounds, paged memory, tree verification, drafting with
a head of the usual shape. Speculative figures are simulated in the engine's sense. Long contexts
are measured by rounds alone, on keys and values that are random too: nothing is prefilled for them.
A part takes minutes and at most 60 GB, and opens a model of its own, as long as it needs.

A rival has the same configuration; `generate` the same weights too, a server dummy ones. It drafts
with a chain of the same length and acceptance as ours beside it. Rates are of decoding alone, by
the same clock on both sides: replies of 128 tokens less replies of one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from bench.random_target import LLAMA_8B, random_head, random_hf, random_model
from bench.report import interleaved, median_ratio, medians, share_of, turns
from bench.rival_servers import (
    DRAFTS,
    TAU,
    DummyModel,
    DummyServer,
    DummySglang,
    DummyVllm,
    installed,
    serving,
    write_configs,
)
from bench.rivals import Generate, decoding_rate, hf_generate
from pipeline.config import TreeSection
from pipeline.decoder.batch import DecodeBatch
from pipeline.decoder.engine import Engine
from pipeline.decoder.graphs import RoundLauncher
from pipeline.decoder.kv import Pools, pages_for
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.ops.tree import HEADROOM
from pipeline.decoder.ops.triton import ops as operations
from pipeline.decoder.request import Request, Statistics, pool_acceptance
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.tuning.cost import (
    Costs,
    Roofline,
    best_speedup,
    floor_seconds,
    layer_parameters,
    matmul_rate,
    measure_costs,
    read_bandwidth,
    round_floor_seconds,
)
from pipeline.tuning.verification import ImposedAcceptance, pattern_of
from tests.engines.servers import NoAnswer

CONFIG: dict[str, Any] = LLAMA_8B
DRAFT_VOCABULARY = 32000
TREE = TreeSection(top_k=4, steps=5, nodes=16)
#: Accepted drafts a round: τ = 3.8 where the random head's trees are deep enough, else as deep.
PATTERN = (3, 2, 4, 2, 3)
PROMPT, NEW_TOKENS = 256, 128
LONG, JOINING, SHORT, RAGGED_ROWS = 32768, 16384, 256, 16
#: What servers draft, and we beside them; rows in which rivals are measured, and the most turns.
CHAIN = TreeSection(top_k=1, steps=DRAFTS, nodes=DRAFTS + 1)
RIVAL_ROWS, RIVAL_TURNS = (1, 8), 3
#: Of the memory that is free once our target is loaded, a server's share.
SERVER_SHARE = 0.6
#: Rounds in one wall-clock figure: a multiple of the pattern's length.
ROUNDS = 20
#: Kernels whose share of a round is reported.
KERNELS = 12


@dataclass(frozen=True)
class Gpu:
    """A machine's rates, and the target and head of one part."""

    model: DecoderModel
    head: Eagle3Head
    bandwidth: float  # bytes/s
    flops: float
    runs: int
    interpreters: Mapping[str, str]  # of the rivals that are packages

    def roofline(self, rows: int, context: float) -> Roofline:
        return Roofline(self.bandwidth, self.flops, rows=rows, context=round(context))

    def drafter(self) -> Eagle3Drafter:
        return Eagle3Drafter(self.head, self.model, TREE)

    def imposed(self) -> ImposedAcceptance:
        return ImposedAcceptance(PATTERN, self.model.device)


def measure(
    part: str,
    *,
    runs: int,
    interpreters: Mapping[str, str],
    device: torch.device | None = None,
) -> Iterator[dict[str, Any]]:
    """Groups of figures of a part, as they are ready: the machine, then one for each workload."""
    from transformers import LlamaConfig

    device = device or torch.device("cuda")
    cuda = device.type == "cuda"
    length, workloads = PARTS[part]
    bandwidth = read_bandwidth(device, megabytes=4096 if cuda else 16)
    flops = matmul_rate(device, size=8192 if cuda else 256)
    yield {
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "matmul_tflop_s": flops / 1e12,
        "acceptance_is_simulated": True,
        "pattern": list(PATTERN),
    }
    config, dtype = LlamaConfig(**CONFIG), torch.bfloat16
    layers = config.num_hidden_layers
    capture = 1, layers // 2 - 1, layers - 4
    model = random_model(config, capture, device=device, dtype=dtype, max_length=length)
    head = random_head(config, torch.arange(DRAFT_VOCABULARY)).to(dtype)
    gpu = Gpu(model, head, bandwidth, flops, runs, interpreters)
    for name, workload in workloads.items():
        _release(device)
        figures = workload(gpu)
        if cuda:
            figures["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        yield {name: figures}


def chosen(part: str | None) -> list[str]:
    """The parts of `--part`: all, those of a name or of its first word, or some as 2/4."""
    if named := [name for name in PARTS if part in (None, name, name.split()[0])]:
        return named
    try:
        return share_of(list(PARTS), str(part))
    except ValueError as error:
        raise SystemExit(f"--part {part}: {error}, or is one of {', '.join(PARTS)}") from error


def _batch(rows: int, gpu: Gpu) -> dict[str, Any]:
    """A whole engine, plain and speculative, beside the pieces of its rounds."""
    model, device = gpu.model, gpu.model.device
    context = PROMPT + NEW_TOKENS // 2
    costs = _costs(gpu, rows, context)
    roofline = gpu.roofline(rows, context)
    _release(device)
    rates, tau = _engine_rates(gpu, rows)
    _release(device)
    rounds = _rounds(gpu, [PROMPT] * rows)
    speedup = rates["speculative"] / rates["plain"]
    return {
        "plain_tokens_per_second": rates["plain"],
        "plain_share_of_roofline": floor_seconds(model, 1, roofline) / (rows / rates["plain"]),
        "speculative_tokens_per_second_simulated": rates["speculative"],
        **_against_model(gpu, costs, roofline, tau, speedup),
        **_against_floor(gpu, rounds, roofline),
        **_kernel_figures(rounds),
    }


def _engine_rates(gpu: Gpu, rows: int) -> tuple[dict[str, float], float]:
    """Tokens per second of a plain and of a speculative engine, and τ of the latter."""
    plain = Engine(gpu.model, slots=rows, buckets=(rows,))
    speculative = Engine(
        gpu.model, drafter=gpu.drafter(), slots=rows, buckets=(rows,), verify=gpu.imposed()
    )
    cases = {
        "plain": lambda: _decode(plain, rows)[0],
        "speculative": lambda: _decode(speculative, rows)[0],
    }
    rates = interleaved(cases, runs=gpu.runs)
    return rates, _decode(speculative, rows)[1]


def _context(rows: int, context: int, gpu: Gpu) -> dict[str, Any]:
    """Rounds after long contexts, and how fast such a prompt is read."""
    costs, roofline = _costs(gpu, rows, context), gpu.roofline(rows, context)
    _release(gpu.model.device)
    rounds = _rounds(gpu, [context] * rows)
    plain, tau = rounds["plain_round_ms"] / 1e3, rounds["tau_simulated"]
    speedup = tau * plain / (rounds["round_ms"] / 1e3)
    return {
        "plain_tokens_per_second": rows / plain,
        "plain_share_of_roofline": floor_seconds(gpu.model, 1, roofline) / plain,
        "speculative_tokens_per_second_simulated": speedup * rows / plain,
        **_against_model(gpu, costs, roofline, tau, speedup),
        **_against_floor(gpu, rounds, roofline),
        **_kernel_figures(rounds),
        **(_prefill(gpu, context) if rows == 1 else {}),
    }


def _ragged(gpu: Gpu) -> dict[str, Any]:
    """One long row among short ones, against rows of equal length that hold as many entries."""
    ragged = [LONG] + [SHORT] * (RAGGED_ROWS - 1)
    cases = {
        "ragged": ragged,
        "even": [sum(ragged) // RAGGED_ROWS] * RAGGED_ROWS,
        "short": [SHORT] * RAGGED_ROWS,
    }
    figures: dict[str, Any] = {}
    for name, lengths in cases.items():
        _release(gpu.model.device)
        rounds = _rounds(gpu, lengths)
        figures |= {f"{name}_{key}": rounds[key] for key in ("plain_round_ms", "round_ms")}
        figures[f"{name}_kernel_shares"] = rounds["kernel_shares"]
    for key in ("plain_round_ms", "round_ms"):
        figures[f"{key}_ragged_over_even"] = figures[f"ragged_{key}"] / figures[f"even_{key}"]
    return figures


def _joining(gpu: Gpu) -> dict[str, Any]:
    """A long prompt that joins running requests: how long their tokens have to wait.

    Gaps are between tokens of the short requests that follow one another in the stream.
    """
    engine = Engine(
        gpu.model,
        drafter=gpu.drafter(),
        slots=RAGGED_ROWS,
        buckets=(RAGGED_ROWS,),
        pages=_pool(gpu, [JOINING] + [SHORT + NEW_TOKENS] * RAGGED_ROWS),
        verify=gpu.imposed(),
    )
    short = [_request(row, SHORT) for row in range(RAGGED_ROWS - 1)]

    def gaps(requests: list[Request]) -> list[float]:
        times: dict[str, list[float]] = {}
        for emission in engine.stream(requests):
            times.setdefault(emission.request_id, []).append(time.perf_counter())
        followed = [times[each.request_id] for each in short]
        return [after - before for each in followed for before, after in pairwise(each)]

    gaps(short)
    alone = gaps(short)
    joined = gaps([*short, _request(RAGGED_ROWS, JOINING)])
    return {
        "gap_ms": median(alone) * 1e3,
        "longest_gap_ms": max(alone) * 1e3,
        "gap_ms_beside_a_long_prompt": median(joined) * 1e3,
        "longest_gap_ms_beside_a_long_prompt": max(joined) * 1e3,
    }


def _against_model(
    gpu: Gpu, costs: Costs, roofline: Roofline, tau: float, speedup: float
) -> dict[str, float]:
    """A speedup beside what the cost model foretells and what the machine allows."""
    best = best_speedup(gpu.model, gpu.drafter(), TREE, tau, roofline)
    assert best is not None
    predicted = costs.speedup(TREE, tau)
    return {
        "tau_simulated": tau,
        "speedup_simulated": speedup,
        "s_max": best,
        "eta": speedup / best,
        "predicted_speedup": predicted,
        "cost_model_error": predicted / speedup - 1,
        "t_ar_ms": costs.plain_seconds * 1e3,
        "t_verify_ms": costs.verify_seconds(TREE.nodes) * 1e3,
        "t_draft_ms": costs.draft_seconds(TREE.top_k) * 1e3,
        "t_extend_ms": costs.extend_seconds(TREE.steps) * 1e3,
    }


def _against_floor(gpu: Gpu, rounds: dict[str, Any], roofline: Roofline) -> dict[str, float]:
    """Rounds, and the shares of them that the machine's rates account for. η is a ratio of ratios,
    and rewards slow plain rounds; these do not."""
    floor = round_floor_seconds(gpu.model, gpu.drafter(), TREE, roofline)
    assert floor is not None
    floors = {"plain_round": floor_seconds(gpu.model, 1, roofline), "round": floor}
    times = {f"{name}_ms": rounds[f"{name}_ms"] for name in floors}
    return times | {
        f"{name}_floor_share": 1e3 * each / rounds[f"{name}_ms"] for name, each in floors.items()
    }


def _products(gpu: Gpu) -> dict[str, Any]:
    """A row's rounds with a layer's products and what is around them in five kernels, and with
    cuBLAS and a kernel for everything else."""
    figures: dict[str, Any] = {}
    for name, most in (("fused", operations.MOST_FUSED), ("cublas", 0)):
        _release(gpu.model.device)
        with patch.object(operations, "MOST_FUSED", most):
            rounds = _rounds(gpu, [SHORT])
        figures |= {f"{name}_{key}": rounds[key] for key in ("plain_round_ms", "round_ms")}
        figures[f"{name}_kernel_shares"] = rounds["kernel_shares"]
    for key in ("plain_round_ms", "round_ms"):
        figures[f"{key}_cublas_over_fused"] = figures[f"cublas_{key}"] / figures[f"fused_{key}"]
    return figures


def _costs(gpu: Gpu, rows: int, context: int) -> Costs:
    """Of the pieces of one tree's rounds."""
    return measure_costs(
        gpu.model,
        gpu.drafter(),
        rows,
        context,
        (1, TREE.nodes),
        beam_counts=(TREE.top_k,),
        step_counts=(TREE.steps,),
        repeats=max(5, gpu.runs),
    )


def _rounds(gpu: Gpu, lengths: Sequence[int]) -> dict[str, Any]:
    """Plain and speculative rounds, back to back, of rows that hold so many entries each."""
    model, device, rows = gpu.model, gpu.model.device, len(lengths)
    drafter, held = gpu.drafter(), [pages_for(length + _room(gpu)) for length in lengths]
    pools = Pools(model.plane_shape, drafter, pages=sum(held) + 1, rows=rows, device=model.device)
    planes = pools.planes
    for plane in (planes.target, *planes.drafter):
        plane.normal_()  # zeros would cost less power, and so less time
    table = torch.zeros(rows, max(held), dtype=torch.int64)
    for row, pages in enumerate(held):
        table[row, :pages] = torch.tensor(pools.shared.allocate(pages))
    row_lengths = torch.tensor(lengths, device=device)
    whole, real = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    cases: dict[str, Callable[[], float]] = {}
    batches: dict[str, DecodeBatch] = {}
    launchers: dict[str, RoundLauncher] = {}
    with torch.inference_mode():
        for name, drafting in (("plain_round", None), ("round", drafter)):
            batch = batches[name] = DecodeBatch.empty(
                rows,
                pages=max(held),
                emitted=drafting.depth + 1 if drafting else 1,
                device=device,
                drafter=drafting,
            )
            batch.open(*(each.to(device) for each in (table, whole, whole, real, real + 1)))
            verify = gpu.imposed() if drafting else None
            launchers[name] = RoundLauncher(
                model, planes, drafting, batch, buckets=(rows,), verify=verify
            )

        def replay(name: str, times: int = ROUNDS) -> float:
            batches[name].seq_lens.copy_(row_lengths)
            _synchronize(device)
            launch_round = launchers[name].launcher(rows, sampling=False)
            started = time.perf_counter()
            for _ in range(times):
                launch_round()
            _synchronize(device)
            return (time.perf_counter() - started) / times

        cases = {name: partial(replay, name) for name in launchers}
        seconds = interleaved(cases, runs=max(3, gpu.runs))
        replay("round")
        emitted = (batches["round"].seq_lens - row_lengths).sum().item()
        kernels = _kernel_seconds(device, partial(replay, "round", 5))
    total = sum(kernels.values())
    largest = sorted(kernels, key=lambda name: -kernels[name])[:KERNELS]
    return {
        **{f"{name}_ms": each * 1e3 for name, each in seconds.items()},
        "tau_simulated": emitted / (rows * ROUNDS),
        "round_kernels_ms": total / 5 * 1e3,
        "kernel_shares": {name: kernels[name] / total for name in largest},
    }


def _kernel_figures(rounds: dict[str, Any]) -> dict[str, Any]:
    kernels = rounds["round_kernels_ms"]
    return {
        "round_kernels_ms": kernels,
        "round_overhead_share": rounds["round_ms"] / kernels - 1 if kernels else None,
        "kernel_shares": rounds["kernel_shares"],
    }


def _kernel_seconds(device: torch.device, replay: Callable[[], object]) -> dict[str, float]:
    """Seconds of every kernel, by its name; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            name = str(event.key)[:60]
            times[name] = times.get(name, 0.0) + event.self_device_time_total * 1e-6
    return times


def _generate(gpu: Gpu) -> dict[str, Any]:
    """transformers, whose weights are ours."""
    import transformers

    hf = random_hf(gpu.model.config, device=gpu.model.device, dtype=gpu.model.dtype)
    generate = partial(hf_generate, hf)
    plain = {f"batch_{rows}": _beside(gpu, rows, generate) for rows in RIVAL_ROWS}
    return {"version": transformers.__version__, "plain": plain}


def _served(kind: type[DummyServer], gpu: Gpu) -> dict[str, Any]:
    """A server, plain and drafting, one after the other. What cannot be measured says why."""
    python = gpu.interpreters[kind.package]
    if (version := installed(kind.package, python)) is None:
        return {"left_out": f"{kind.package} is not installed for {python}"}
    figures: dict[str, Any] = {"version": version, "drafts": DRAFTS, "tau_imposed": TAU}
    captured = gpu.model.stack.captured
    with TemporaryDirectory() as folder:
        target, head = write_configs(Path(folder), gpu.model.config, gpu.head.shape, captured)
        for name, drafted in (("plain", None), ("drafting_simulated", head)):
            entries, share = PROMPT + NEW_TOKENS + HEADROOM, _server_share(gpu.model.device)
            model = DummyModel(target, drafted, max(RIVAL_ROWS), entries, share)
            try:
                with serving(kind, python, model, Path(folder) / f"{name}.log") as server:
                    beside = partial(_beside, gpu, generate=server.generate, drafting=bool(drafted))
                    figures[name] = {f"batch_{rows}": beside(rows) for rows in RIVAL_ROWS}
                    figures[name] |= {"its_tau": _imposed(server)} if drafted else {}
            except NoAnswer as error:
                figures[name] = {"left_out": str(error)}
    return figures


def _imposed(server: DummyServer) -> float:
    """τ that a server counted. Raises NoAnswer where it is not what is imposed: an older version
    may know nothing of that, and would be compared at its own."""
    if abs(server.tau - TAU) > 0.02:
        raise NoAnswer(f"{server.package} emitted {server.tau:.2f} tokens a round instead of {TAU}")
    return server.tau


def _server_share(device: torch.device) -> float:
    if device.type != "cuda":
        return SERVER_SHARE
    free, total = torch.cuda.mem_get_info(device)
    return SERVER_SHARE * free / total


def _beside(gpu: Gpu, rows: int, generate: Generate, *, drafting: bool = False) -> dict[str, float]:
    """A rival's rate in turns with that of our engine, in replies to the same prompts."""
    engine = Engine(
        gpu.model,
        drafter=Eagle3Drafter(gpu.head, gpu.model, CHAIN) if drafting else None,
        slots=rows,
        buckets=(rows,),
        verify=ImposedAcceptance(pattern_of(TAU), gpu.model.device) if drafting else None,
    )
    prompts = [_request(row, PROMPT).prompt_ids for row in range(rows)]
    done: list[Statistics] = []

    def ours(prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        requests = [_request(row, len(each), new_tokens) for row, each in enumerate(prompts)]
        done[:] = [each.statistics for each in engine.generate(requests)]

    cases = {
        name: partial(decoding_rate, each, prompts, NEW_TOKENS)
        for name, each in (("ours", ours), ("its", generate))
    }
    measured = turns(cases, runs=min(gpu.runs, RIVAL_TURNS))
    rates = medians(measured)
    figures = {f"{name}_tokens_per_second": rate for name, rate in rates.items()}
    figures["ours_over_it"] = median_ratio(measured, "ours", "its")
    if drafting:  # a last round uncut, as servers count it
        accepted = sum(sum(each.reached[1:]) for each in done)
        figures["our_tau"] = 1 + accepted / sum(each.rounds for each in done)
    return figures


def _prefill(gpu: Gpu, context: int) -> dict[str, float]:
    """A prompt of `context` tokens alone, read by the plain engine."""
    engine = Engine(gpu.model, buckets=(1,))

    def seconds() -> float:
        (done,) = engine.generate([_request(0, context - 1, 1)])
        return done.statistics.first_token_seconds

    rate = context / interleaved({"prefill": seconds}, runs=3)["prefill"]
    # The layers' products; attention comes on top.
    parameters = len(gpu.model.layers) * layer_parameters(gpu.model)
    return {
        "prefill_tokens_per_second": rate,
        "prefill_share_of_flops": 2 * parameters * rate / gpu.flops,
    }


def _decode(engine: Engine, rows: int) -> tuple[float, float]:
    """(tokens per second of the whole batch while all rows decode, τ)."""
    requests = [_request(row, PROMPT) for row in range(rows)]
    done = [completion.statistics for completion in engine.generate(requests)]
    # Of the last request to join: from then on all decode.
    seconds = min(each.decode_seconds for each in done)
    tokens = sum(each.round_tokens for each in done)
    return tokens / seconds, pool_acceptance(done).tau


def _request(row: int, prompt: int, new_tokens: int | None = None) -> Request:
    generator = torch.Generator().manual_seed(row)
    tokens = torch.randint(0, CONFIG["vocab_size"], (prompt,), generator=generator).tolist()
    return Request(str(row), tuple(tokens), new_tokens or NEW_TOKENS, ())


def _room(gpu: Gpu) -> int:
    """Entries after a row's first ones that some rounds and the last tree take."""
    return ROUNDS * (TREE.steps + 1) + HEADROOM


def _pool(gpu: Gpu, lengths: Sequence[int]) -> int:
    return 1 + sum(pages_for(length + NEW_TOKENS + HEADROOM) for length in lengths)


def _release(device: torch.device) -> None:
    """Give back what the last workload held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_Workloads = dict[str, Callable[[Gpu], dict[str, Any]]]


def _contexts(context: int, name: str, rows: Sequence[int]) -> tuple[int, _Workloads]:
    named: _Workloads = {
        f"context_{name}_batch_{each}": partial(_context, each, context) for each in rows
    }
    return context + ROUNDS * (TREE.steps + 1), named


def _batches(rows: Sequence[int]) -> tuple[int, _Workloads]:
    return PROMPT + NEW_TOKENS, {f"batch_{each}": partial(_batch, each) for each in rows}


#: Part → the longest row that its model is opened for, and its workloads.
PARTS: dict[str, tuple[int, _Workloads]] = {
    "batches 1-8": _batches((1, 2, 4, 8)),
    "batches 16-64": _batches((16, 32, 64)),
    "context 4k": _contexts(4096, "4k", (1, 8, 32)),
    "context 16k": _contexts(16384, "16k", (1, 8)),
    "context 32k": _contexts(32768, "32k", (1, 4)),
    "products": (SHORT + ROUNDS * (TREE.steps + 1), {"products": _products}),
    "rivals generate": (PROMPT + NEW_TOKENS, {"rival_generate": _generate}),
    "rivals vllm": (PROMPT + NEW_TOKENS, {"rival_vllm": partial(_served, DummyVllm)}),
    "rivals sglang": (PROMPT + NEW_TOKENS, {"rival_sglang": partial(_served, DummySglang)}),
    "ragged": (LONG + ROUNDS * (TREE.steps + 1), {"ragged": _ragged, "joining": _joining}),
}
