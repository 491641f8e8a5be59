"""What DeepSpeed holds of each parameter, whole, whichever ZeRO stage has it in parts.

Of a parameter there are its fp32 master and AdamW's two moments. Every process has all of them
(stage 0), or ranges of them, none of which two processes have (stages 1 to 3):

    stage 0       ▓▓▓▓▓▓▓▓▓▓▓▓    ▓▓▓▓▓▓▓▓▓▓▓▓
    stages 1–3    ▓▓▓▓▓▓▓                ▓▓▓▓▓
                  process 0       process 1

Whole, they belong to no number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


class _Part(NamedTuple):
    """What this process holds of something: a view of the optimiser's own memory."""

    values: Tensor  # 1-D; ZeRO 3 fills up the last process's with what belongs to nothing
    start: int  # where it begins in the whole, flattened


class OptimizerState:
    """The state behind `optimizer`, which DeepSpeed made of an AdamW for ZeRO `stage`."""

    def __init__(self, optimizer: Any, stage: int) -> None:
        self._optimizer, self._stage = optimizer, stage
        self._adam: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._masters = dict(self._pairs()) if stage == 0 else {}

    @property
    def step(self) -> int:
        """Steps that AdamW has taken, by its own count."""
        return max(int(state["step"]) for state in self._adam.state.values())

    def begin(self, step: int) -> None:
        """Make room for what is to be put: AdamW itself only does in its first step."""
        for master in self._stepped():
            self._adam.state[master] = {
                "step": torch.tensor(float(step), dtype=torch.float32, device=master.device),
                **{kind: torch.zeros_like(master, requires_grad=False) for kind in MOMENTS},
            }

    def whole(self, parameter: nn.Parameter, kind: Kind) -> Tensor:
        """All of it, float32; every process takes part."""
        part, shape = self._part(parameter, kind), whole_shape(parameter)
        if self._stage == 0:
            assert part is not None, "every process has all"
            return part.values.detach().view(shape)
        # As integers: adding up zeros and one process's bits changes none of them.
        bits = torch.zeros(shape.numel(), dtype=torch.int32, device=parameter.device)
        if part is not None:
            own = _useful(part, bits)
            own.copy_(part.values.detach()[: len(own)].view(torch.int32))
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(bits)
        return bits.view(torch.float32).view(shape)

    @torch.no_grad()
    def put(self, parameter: nn.Parameter, kind: Kind, whole: Tensor) -> None:
        """Take back what `whole` gave, on any number of processes."""
        part = self._part(parameter, kind)
        if part is not None:
            own = _useful(part, whole.flatten())
            part.values[: len(own)].copy_(own)

    def _part(self, parameter: nn.Parameter, kind: Kind) -> _Part | None:
        if self._stage == 0:
            return _Part(self._state_of(self._masters[parameter], kind).view(-1), 0)
        if self._stage == 3:
            return self._partition(parameter, kind)
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        there, here = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        values = self._state_of(flat, kind).narrow(0, here.start, here.numel)
        return _Part(values, there.start)

    def _partition(self, parameter: nn.Parameter, kind: Kind) -> _Part:
        """Of ZeRO 3, which cuts each parameter into equal parts."""
        from deepspeed.utils import (  # type: ignore[import-untyped]
            safe_get_local_fp32_param,
            safe_get_local_optimizer_state,
        )

        if kind == "master":
            values = safe_get_local_fp32_param(parameter)
        else:
            values = safe_get_local_optimizer_state(parameter, kind)
        return _Part(values.detach(), torch.distributed.get_rank() * len(values))

    def _state_of(self, master: Tensor, kind: Kind) -> Tensor:
        state: Tensor = master if kind == "master" else self._adam.state[master][kind]
        return state.detach()

    def _stepped(self) -> list[Tensor]:
        """The tensors that AdamW steps, each with a state of its own."""
        if self._stage == 3:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return [master for group in self._adam.param_groups for master in group["params"]]

    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of stage 0: parameters and their masters, which in float32 are the parameters."""
        groups = self._adam.param_groups
        for group, own in zip(getattr(self._optimizer, "fp16_groups", groups), groups, strict=True):
            parameters = group["params"] if isinstance(group, dict) else group
            yield from zip(parameters, own["params"], strict=True)


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter that ZeRO 3 may have cut."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


@torch.no_grad()
def set_weight(parameter: Tensor, whole: Tensor) -> None:
    """Set a weight or a buffer that the model computes with, of which ZeRO 3 keeps a part here."""
    if not hasattr(parameter, "ds_tensor"):
        parameter.copy_(whole)
        return
    values: Tensor = parameter.ds_tensor.data
    own = _useful(_Part(values, torch.distributed.get_rank() * len(values)), whole.flatten())
    values[: len(own)].copy_(own)


def _useful(part: _Part, whole: Tensor) -> Tensor:
    """The range of `whole`, flattened, that the part is of."""
    return whole[part.start : part.start + len(part.values)]
