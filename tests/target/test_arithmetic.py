"""`auto` on machines of every kind, and what is promised of each arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipeline.config import TargetSection, isa
from pipeline.decoder.ops.base import TorchOps
from pipeline.decoder.ops.triton.ops import TritonOps
from pipeline.records import Arithmetic
from pipeline.target import arithmetic as arithmetics
from pipeline.target.arithmetic import (
    NOT_NATIVE,
    decoder_arithmetic,
    decoder_weight_bytes,
    planned_dtype,
    reason,
    resolve_dtype,
    server_arithmetic,
    target_dtype,
    torch_arithmetic,
)

CPU = torch.device("cpu")


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor that has every level, and no GPU."""
    for module in (isa, arithmetics):
        monkeypatch.setattr(module, "machine_levels", lambda: tuple(isa.LEVELS))
    monkeypatch.setattr("pipeline.config.isa.platform.machine", lambda: "x86_64")
    monkeypatch.setattr("pipeline.target.arithmetic._NVIDIA_DEVICE", SimpleNamespace(exists=bool))
    return monkeypatch


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        ("none", "float32"),
        ("avx2", "float32"),
        ("avx512", "float32"),
        ("avx512_bf16", "bfloat16"),
        ("amx", "bfloat16"),
    ],
)
def test_auto_is_what_the_processor_multiplies(
    force: pytest.MonkeyPatch, level: str, dtype: str
) -> None:
    force.setenv(isa.VARIABLE, level)
    assert resolve_dtype("auto", CPU) is getattr(torch, dtype)
    assert planned_dtype("auto", "cpu") == planned_dtype("auto", "auto") == dtype
    assert target_dtype(TargetSection(source="x")) == dtype
    assert reason(torch_arithmetic(getattr(torch, dtype), CPU), "auto") == (
        NOT_NATIVE if dtype == "float32" else ""
    )
    for setting in ("float32", "bfloat16", "float16"):
        assert resolve_dtype(setting, CPU) is getattr(torch, setting)
        assert planned_dtype(setting, "cpu") == setting


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_auto_on_cuda(force: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str) -> None:
    force.setenv(isa.VARIABLE, "avx2")
    force.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    device = torch.device("cuda")
    assert resolve_dtype("auto", device) is getattr(torch, dtype)
    assert planned_dtype("auto", "cuda") == "bfloat16"
    arithmetic = torch_arithmetic(getattr(torch, dtype), device)
    assert (arithmetic.processor, arithmetic.repeatable) == (
        f"sm_{capability[0]}{capability[1]}",
        "no",
    )


def test_a_plan_counts_weights_as_they_will_lie_in_memory(force: pytest.MonkeyPatch) -> None:
    section = TargetSection(source="x", device="cpu")
    force.setenv(isa.VARIABLE, "avx2")
    assert decoder_weight_bytes(section) == 2, "widened in registers"
    force.setenv("EAGLE3_CPU_KERNELS", "0")
    assert decoder_weight_bytes(section) == 4
    force.setenv(isa.VARIABLE, "amx")
    assert decoder_weight_bytes(section) == 2


def test_torch_promises_less_than_our_kernels(force: pytest.MonkeyPatch) -> None:
    force.setenv(isa.VARIABLE, "avx512")
    assert torch_arithmetic(torch.float32, CPU).repeatable == "per thread count"
    assert torch_arithmetic(torch.bfloat16, CPU).repeatable == "no", "results hang on addresses"
    force.setenv(isa.VARIABLE, "amx")
    assert torch_arithmetic(torch.bfloat16, CPU).repeatable == "per thread count"
    assert server_arithmetic("vllm").repeatable == "no"

    ours = SimpleNamespace(name="cpu", arithmetic_name="avx2", repeatable="always")
    arithmetic = decoder_arithmetic(ours, torch.float32, CPU)
    assert str(arithmetic) == "float32, kernels avx2" and arithmetic.repeatable == "always"
    assert arithmetic.threads == torch.get_num_threads() and arithmetic.processor == "amx"
    assert decoder_arithmetic(TorchOps(), torch.float32, CPU).kernels == "torch"
    assert decoder_arithmetic(TritonOps(), torch.float32, CPU).repeatable == "no"


def test_which_arithmetics_agree() -> None:
    def arithmetic(repeatable: str, **changes: object) -> Arithmetic:
        fields = {"dtype": "float32", "kernels": "avx2", "device": "cpu", "processor": "amx"}
        return Arithmetic.model_validate(
            {**fields, "threads": 2, "repeatable": repeatable, **changes}
        )

    always, counted = arithmetic("always"), arithmetic("per thread count")
    assert always.agrees(arithmetic("always", threads=9, processor="avx2"))
    assert not always.agrees(arithmetic("always", dtype="bfloat16"))
    assert counted.agrees(arithmetic("per thread count"))
    assert not counted.agrees(arithmetic("per thread count", threads=1))
    assert not arithmetic("no").agrees(arithmetic("no"))
