"""The training losses' kernels against autograd in float64, and inside the output layer.

Without a GPU these tests run in Triton's interpreter, see conftest.py.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from pipeline.config.train import Loss
from pipeline.learning import losses as divergence
from pipeline.learning.losses import OutputLoss, Teacher
from pipeline.learning.losses_kernel import compare_in_place
from tests.decoder.ops.backends import TYPES
from tests.train.formulas import divergence_of

LOSSES: tuple[Loss, ...] = get_args(Loss)
#: Of a gradient, besides a probability's error in float32. The interpreter cuts bfloat16 off.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("steps", "labels", "size"), [(1, 3, 1), (3, 2, 37), (2, 2, 8193)])
def test_loss_hits_and_gradients(
    device: torch.device,
    steps: int,
    labels: int,
    size: int,
    loss: Loss,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(size)
    # Few values: the largest is often tied, and p is never so near q that rounding decides.
    logits, teacher_logits = (
        (4 * torch.randn(*shape, device=device)).round(decimals=1).to(dtype)
        for shape in ((steps, labels, size), (labels, size))
    )
    exact = logits.double().requires_grad_()
    scales = torch.rand(steps, labels + 1, device=device)[:, 1:]  # a view
    scales[-1, 0] = 0
    draft_ids = exact.argmax(-1)
    draft_ids[:, 1] = -1
    draft_ids[0, 0] = (draft_ids[0, 0] + 1) % size
    draft_ids = draft_ids.T.contiguous().T  # not contiguous
    p = teacher_logits.double().softmax(-1)
    expected = (divergence_of(exact, p, loss) * scales).sum()
    (slope,) = torch.autograd.grad(expected, exact)
    overlaps = torch.full((steps, labels), torch.nan, device=device)
    value, hits = compare_in_place(logits, teacher_logits, scales, draft_ids, loss, overlaps)
    shared = torch.minimum(exact.detach().softmax(-1), p).sum(-1)
    torch.testing.assert_close(overlaps.double(), shared, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert hits.tolist() == (exact.argmax(-1) == draft_ids).sum(1).tolist()
    torch.testing.assert_close(logits.double(), slope, rtol=ROUNDING[dtype], atol=1e-6)
    assert not logits[-1, 0].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_teacher_logits_of_minus_infinity_have_no_probability(
    loss: Loss, device: torch.device
) -> None:
    """A whole block of them and single ones; as plain torch does it."""
    torch.manual_seed(3)
    logits, teacher_logits = (torch.randn(*s, device=device) for s in ((2, 2, 4500), (2, 4500)))
    teacher_logits[..., :4096] = teacher_logits[..., 4200:4300] = -torch.inf
    given = torch.rand(2, 2, device=device), torch.full((2, 2), 4400, device=device), loss
    results = []
    for compare in (compare_in_place, divergence._compare_in_place):
        slope = logits.clone()
        value, hits = compare(slope, teacher_logits.clone(), *given)
        results.append((value, hits, slope))
    assert bool(torch.isfinite(results[0][0]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_the_output_layer_takes_the_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, with the results of plain torch."""
    torch.manual_seed(1)
    states, weight = torch.randn(3, 5, 8, device=device), torch.randn(40, 8, device=device)
    rows = torch.randn(40, 8, device=device)
    teacher = Teacher(torch.randn(5, 8, device=device), rows)
    scales, ids = torch.rand(3, 5, device=device), torch.arange(15, device=device).view(3, 5)
    launched = []

    def compare(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        launched.append(logits.shape[1])
        return compare_in_place(logits, *rest)  # type: ignore[arg-type]

    results = []
    for chosen, logits in ((compare, 2 * 3 * 40), (divergence._compare_in_place, 1 << 20)):
        monkeypatch.setattr(divergence, "_comparison", lambda scales, chosen=chosen: chosen)
        monkeypatch.setattr(divergence, "_chunk_logits", lambda states, logits=logits: logits)
        learned = states.clone().requires_grad_(), weight.clone().requires_grad_()
        value, hits = OutputLoss.apply(*learned, teacher, scales, ids, "kl")  # type: ignore[no-untyped-call]
        results.append((value, hits, *torch.autograd.grad(value, learned)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert launched == [2, 2, 1]


def test_on_cuda_the_kernel_is_taken(device: torch.device) -> None:
    chosen = divergence._comparison(torch.zeros(1, device=device))
    assert (chosen is compare_in_place) == (device.type == "cuda")
    exact = divergence._comparison(torch.zeros(1, device=device, dtype=torch.float64))
    assert exact is divergence._compare_in_place
