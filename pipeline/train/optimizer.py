"""What steps the weights, AdamW, or Muon for the layer's matrices, and its state.

Muon (https://kellerjordan.github.io/posts/muon) steps a matrix by its momentum made orthogonal.
With steps of AdamW's size (arXiv:2502.16982) both take one learning rate. lm_head, whose rows are
tokens, and the norms stay with AdamW, as is usual.

Of a parameter there are AdamW's two moments, or Muon's one, and with ZeRO a second copy of its fp32
weights, which AdamW steps. Every process has all of them (stage 0), or ranges that no other process
has (stage 1):

    stage 0    ▓▓▓▓▓▓▓▓▓▓▓▓    ▓▓▓▓▓▓▓▓▓▓▓▓
    stage 1    ▓▓▓▓▓▓▓                ▓▓▓▓▓
               process 0       process 1

Whole, they belong to no number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config import TrainSection
from pipeline.heads.base import DraftingHead

#: AdamW's moment decays, as published EAGLE heads were trained.
BETAS = 0.9, 0.95
#: What an optimiser keeps of each number it steps; in a group under "moments".
ADAMW_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
#: Beside them: the weights that the optimiser steps.
MASTER = "master"


class MuonAndAdamW(torch.optim.Optimizer):
    """Both behind one optimiser's face: they share its groups and its state."""

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], section: TrainSection
    ) -> None:
        """Groups of what Muon steps, all of them matrices, and of what AdamW does."""
        super().__init__([*matrices, *others], {"lr": section.learning_rate})
        muon = torch.optim.Muon(
            matrices,
            lr=section.learning_rate,
            weight_decay=section.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self._parts = (muon, _adamw(others, section))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Both step. DeepSpeed has no closure."""
        assert closure is None
        for part in self._parts:
            part.step()  # type: ignore[no-untyped-call]


def make_optimizer(
    head: DraftingHead, section: TrainSection, *, fc_scale: float
) -> torch.optim.Optimizer:
    """Of what is trained in `head`; the learning rate of `fc` is multiplied by fc_scale."""
    trained = [each for each in head.parameters() if each.requires_grad]
    if section.optimizer == "adamw":
        return _adamw(_groups(head, trained, fc_scale, ADAMW_MOMENTS), section)
    matrices = [each for each in trained if each.ndim == 2 and each is not head.lm_head.weight]
    others = [each for each in trained if all(each is not matrix for matrix in matrices)]
    return MuonAndAdamW(
        _groups(head, matrices, fc_scale, MUON_MOMENTS),
        _groups(head, others, fc_scale, ADAMW_MOMENTS),
        section,
    )


def _adamw(groups: list[dict[str, Any]], section: TrainSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        lr=section.learning_rate,
        betas=BETAS,
        weight_decay=section.weight_decay,
        fused=True,
    )


def _groups(
    head: DraftingHead, parameters: list[nn.Parameter], fc_scale: float, moments: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The parameters, in groups of one learning rate each."""
    projection = head.aux_projection
    own = projection.weight if projection is not None else None
    scaled = [each for each in parameters if each is own]
    others = [each for each in parameters if each is not own]
    groups = [(others, 1.0), (scaled, fc_scale)]
    return [{"params": of, "scale": scale, "moments": moments} for of, scale in groups if of]


class _Part(NamedTuple):
    """What this process holds of something: a view of the optimiser's own memory."""

    values: Tensor  # 1-D
    start: int  # where it begins in the whole, flattened


class OptimizerState:
    """The state behind `optimizer`, which DeepSpeed made of ours for ZeRO `stage`."""

    def __init__(self, optimizer: Any, stage: int) -> None:
        self._optimizer, self._stage = optimizer, stage
        self._inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)

    @property
    def step(self) -> int:
        """Steps that AdamW has taken, by its own count."""
        return max(int(state.get("step", 0)) for state in self._inner.state.values())

    def moments(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Names of what there is of a parameter, beside its weights."""
        if self._stage:
            return ADAMW_MOMENTS
        groups = self._inner.param_groups
        [own] = [group for group in groups if any(each is parameter for each in group["params"])]
        names: tuple[str, ...] = own["moments"]
        return names

    def begin(self, step: int) -> None:
        """Make room for what is to be put: the optimiser itself only does in its first step."""
        for group in self._inner.param_groups:
            for master in group["params"]:
                kept = {
                    kind: torch.zeros_like(master, requires_grad=False) for kind in group["moments"]
                }
                if group["moments"] == ADAMW_MOMENTS:
                    kept["step"] = torch.tensor(
                        float(step), dtype=torch.float32, device=master.device
                    )
                self._inner.state[master] = kept

    def whole(self, parameter: nn.Parameter, kind: str) -> Tensor:
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
    def put(self, parameter: nn.Parameter, kind: str, whole: Tensor) -> None:
        """Take back what `whole` gave, on any number of processes."""
        part = self._part(parameter, kind)
        if part is not None:
            part.values.copy_(_range(part, whole.flatten()))

    def _part(self, parameter: nn.Parameter, kind: str) -> _Part | None:
        if self._stage == 0:
            return _Part(self._state_of(parameter, kind).view(-1), 0)
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        there, here = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
        values = self._state_of(flat, kind).narrow(0, here.start, here.numel)
        return _Part(values, there.start)

    def _state_of(self, master: Tensor, kind: str) -> Tensor:
        state: Tensor = master if kind == MASTER else self._inner.state[master][kind]
        return state.detach()


def _range(part: _Part, whole: Tensor) -> Tensor:
    """The range of `whole`, flattened, that the part is of."""
    return whole[part.start : part.start + len(part.values)]
