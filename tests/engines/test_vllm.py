"""A real vLLM serves our heads: a right one passes, and every planted fault is found and named.

The engine, its scheduler, models, loader and counters are vLLM's own, from the CPU wheel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines.conftest import Line
from tests.engines.servers import vllm_server

CopyOf = Callable[[Path], Path]


def errors(findings: list[Any]) -> dict[str, str]:
    return {each.name: each.text for each in findings if each.severity == "error"}


@pytest.mark.parametrize("drafts", [3, 5])
def test_a_right_server_in_fp32_takes_the_decoders_rounds(
    line: Line, tmp_path: Path, drafts: int
) -> None:
    with vllm_server(line.target, line.head, tmp_path / "log", drafts=drafts) as server:
        seen, findings = line.held_against(server)
    assert errors(findings) == {}
    assert seen.shape is not None and seen.shape.label == f"{drafts}/1/{drafts + 1}"
    assert seen.exact and len(seen.reported) == 16
    paired = seen.paired
    assert paired is not None and paired.server == paired.decoder.value > 1.2


def test_a_right_server_in_bf16(line: Line, tmp_path: Path) -> None:
    with vllm_server(line.target, line.head, tmp_path / "log", dtype="bfloat16") as server:
        seen, findings = line.held_against(server)
    assert errors(findings) == {}
    # Its text parts from the report's at near-ties, and from there on its rounds are other ones.
    assert seen.paired is not None and not seen.paired.differs(0.03)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a server, and by which findings it may be named."""

    named: tuple[str, ...]
    head: Callable[[dict[str, Tensor]], None] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    drafts: int = 3
    drafter: bool = True
    target: Callable[[dict[str, Tensor]], None] | None = None


def shift(name: str) -> Callable[[dict[str, Tensor]], None]:
    def plant(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].roll(1, 0)

    return plant


def scale(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def plant(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name] * factor

    return plant


def permute_fc(tensors: dict[str, Tensor]) -> None:
    first, second, third = tensors["fc.weight"].chunk(3, 1)
    tensors["fc.weight"] = torch.cat((second, first, third), 1).contiguous()


def noise(name: str) -> Callable[[dict[str, Tensor]], None]:
    def plant(tensors: dict[str, Tensor]) -> None:
        torch.manual_seed(1)
        tensor = tensors[name].float()
        tensors[name] = (tensor + tensor.std() * torch.randn_like(tensor)).to(tensors[name].dtype)

    return plant


ROUNDS = "rounds_differ", "acceptance_differs"
FAULTS: dict[str, Fault] = {
    "all aux layers later": Fault(ROUNDS, config={"aux": 1}),
    "all aux layers earlier": Fault(ROUNDS, config={"aux": -1}),
    "fc's inputs permuted": Fault(ROUNDS, head=permute_fc),
    "rotary base of another model": Fault(ROUNDS, config={"rope_theta": 1000.0}),
    "d2t shifted": Fault(ROUNDS, head=shift("d2t")),
    "the hidden norm twice as large": Fault(ROUNDS, head=scale("midlayer.hidden_norm.weight", 2)),
    "the input norm a tenth": Fault(ROUNDS, head=scale("midlayer.input_layernorm.weight", 0.1)),
    "noise in the queries": Fault(ROUNDS, head=noise("midlayer.self_attn.q_proj.weight")),
    "noise in lm_head": Fault(ROUNDS, head=noise("lm_head.weight")),
    "another eps": Fault(ROUNDS, config={"rms_norm_eps": 0.1}),
    "no drafter": Fault(("no_acceptance",), drafter=False),
    "another draft length": Fault(("tree_differs",), drafts=12),
    "a context that is too short": Fault(
        ("context_cut", "requests_failed"), options=("--max-model-len", "160")
    ),
    "another target": Fault(
        ("replies_differ",), target=noise("model.layers.3.mlp.down_proj.weight")
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(line: Line, tmp_path: Path, copy_of: CopyOf, name: str) -> None:
    fault = FAULTS[name]
    head, target = line.head, line.target
    if fault.head or fault.config:
        head = copy_of(line.head)
        _plant(head, fault)
    if fault.target:
        target = copy_of(line.target)
        _change(target, fault.target)
    served = vllm_server(
        target,
        head if fault.drafter else None,
        tmp_path / "log",
        drafts=fault.drafts,
        options=fault.options,
    )
    with served as server:
        _, findings = line.held_against(server)
    assert set(errors(findings)) & set(fault.named), findings


def _plant(head: Path, fault: Fault) -> None:
    if fault.head:
        _change(head, fault.head)
    config = json.loads((head / "config.json").read_text())
    changes = dict(fault.config)
    if shift_by := changes.pop("aux", 0):
        key = "eagle_aux_hidden_state_layer_ids"
        for section in (config, config["eagle_config"]):
            section[key] = [each + shift_by for each in section[key]]
    (head / "config.json").write_text(json.dumps(config | changes))


def _change(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
