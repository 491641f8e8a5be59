"""The checks of `make gpu-check`, by name. Each is run in a process of its own.

Random models, so nothing is downloaded. The Triton kernels compute one side of each comparison, and
plain torch operations or Hugging Face's model the other. Everything also runs on a CPU, with the
CPU's operations, and smaller: that is what test_check.py does.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from bench.random_target import random_head, random_model
from bench.report import ROOT
from pipeline.config import TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel, pick_ops
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.layer import Float8Rows
from pipeline.decoder.ops.parallel import TensorGroup
from pipeline.decoder.ops.triton.ops import TritonOps
from pipeline.decoder.request import Request
from pipeline.heads.eagle3.drafter import Eagle3Drafter
from pipeline.heads.eagle3.shape import Eagle3Head
from pipeline.tuning.verification import draw_gap, greedy_gaps, log_probabilities
from tests.decoder.random_drafters import DRAFTERS, every_drafter
from tests.gpu.training import attention_agrees, losses_agree, states_agree, step_agrees

VOCABULARY, LENGTH = 512, 1024
KERNEL_TESTS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests/decoder/ops").glob("test_triton*.py"))
]


def shape_of(queries: int, groups: int, hidden: int, **more: int) -> dict[str, Any]:
    """A configuration's keys."""
    heads = {"num_attention_heads": queries, "num_key_value_heads": groups}
    return {**heads, "hidden_size": hidden, **more}


LLAMA = shape_of(8, 2, 512)
SHAPES = {
    "llama": LLAMA,
    "one group, d 128": shape_of(4, 4, 512),
    "d 80": shape_of(6, 2, 480, head_dim=80),
    "d 96, ratio 8": shape_of(8, 1, 256, head_dim=96),
}
TREES = {
    "chain": TreeSection(top_k=1, steps=4, nodes=5),
    "tree": TreeSection(top_k=4, steps=5, nodes=16),
    "wide": TreeSection(top_k=10, steps=6, nodes=60),
}
#: Requests that are decoded together.
BATCHES = 1, 3, 8
#: What every kind of drafter can draft.
TREES_OF_ALL = TreeSection(top_k=1, steps=4, nodes=5), TreeSection(top_k=3, steps=4, nodes=14)
#: Published configurations (config.json of each on the Hugging Face hub); weights are random.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "model_type": "llama",
        **shape_of(32, 8, 2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=128256),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        **shape_of(14, 2, 896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        **shape_of(16, 8, 1024, intermediate_size=3072, num_hidden_layers=28, vocab_size=151936),
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text",
        **shape_of(4, 1, 1152, intermediate_size=6912, num_hidden_layers=26, vocab_size=262144),
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 128,  # 512, which the check's text would not outgrow
        "tie_word_embeddings": True,
    },
}
#: Draft vocabulary and vocabulary of the widest targets.
WIDE = 32000, 128256
#: Of serving, and prompts in it.
LONGEST, PROMPTS = 131072, (3000, 5, 700)
#: More than 32 bits address.
POOL_ELEMENTS = 2**31
#: A long row among short ones.
RAGGED = (6000, 3, 200, 17, 64, 1)
#: Log-probabilities may differ by this much in fp32, for small models and for whole ones.
DIFFERENCE, WHOLE_DIFFERENCE = 1e-3, 1e-2
#: A token of the speculative output may be this much less likely than the best one, in bf16.
NEAR_TIE = 0.3
#: A draw may lie this far below the best perturbed token, in fp32.
DRAW_GAP = 1e-3

Check = Callable[[], dict[str, Any]]


def model_of(
    shape: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    ops: TorchOps | None = None,
    *,
    length: int = LENGTH,
    vocabulary: int | None = None,
    group: TensorGroup | None = None,
) -> DecoderModel:
    """A random Llama; the same weights for every `ops`."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary or VOCABULARY,
        intermediate_size=768,
        max_position_embeddings=2 * length,
        tie_word_embeddings=False,
        **{"num_hidden_layers": 6, **shape},
    )
    capture = (1, 2, 4) if config.num_hidden_layers > 4 else (0, 1, 2)
    kind: dict[str, Any] = {"dtype": dtype, "max_length": length, "scale": 0.08, "ops": ops}
    return random_model(config, capture, device=device, group=group, **kind)


def head_of(model: DecoderModel, proposed: int | None = None) -> Eagle3Head:
    """A random head: it drafts badly, which losslessness must survive."""
    return random_head(model.config, torch.arange(0, proposed or model.vocabulary, 2), scale=6)


def drafting(model: DecoderModel, tree: TreeSection, slots: int) -> Engine:
    """An engine that drafts such trees."""
    return Engine(model, drafter=Eagle3Drafter(head_of(model), model, tree), slots=slots)


def prompt_of(tokens: int, seed: int = 7) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (tokens,), generator=generator).tolist())


def requests(temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> list[Request]:
    """Eleven of them: prompts of 3 to 260 tokens, limits of 1 to 48."""
    prompts = [prompt_of(3 + 26 * index, index) for index in range(10)]
    prompts.append(prompts[3][:64])
    return [
        Request(
            str(index),
            prompt,
            1 + (17 * index) % 48,
            (),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=index,
        )
        for index, prompt in enumerate(prompts)
    ]


def decode(engine: Engine, submitted: list[Request]) -> dict[str, tuple[int, ...]]:
    """Every request's tokens. Raises AssertionError when one of them ends as an error."""
    replies = {}
    for done in engine.generate(submitted):
        assert done.error is None, f"request {done.request_id}: {done.error}"
        replies[done.request_id] = done.token_ids
    return replies


def logits_agree(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Logits of a prompt in fp32: this device's operations against plain torch ones."""
    dtype, largest = torch.float32, []
    for ops in (pick_ops(device, dtype), TorchOps(dtype)):
        model = model_of(shape, device, dtype, ops)
        largest.append(log_probabilities(model, prompt_of(200), prompt_of(40, 8)))
    difference = float((largest[0] - largest[1]).abs().max())
    assert difference < DIFFERENCE, f"log-probabilities differ by {difference}"
    return {"largest_difference": difference}


def greedy_is_lossless(
    shape: dict[str, Any], tree: TreeSection, device: torch.device
) -> dict[str, Any]:
    """fp32: with a drafter, in batches of 1, 3 and 8, every token is the plain one."""
    model = model_of(shape, device, torch.float32)
    plain = decode(Engine(model), requests())
    for slots in BATCHES:
        assert decode(drafting(model, tree, slots), requests()) == plain, f"batch {slots} differs"
    return {"tokens": len(BATCHES) * sum(map(len, plain.values()))}


def drafter_is_lossless(name: str, device: torch.device) -> dict[str, Any]:
    """fp32: likewise with a drafter of any kind; a chain, and a tree as deep as all can draft."""
    model = model_of(LLAMA, device, torch.float32)
    make, plain = every_drafter(model)[name], decode(Engine(model), requests())
    for tree in TREES_OF_ALL:
        for slots in BATCHES:
            engine = Engine(model, drafter=make(tree), slots=slots)
            assert decode(engine, requests()) == plain, f"{tree}, batch {slots} differs"
    return {"tokens": len(BATCHES) * len(TREES_OF_ALL) * sum(map(len, plain.values()))}


def sampling_is_lossless(device: torch.device, top_p: float, top_k: int) -> dict[str, Any]:
    """fp32: with a drafter, every token is the one that its seed draws from the plain model."""
    model, submitted = model_of(LLAMA, device, torch.float32), requests(0.8, top_p, top_k)
    done = decode(drafting(model, TREES["tree"], 4), submitted)
    return {**_draws(model, submitted, done), "tokens": sum(map(len, done.values()))}


def near_ties(shape: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """bf16: no speculative token is much less likely to the plain model than its best one."""
    model = model_of(shape, device, torch.bfloat16)
    done = decode(drafting(model, TREES["tree"], 4), requests())
    replies = [(request.prompt_ids, done[request.request_id]) for request in requests()]
    gaps = [greedy_gaps(model, *reply) for reply in replies]
    worst = max(gap.worst for gap in gaps)
    assert worst <= NEAR_TIE, f"a token is {worst} below the best one"
    return {
        "worst_log_probability_gap": worst,
        "near_ties": sum(gap.near_ties for gap in gaps),
        "tokens": sum(gap.tokens for gap in gaps),
    }


def length_limit(length: int, device: torch.device) -> dict[str, Any]:
    """fp32: prompt and reply fill `length` to the last entry, in a full pool of pages."""
    model = model_of(LLAMA, device, torch.float32, length=length)
    splits = length - 1, length - 2, length - 40, length - 7, 3
    submitted = [
        Request(str(prompt), prompt_of(prompt), min(length - prompt, 60) if prompt > 3 else 1, ())
        for prompt in splits
    ]
    plain = decode(Engine(model, slots=len(submitted)), submitted)
    for request in submitted:
        assert len(plain[request.request_id]) == request.max_new_tokens, request.request_id
    for tree in TREES.values():
        assert decode(drafting(model, tree, len(submitted)), submitted) == plain, f"{tree} differs"
    return {"tokens": (1 + len(TREES)) * sum(map(len, plain.values()))}


def ragged_batch(device: torch.device, length: int, prompts: tuple[int, ...]) -> dict[str, Any]:
    """fp32: a long row among short ones decodes as every row alone, in tables for `length`."""
    model = model_of(LLAMA, device, torch.float32, length=length)
    submitted = [Request(str(tokens), prompt_of(tokens), 24, ()) for tokens in prompts]
    plain = decode(Engine(model), submitted)
    for name, tree in TREES.items():
        assert decode(drafting(model, tree, len(submitted)), submitted) == plain, f"{name} differs"
    return {"tokens": (1 + len(TREES)) * sum(map(len, plain.values()))}


def wide_vocabulary(device: torch.device) -> dict[str, Any]:
    """fp32: greedy and sampled replies with a vocabulary of 128,256 and a draft one of 16,000."""
    proposed, vocabulary = WIDE
    model = model_of(LLAMA, device, torch.float32, vocabulary=vocabulary)
    drafter = Eagle3Drafter(head_of(model, proposed), model, TREES["tree"])
    engine = Engine(model, drafter=drafter, slots=4)
    plain = decode(Engine(model, slots=4), requests())
    assert decode(engine, requests()) == plain, "greedy replies differ"
    submitted = requests(0.8, top_p=0.95, top_k=50)
    return {**_draws(model, submitted, decode(engine, submitted)), "vocabulary": vocabulary}


def joins_and_aborts(device: torch.device) -> dict[str, Any]:
    """fp32: requests come one by one and some are aborted, waiting or not: the others' tokens are
    the plain ones, and all pages come back."""
    model, submitted = model_of(LLAMA, device, torch.float32), requests()
    plain, engine = decode(Engine(model), submitted), drafting(model, TREES["tree"], 4)
    waiting, dropped, kept = list(submitted), set[str](), dict[str, tuple[int, ...]]()
    for step in range(10_000):
        if waiting and step % 2 == 0:
            engine.add(waiting.pop())
        if step in (1, 4, 9, 16):  # the request before last to come, then earlier ones
            chosen = submitted[min(len(waiting) + step % 3, len(submitted) - 1)].request_id
            if engine.abort(chosen) is not None:
                dropped.add(chosen)
        for emission in engine.step():
            if emission.completion and emission.completion.finish_reason != "abort":
                kept[emission.request_id] = emission.completion.token_ids
        if not waiting and not engine.busy:
            break
    assert dropped and kept.keys() | dropped == plain.keys(), f"{dropped} and {kept.keys()}"
    wrong = [name for name, tokens in kept.items() if tokens != plain[name]]
    assert not wrong, f"replies {wrong} differ"
    pool = engine.pools.shared
    assert pool.free_pages == pool.capacity, f"{pool.capacity - pool.free_pages} pages are lost"
    return {"aborted": len(dropped), "tokens": sum(map(len, kept.values()))}


def large_pool(device: torch.device) -> dict[str, Any]:
    """bf16, which takes 34 GB: keys behind the first POOL_ELEMENTS of a layer's."""
    model = model_of({**LLAMA, "num_hidden_layers": 3}, device, torch.bfloat16)
    near = drafting(model, TREES["tree"], 4)
    page = near.pools.planes.target[0, 0, 0].numel()
    first = POOL_ELEMENTS // page + 1
    drafter = Eagle3Drafter(head_of(model), model, TREES["tree"])
    engine = Engine(model, drafter=drafter, slots=4, pages=first + near.pools.shared.pages)
    assert engine.pools.shared.allocate(first) is not None  # what is left lies behind it
    assert decode(engine, requests()) == decode(near, requests()), "replies differ"
    return {"elements": engine.pools.planes.target[0, 0].numel()}


def capture_beside_pinning(device: torch.device) -> dict[str, Any]:
    """fp32: graphs captured while another thread pins memory, as a data loader does."""
    model, pinned, ended = model_of(LLAMA, device, torch.float32), list[int](), threading.Event()

    def pin() -> None:
        while not ended.is_set():
            pinned.append(torch.empty(1 << 18).pin_memory().numel())

    plain, thread = decode(Engine(model), requests()), threading.Thread(target=pin)
    thread.start()
    try:
        done = decode(drafting(model, TREES["tree"], 8), requests())
    finally:
        ended.set()
        thread.join()
    assert done == plain, "replies differ"
    assert pinned, "nothing was pinned meanwhile"
    return {"pinned": len(pinned)}


@contextmanager
def _alone_in_a_group(device: torch.device, folder: str) -> Iterator[None]:
    """In torch's default group, which another check of this process may have made."""
    if distributed.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def collectives_are_captured(device: torch.device) -> dict[str, Any]:
    """fp32: rounds that hold collectives, of a group of one: two need two devices."""
    plain = decode(Engine(model_of(LLAMA, device, torch.float32)), requests())
    with tempfile.TemporaryDirectory() as folder, _alone_in_a_group(device, folder):
        model = model_of(LLAMA, device, torch.float32, group=TensorGroup(0, 1))
        done = decode(drafting(model, TREES["tree"], 8), requests())
    assert done == plain, "replies differ"
    return {"tokens": sum(map(len, done.values()))}


def _shortfall(scores: Tensor, chosen: Tensor) -> Tensor:
    """How far below the best of scores [T, V] each chosen token [T] is."""
    return scores.max(-1).values - scores.gather(1, chosen[:, None])[:, 0]


def against_hf(name: str, device: torch.device, *, float8: bool = False) -> dict[str, Any]:
    """A whole architecture with random weights: log-probabilities and greedy replies are HF's; with
    `float8` of matrices that are rounded to it, in which a GPU's kernels hold them.

    fp32: log-probabilities of a text. bf16: each token that we choose is HF's best or nearly so, in
    HF's bf16 or in fp32: HF rounds more often than kernels that sum in fp32.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    keys = dict(ARCHITECTURES[name])
    config: Any = AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(0)
    family: Any = AutoModelForCausalLM
    drawn = family.from_config(config, dtype=torch.float32)
    for parameter in drawn.parameters():  # else logits are nearly flat, norms 1 and biases 0
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    if float8:
        for matrix in (each for each in drawn.model.layers.parameters() if each.dim() > 1):
            matrix.data = Float8Rows.of(matrix.data).widened().float()
    layers = config.num_hidden_layers
    capture = 1, layers // 2 - 1, layers - 4
    prompt, reply = prompt_of(200), prompt_of(100, 8)
    results: dict[str, Any] = {}

    @torch.inference_mode()
    def theirs(dtype: torch.dtype) -> Tensor:
        # Loaded, not converted: .to(bfloat16) would round rotary frequencies as well.
        hf = family.from_pretrained(directory, dtype=dtype).to(device)
        tokens = torch.tensor([[*prompt, *reply[:-1]]], device=device)
        logits: Tensor = hf(tokens).logits[0, len(prompt) - 1 :]  # [T, V]
        return logits.float().log_softmax(-1)

    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            directory = Path(folder) / str(dtype)
            drawn.to(dtype).save_pretrained(directory)
            model = DecoderModel.load(
                directory, capture, device=device, dtype=dtype, max_length=300
            )
            held = isinstance(model.layers[0].qkv, Float8Rows)
            assert held == (float8 and isinstance(model.ops, TritonOps)), "held in float8"
            if dtype == torch.float32:
                ours = log_probabilities(model, prompt, reply)
                difference = float((theirs(dtype) - ours).abs().max())
                assert difference < WHOLE_DIFFERENCE, f"log-probabilities differ by {difference}"
                results["largest_difference"] = difference
            else:
                submitted = Request("0", prompt, 64, ())
                reply = decode(drafting(model, TREES["tree"], 1), [submitted])["0"]
                chosen = torch.tensor(reply, device=device)
                shortfalls = torch.minimum(
                    _shortfall(theirs(torch.bfloat16), chosen),
                    _shortfall(theirs(torch.float32), chosen),
                )
                results["worst_log_probability_gap"] = worst = float(shortfalls.max())
                results["near_ties"] = int((shortfalls > 0).sum())
                assert worst <= NEAR_TIE, f"a token is {worst} below Hugging Face's best one"
    return results


def kernels(file: str) -> dict[str, Any]:
    """Triton kernels against their definitions: the suite's own tests, on this GPU."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed; the other checks ran the same kernels"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return {"summary": done.stdout.strip().splitlines()[-1]}


def checks(device: torch.device) -> dict[str, Check]:
    """Every check by its name; long ones stand apart, so that parts take about as long."""
    return dict(_checks(device))


def _checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    if device.type == "cuda":
        for file in KERNEL_TESTS:
            yield f"kernels, {Path(file).stem}", partial(kernels, file)
        yield "capture beside pinning", partial(capture_beside_pinning, device)
    for name in ARCHITECTURES:
        yield f"hugging face, {name}", partial(against_hf, name, device)
    first = next(iter(ARCHITECTURES))
    yield f"hugging face, {first} in float8", partial(against_hf, first, device, float8=True)
    for name, shape in SHAPES.items():
        yield f"logits, {name}", partial(logits_agree, shape, device)
        yield f"near ties in bf16, {name}", partial(near_ties, shape, device)
        for title, tree in TREES.items():
            yield f"greedy, {name}, {title}", partial(greedy_is_lossless, shape, tree, device)
    for name in DRAFTERS:
        yield f"drafter, {name}", partial(drafter_is_lossless, name, device)
    yield "sampling", partial(sampling_is_lossless, device, 1.0, 0)
    yield "sampling, top-p and top-k", partial(sampling_is_lossless, device, 0.9, 40)
    for length in (LENGTH, LENGTH - 24):
        yield f"length limit, {length}", partial(length_limit, length, device)
    yield "ragged batch", partial(ragged_batch, device, max(RAGGED) + 64, RAGGED)
    yield "positions for 128k", partial(ragged_batch, device, LONGEST, PROMPTS)
    yield "a pool above 2^31 elements", partial(large_pool, device)
    yield "collectives in rounds", partial(collectives_are_captured, device)
    yield "joins and aborts", partial(joins_and_aborts, device)
    yield "vocabulary of 128k", partial(wide_vocabulary, device)
    yield "captured states", partial(states_agree, device)
    yield "an optimiser step", partial(step_agrees, device)
    yield "training losses", partial(losses_agree, *WIDE, device)
    yield "training attention", partial(attention_agrees, device)


def _draws(
    model: DecoderModel, submitted: list[Request], done: dict[str, tuple[int, ...]]
) -> dict[str, float]:
    worst = max(draw_gap(model, request, done[request.request_id]) for request in submitted)
    assert worst <= DRAW_GAP, f"a draw is {worst} away from the plain model's"
    return {"worst_gap": worst}
