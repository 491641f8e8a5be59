"""Captured states, and losses and attention of training, on a GPU, against the CPU's."""

from __future__ import annotations

import importlib.util
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from bench.random_target import random_head
from pipeline.config import TrainSection
from pipeline.config.train import Loss
from pipeline.learning import flex
from pipeline.learning.attention import KeyValue, UnrolledAttention
from pipeline.learning.losses import OutputLoss, Teacher
from pipeline.target.forward import (
    LoadedTarget,
    capture_alone,
    capture_alternatives,
    capture_states,
    layers_of,
    register_packed_attention,
)
from pipeline.target.rotary import RotaryTable

STEPS, LABELS, HIDDEN = 3, 32, 64
#: A result's largest difference may be this much of its largest number, in fp32: where q is all but
#: p, rounding decides which is the smaller.
DIFFERENCE = 1e-3


#: The same for attention, by type; the reference is in float64, of the same rounded numbers.
ATTENTION_DIFFERENCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2}  # tf32 products, and bf16's
QUERY_HEADS, KEY_HEADS, SIZE = 8, 2, 64


#: Of a token's states, relative, by type.
STATES_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
TARGET: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"max_position_embeddings": 1024, "sliding_window": 64},
}


class Inputs(NamedTuple):
    """Random ones, for a draft vocabulary of Vd out of V tokens."""

    states: Tensor  # [K, L, H]
    weight: Tensor  # [Vd, H]
    teacher_states: Tensor  # [L, H]
    lm_head: Tensor  # [V, H], the target's
    scales: Tensor  # [K, L]

    def results(self, columns: Tensor, draft_ids: Tensor, loss: Loss) -> list[Tensor]:
        """The loss and its two gradients; columns [Vd] is the draft vocabulary."""
        teacher = Teacher(self.teacher_states, self.lm_head[columns])
        learned = self.states.requires_grad_(), self.weight.requires_grad_()
        value, _ = OutputLoss.apply(*learned, teacher, self.scales, draft_ids, loss)  # type: ignore[no-untyped-call]
        return [value.detach(), *torch.autograd.grad(value, learned)]


def losses_agree(proposed: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """fp32: each loss and its gradients for such vocabularies."""
    torch.manual_seed(0)
    exact = Inputs(
        torch.randn(STEPS, LABELS, HIDDEN, dtype=torch.float64),
        torch.randn(proposed, HIDDEN, dtype=torch.float64) / 4,
        torch.randn(LABELS, HIDDEN, dtype=torch.float64),
        torch.randn(vocabulary, HIDDEN, dtype=torch.float64) / 4,
        torch.rand(STEPS, LABELS, dtype=torch.float64),
    )
    ours = Inputs(*(tensor.to(device, torch.float32) for tensor in exact))
    columns = torch.randperm(vocabulary)[:proposed].sort().values
    draft_ids = torch.randint(-1, proposed, (STEPS, LABELS))
    differences: dict[str, float] = {}
    for loss in get_args(Loss):
        pairs = zip(
            ours.results(columns.to(device), draft_ids.to(device), loss),
            exact.results(columns, draft_ids, loss),
            strict=True,
        )
        differences[loss] = max(
            float((got.cpu() - expected).abs().max() / expected.abs().max())
            for got, expected in pairs
        )
        assert differences[loss] < DIFFERENCE, f"{loss} differs by {differences[loss]}"
    return {"largest_differences": differences}


def attention_agrees(device: torch.device) -> dict[str, Any]:
    """Documents of several blocks, rows with gaps, all keys and a window; two numbers of rows; and
    rows that read another token."""
    differences: dict[str, float] = {}
    for dtype, allowed in ATTENTION_DIFFERENCE.items():
        for lengths, window in (((300, 40, 500), 0), ((300, 40, 500), 100), ((90, 200), 0)):
            case = f"{str(dtype).removeprefix('torch.')}, {sum(lengths)} tokens, window {window}"
            pairs = zip(
                _attended(lengths, window, device, dtype, dtype),
                _attended(lengths, window, torch.device("cpu"), dtype, torch.float64),
                strict=True,
            )
            differences[case] = max(
                float((got.double().cpu() - expected).abs().max() / expected.abs().max())
                for got, expected in pairs
            )
            assert differences[case] < allowed, f"{case}: differs by {differences[case]}"
    return {"largest_differences": differences, "flex": flex.has_kernel(device, SIZE)}


def states_agree(device: torch.device) -> dict[str, Any]:
    """Documents captured in one packed row, and alternatives of them, against transformers' own
    forward of each alone on the CPU in float64, of the same weights; with softcaps and windows too.
    """
    differences: dict[str, float] = {}
    contract: Any = SimpleNamespace(capture_layers=(1, 2, 4))
    documents = [torch.randint(0, 512, (length,)).tolist() for length in (300, 7, 1, 120)]
    for kind in ("llama", "gemma2"):
        config: Any = AutoConfig.for_model(kind, **TARGET)
        torch.manual_seed(0)
        family: Any = AutoModelForCausalLM
        drawn = family.from_config(config, attn_implementation=register_packed_attention())
        for dtype, allowed in STATES_DIFFERENCE.items():
            model = deepcopy(drawn).to(device, dtype).eval()
            ours = LoadedTarget(model, contract, device, Path())
            alone = deepcopy(model).to("cpu", torch.float64)
            exact = LoadedTarget(alone, contract, torch.device("cpu"), Path())
            case, worst = f"{kind}, {str(dtype).removeprefix('torch.')}", 0.0
            for document, captured in zip(documents, capture_states(ours, documents), strict=True):
                expected = capture_alone(exact, document)
                for got, right in zip(layers_of(*captured), layers_of(*expected), strict=True):
                    apart = (got.cpu().double() - right).norm(dim=1) / right.norm(dim=1)
                    worst = max(worst, float(apart.max()))
            differences[case] = worst
            assert worst < allowed, f"{case}: differs by {worst}"
            case = f"{case}, alternatives"
            differences[case] = worst = _alternatives_apart(ours, exact, documents)
            assert worst < allowed, f"{case}: differs by {worst}"
    return {"largest_differences": differences}


def _alternatives_apart(
    ours: LoadedTarget, exact: LoadedTarget, documents: list[list[int]]
) -> float:
    """Largest relative distance of three documents' alternatives, in rows of 64, from `exact`."""
    places = torch.tensor([0, 3, 6])

    def draw(number: int, final: Tensor) -> tuple[Tensor, Tensor]:
        at = places * (len(final) // 7)
        return at, (at + torch.tensor([[17], [number]])) % 512

    worst, documents = 0.0, [document for document in documents if len(document) > 6]
    captured = capture_alternatives(ours, documents, draw, together=64)
    for number, (document, (_, final, others)) in enumerate(zip(documents, captured, strict=True)):
        at, token_ids = draw(number, final)
        for ids, states in zip(token_ids.tolist(), others.final_states, strict=True):
            for place, token, state in zip(at.tolist(), ids, states, strict=True):
                right = capture_alone(exact, [*document[:place], token])[1][-1]
                apart = (state.cpu().double() - right).norm() / right.norm()
                worst = max(worst, float(apart))
    return worst


def step_agrees(device: torch.device) -> dict[str, Any]:
    """Optimiser steps through DeepSpeed, compiled as training is there: the first has the loss and
    the gradient of the CPU in float64, and the loss falls."""
    if importlib.util.find_spec("deepspeed") is None:
        return {"skipped": "deepspeed is not installed"}
    from pipeline.heads.eagle3.ttt import TttModel
    from pipeline.heads.unrolled import Objective
    from pipeline.store.states import StatesSample, teacher_positions
    from pipeline.train.trainer import Trainer
    from tests.train.memory_corpus import pack_samples

    config, generator = LlamaConfig(**TARGET), torch.Generator().manual_seed(2)
    hidden, vocabulary = TARGET["hidden_size"], TARGET["vocab_size"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 4

    samples = []
    for length in (90, 40, 200):
        ids = torch.randint(0, vocabulary, (length,), generator=generator, dtype=torch.int32)
        mask = (torch.arange(length) > length // 3).to(torch.uint8)
        positions = teacher_positions(mask)
        finals = len(positions)
        parts = draw(length, 3 * hidden), draw(finals, hidden), positions
        others = torch.randint(0, vocabulary, (finals, 2), generator=generator, dtype=torch.int32)
        sample = StatesSample(f"{length}", "drawn", ids, mask, *parts)
        states = draw(finals, 2 * hidden)
        samples.append(replace(sample, alternative_ids=others, alternative_states=states))
    batch = pack_samples(samples)
    weights = draw(vocabulary, hidden), draw(vocabulary, hidden)

    def model(dtype: torch.dtype, compiled: bool) -> TttModel:
        head = random_head(config, torch.arange(0, vocabulary, 2), scale=4)
        options: dict[str, Any] = {"max_length": 256, "dtype": dtype, "compiled": compiled}
        options["alternative_weight"] = 1.0
        return TttModel(head.to(dtype), *weights, Objective(STEPS, 0.8), **options)

    exact = model(torch.float64, compiled=False)
    loss = exact(batch.to(torch.device("cpu"), torch.float64), len(batch.labels)).loss
    trained = [each for each in exact.head.parameters() if each.requires_grad]
    norm = float(torch.stack([each.norm() for each in torch.autograd.grad(loss, trained)]).norm())
    section = TrainSection(dtype="float32", clip_norm=1e9)
    trainer = Trainer(model(torch.float32, compiled=device.type == "cuda"), section, device)
    steps = [trainer.step([batch], 1e-3) for _ in range(3)]
    got, expected = (steps[0].loss, steps[0].gradient_norm), (float(loss.detach()), norm)
    apart = [abs(one / other - 1) for one, other in zip(got, expected, strict=True)]
    assert max(apart) < 1e-2, f"loss and gradient norm are {got}, and should be {expected}"
    assert steps[0].loss > steps[1].loss > steps[2].loss, "the loss does not fall"
    return {"loss": apart[0], "gradient_norm": apart[1]}


def _attended(
    lengths: tuple[int, ...],
    window: int,
    device: torch.device,
    rounded: torch.dtype,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Outputs of STEPS steps and the gradients of all inputs, numbers of type `rounded`."""
    generator, tokens = torch.Generator().manual_seed(1), sum(lengths)
    rows = torch.arange(tokens)[torch.arange(tokens) % 11 > 2]
    shape: Any = LlamaConfig(head_dim=SIZE, max_position_embeddings=4096)
    rotary = RotaryTable(shape, max(lengths) + STEPS, device=device, dtype=dtype)
    attention = UnrolledAttention(lengths, rows.to(device), rotary, window=window)

    def draw(count: int, heads: int) -> Tensor:
        drawn = torch.randn(count, heads, SIZE, generator=generator).to(rounded)
        return drawn.to(device, dtype).requires_grad_()

    past, outputs, leaves = list[KeyValue](), list[Tensor](), list[Tensor]()
    for k in range(STEPS):
        count = tokens if k == 0 else len(rows)
        step = draw(len(rows), QUERY_HEADS), draw(count, KEY_HEADS), draw(count, KEY_HEADS)
        output, written = attention.attend(k, *step, list(past))
        past.append(written)
        outputs.append(output)
        leaves += step
    starts = torch.tensor([0, *accumulate(lengths)])
    others = rows[~torch.isin(rows, starts)]
    replaced = UnrolledAttention(lengths, others.to(device), rotary, window=window, instead=True)
    own = [draw(len(others), heads) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)]
    leaves += own
    outputs.append(replaced.attend(0, own[0], own[1], own[2], past[:1])[0])
    upper = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
    return [out.detach() for out in outputs] + list(torch.autograd.grad(outputs, leaves, upper))
