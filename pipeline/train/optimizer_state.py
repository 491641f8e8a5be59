"""AdamW's state of each parameter, whole, also where DeepSpeed's ZeRO has it in parts.

Of a parameter there are AdamW's two moments, and with ZeRO a second copy of its fp32 weights, which
AdamW steps. Every process has all of them (stage 0), or ranges that no other process has (stage 1):

    stage 0    ▓▓▓▓▓▓▓▓▓▓▓▓    ▓▓▓▓▓▓▓▓▓▓▓▓
    stage 1    ▓▓▓▓▓▓▓                ▓▓▓▓▓
               process 0       process 1

Whole, they belong to no number of processes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


class _Part(NamedTuple):
    """What this process holds of something: a view of the optimiser's own memory."""

    values: Tensor  # 1-D
    start: int  # where it begins in the whole, flattened


class OptimizerState:
    """The state behind `optimizer`, which DeepSpeed made of an AdamW for ZeRO `stage`."""

    def __init__(self, optimizer: Any, stage: int) -> None:
        self._optimizer, self._stage = optimizer, stage
        self._adam: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)

    @property
    def step(self) -> int:
        """Steps that AdamW has taken, by its own count."""
        return max(int(state["step"]) for state in self._adam.state.values())

    def begin(self, step: int) -> None:
        """Make room for what is to be put: AdamW itself only does in its first step."""
        for group in self._adam.param_groups:
            for master in group["params"]:
                self._adam.state[master] = {
                    "step": torch.tensor(float(step), dtype=torch.float32, device=master.device),
                    **{kind: torch.zeros_like(master, requires_grad=False) for kind in MOMENTS},
                }

    def whole(self, parameter: nn.Parameter, kind: Kind) -> Tensor:
        """All of it, float32; every process takes part."""
        part = self._part(parameter, kind)
        if self._stage == 0:
            assert part is not None, "every process has all"
            return part.values.view(parameter.shape)
        # As integers: adding up zeros and one process's bits changes none of them.
        bits = torch.zeros(parameter.numel(), dtype=torch.int32, device=parameter.device)
        if part is not None:
            _range(part, bits).copy_(part.values.view(torch.int32))
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(bits)
        return bits.view(torch.float32).view(parameter.shape)

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, kind: Kind, whole: Tensor) -> None:
        """Take back what `whole` gave, on any number of processes."""
        part = self._part(parameter, kind)
        if part is not None:
            part.values.copy_(_range(part, whole.flatten()))

    def _part(self, parameter: nn.Parameter, kind: Kind) -> _Part | None:
        if self._stage == 0:
            return _Part(self._state_of(parameter, kind).view(-1), 0)
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        there, here = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        values = self._state_of(flat, kind).narrow(0, here.start, here.numel)
        return _Part(values, there.start)

    def _state_of(self, master: Tensor, kind: Kind) -> Tensor:
        state: Tensor = master if kind == "master" else self._adam.state[master][kind]
        return state.detach()


def _range(part: _Part, whole: Tensor) -> Tensor:
    """The range of `whole`, flattened, that the part is of."""
    return whole[part.start : part.start + len(part.values)]
