"""The GPU check on the CPU's operations: passes with a sound decoder, fails with a broken one."""

from __future__ import annotations

import pytest
import torch

from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.tree import Tree, VerifyOutput
from tests.gpu import check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SHAPES", {"llama": check.shape_of(4, 2, 128)})
    monkeypatch.setattr(check, "TREES", {"tree": check.TREES["tree"]})


def test_a_sound_decoder_passes() -> None:
    results = check.run(CPU)
    assert list(results) == [
        "logits, llama",
        "near ties in bf16, llama",
        "greedy, llama, tree",
        "sampling",
    ]
    assert all(result["passed"] for result in results.values())
    assert results["greedy, llama, tree"]["tokens"] > 500


def test_a_lossy_verification_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TorchOps.verify

    def generous(self: TorchOps, tree: Tree, predicted: torch.Tensor, depth: int) -> VerifyOutput:
        wrong = predicted.clone()
        if depth:
            wrong[:, 0] = torch.where(predicted[:, 0] % 7 == 0, tree.tokens[:, 1], predicted[:, 0])
        return honest(self, tree, wrong, depth)

    monkeypatch.setattr(TorchOps, "verify", generous)
    results = check.run(CPU)
    assert not results["greedy, llama, tree"]["passed"]
    assert not results["sampling"]["passed"]
    assert results["logits, llama"]["passed"]
