"""DeepSpeed, the one way to train: the same engine on a CPU core and on a fleet of GPUs.

Started by a launcher (`deepspeed`, `torchrun`), it joins that group; started as it is, it makes a
group of one. Weights, their gradients and AdamW's moments are float32, and so is every sum over
micro-batches and processes; products are computed in `train.dtype`, on copies (heads/trained.py):

    fp32 weights ──cast──► bf16 copies ──► unroll, loss ──► bf16 gradients of one micro-batch
         ▲                                                        │ cast
         └── AdamW ◄── clip ◄── mean over processes ◄── sum over micro-batches, fp32

A head has at most 1.5 billion parameters: 20 bytes each are 30 GB. Of ZeRO (arXiv:1910.02054) only
stage 1 is offered beside 0; it splits AdamW's state, the largest part. AdamW is torch's own, so no
compiler is needed.

Muon (https://kellerjordan.github.io/posts/muon) steps a matrix by its momentum made orthogonal.
With steps of AdamW's size (arXiv:2502.16982) both take one learning rate. lm_head, whose rows are
tokens, and the norms stay with AdamW, as is usual.

Each parameter has AdamW's two moments, or Muon's one, and with ZeRO a second copy of its fp32
weights, which AdamW steps. Every process has all of them (stage 0), or ranges that no other process
has (stage 1):

    stage 0    ▓▓▓▓▓▓▓▓▓▓▓▓    ▓▓▓▓▓▓▓▓▓▓▓▓
    stage 1    ▓▓▓▓▓▓▓                ▓▓▓▓▓
               process 0       process 1

A checkpoint has them whole, so any number of processes resumes from it.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config import TrainSection, keep_freed_memory, local_rank
from pipeline.errors import CorruptShard, DataError
from pipeline.heads.base import DraftingHead
from pipeline.heads.trained import StepResult, TrainedModel
from pipeline.learning.batches import TrainBatch
from pipeline.target.arithmetic import resolve_dtype
from pipeline.train.group import (
    all_gather_or_raise,
    broadcast_from_rank0,
    broadcast_tensor,
    join_group,
    quiet,
)
from pipeline.train.progress import StepSums

#: AdamW's moment decays, as published EAGLE heads were trained.
BETAS = 0.9, 0.95
#: Muon's.
MOMENTUM = 0.95
#: What an optimiser keeps of each number it steps; in a group under "moments".
ADAMW_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
#: Beside them: the weights that the optimiser steps.
MASTER = "master"


class TrainingState(NamedTuple):
    """All that an optimiser step changes, whole and on the CPU, for any number of processes."""

    weights: Mapping[str, Tensor]  # of the head, in float32
    moments: Mapping[str, Tensor]  # "exp_avg/<name>", … of what is trained
    step: int  # as AdamW counts


class Trainer:
    """A model in training: forward, backward and optimiser step through DeepSpeed."""

    def __init__(
        self,
        model: TrainedModel[Any],
        section: TrainSection,
        device: torch.device,
        *,
        fc_scale: float = 1.0,
    ) -> None:
        """Join or make the process group and hand the model over.

        Parameters that require no gradient stay as they are.

        fc_scale multiplies the learning rate of `fc`. Raises MissingPackage without deepspeed.
        """
        if device.type == "cpu":
            keep_freed_memory()
        deepspeed = join_group(device, minutes=section.timeout_minutes)
        self.model = model
        self.device = torch.device("cuda", local_rank()) if device.type == "cuda" else device
        self.dtype = resolve_dtype(section.dtype, device)
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        model.to(self.device)
        optimizer = make_optimizer(model.head, section, self.dtype, fc_scale=fc_scale)
        self._section = section
        with quiet():
            self._engine, self._optimizer, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=_settings(section)
            )
        self._state = OptimizerState(self._optimizer, section.zero_stage)

    def step(
        self, batches: Sequence[TrainBatch], rate: float, *, sigterm: bool = False
    ) -> StepSums:
        """One optimiser step over `train.accumulate` micro-batches, at learning rate `rate`.

        Raises DataError, on all processes the same: with the sample ids when a loss is not finite,
        without them when the gradients are not.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        divisor = self._divisor(batches)
        results: list[StepResult] = []
        for number, batch in enumerate(batches, start=1):
            padded = batch.to(self.device, self.dtype).padded()
            result: StepResult = self._engine(padded, divisor)
            results.append(result._replace(loss=result.loss.detach()))
            with quiet():
                self._engine.backward(result.loss)
                if number < len(batches):
                    self._engine.step()  # counts the micro-batch
        losses = torch.stack([result.loss for result in results]).double().cpu()
        loss = float(self._all_reduce(losses.mean()[None])) / self.world
        if not math.isfinite(loss):
            all_gather_or_raise(lambda: _check_losses(losses, batches))
        norm = self._clip_and_step()
        sums = self._sums(batches, results, loss, sigterm=sigterm)
        return sums._replace(gradient_norm=norm)

    def _divisor(self, batches: Sequence[TrainBatch]) -> float:
        """What a micro-batch's sum over labels is divided by, so that the step's gradient is that
        of the mean over all its labels: DeepSpeed takes the mean over processes and micro-batches.
        """
        counted = sum(self.model.counted(batch) for batch in batches)
        everywhere = int(self._all_reduce(torch.tensor([counted])))
        return max(1, everywhere) / (self.world * len(batches))

    def _clip_and_step(self) -> float:
        """The optimiser's step; → norm of the whole gradient before clipping."""
        with quiet():
            if self._section.zero_stage:
                self._engine.step()  # clips
                norm = float(self._engine.get_global_grad_norm())
            else:
                parameters = self._trained().values()
                norm = float(nn.utils.clip_grad_norm_(parameters, self._section.clip_norm))
        if not norm < float("inf"):
            fix = "lower train.learning_rate or train.clip_norm; the checkpoint before is kept"
            raise DataError(f"the gradient norm is {norm}", where="training step", fix=fix)
        if not self._section.zero_stage:
            with quiet():
                self._engine.step()
        return norm

    def _sums(
        self,
        batches: Sequence[TrainBatch],
        results: Sequence[StepResult],
        loss: float,
        *,
        sigterm: bool,
    ) -> StepSums:
        hits = torch.stack([result.hits for result in results]).sum(0).cpu()
        predicted = torch.stack([result.labels for result in results]).sum(0).cpu()
        tokens = sum(batch.trained_tokens for batch in batches)
        labels = sum(len(batch.labels) for batch in batches)
        coarse = int(torch.stack([result.coarse_rows for result in results]).sum())
        own = torch.tensor([tokens, labels, coarse, int(sigterm)])
        counts = self._all_reduce(torch.cat((hits, predicted, own))).tolist()
        steps = len(hits)
        return StepSums(
            loss, 0.0, tuple(counts[:steps]), tuple(counts[steps : 2 * steps]), *counts[2 * steps :]
        )

    def weights(self) -> dict[str, Tensor]:
        """The head's tensors as products read them, in `train.dtype`, on the CPU, by name."""
        return {
            name: tensor.detach()
            .to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            .contiguous()
            for name, tensor in self.model.head.state_dict().items()
        }

    def _all_reduce(self, values: Tensor) -> Tensor:
        """Sum of `values` over all processes."""
        if self.world == 1:
            return values
        values = values.to(self.device)
        torch.distributed.all_reduce(values)
        return values.cpu()

    def state(self) -> TrainingState | None:
        """What `restore` takes, on the first process; None on the others, which take part."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._trained().items():
            for kind in self._state.moments(parameter):
                whole = self._state.whole(parameter, kind)
                if self.rank == 0:
                    moments[f"{kind}/{name}"] = whole.to("cpu", copy=True)
        if self.rank > 0:
            return None
        tensors = self.model.head.state_dict().items()
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        return TrainingState(weights, moments, self._state.step)

    def restore(self, read: Callable[[], TrainingState], *, where: str) -> None:
        """Take back what `state` gave, which the first process reads and sends the others.

        Raises CorruptShard, naming `where`, for the state of another head, and what `read` raises.
        """
        states: list[TrainingState] = []

        def read_checked() -> int:
            states.append(read())
            self._check(states[0], where)
            return states[0].step

        self._state.begin(broadcast_from_rank0(read_checked))
        state, trained = states[0] if states else None, self._trained()
        for name, parameter in self.model.head.named_parameters():
            whole = self._received(state and state.weights[name], parameter)
            with torch.no_grad():
                parameter.copy_(whole)
            if name in trained:
                self._state.put(parameter, MASTER, whole)
                for kind in self._state.moments(parameter):
                    moment = state and state.moments[f"{kind}/{name}"]
                    self._state.put(parameter, kind, self._received(moment, parameter))

    def _check(self, state: TrainingState, where: str) -> None:
        """Raise CorruptShard unless the state is of this head."""
        head, shapes = self.model.head, _shapes(self.model.head.state_dict())
        moments = {
            f"{kind}/{name}": shapes[name]
            for name, parameter in self._trained().items()
            for kind in self._state.moments(parameter)
        }
        same = _shapes(state.weights) == shapes and _shapes(state.moments) == moments
        if not same or any(
            not torch.equal(state.weights[name], buffer.cpu())
            for name, buffer in head.named_buffers()
            if name in shapes  # what the target lends is in no checkpoint
        ):
            problem = "the checkpoint is of a head with other tensors or another vocabulary"
            raise CorruptShard(problem, where=where, fix="run `eagle3 train --force`")

    def _received(self, sent: Tensor | None, like: Tensor) -> Tensor:
        """The first process's tensor on all, on the device, in float32."""
        if sent is None:
            received = torch.empty(like.shape, dtype=torch.float32, device=self.device)
        else:
            received = sent.to(self.device, torch.float32)
        broadcast_tensor(received, self.device)
        return received

    def _trained(self) -> dict[str, nn.Parameter]:
        parameters = self.model.head.named_parameters()
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}

    def peak_memory(self) -> float:
        """Most memory that this process has held, in GB: of the GPU, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _settings(section: TrainSection) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # a micro-batch is one packed row of tokens
        "gradient_accumulation_steps": section.accumulate,
        "gradient_clipping": section.clip_norm if section.zero_stage else 0.0,  # else see above
        "zero_optimization": {"stage": section.zero_stage},
        "zero_allow_untested_optimizer": True,  # torch's own with ZeRO
        "steps_per_print": 1 << 40,
    }


def _check_losses(losses: Tensor, batches: Sequence[TrainBatch]) -> None:
    """Raise DataError for the first one that is not finite. losses [A]."""
    for loss, batch in zip(losses.tolist(), batches, strict=True):
        if not abs(loss) < float("inf"):
            lower = "lower train.learning_rate or train.clip_norm"
            fix = f"look at these samples' states; if they are sound, {lower}"
            raise DataError(f"the loss is {loss}", where=batch.where, fix=fix)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


class Muon(torch.optim.Optimizer):
    """torch's with `match_rms_adamw`, but for the type of its products: torch's are in bfloat16,
    for which a CPU without such instructions takes twenty times as long as in float32."""

    def __init__(
        self, groups: list[dict[str, Any]], section: TrainSection, dtype: torch.dtype
    ) -> None:
        """Groups of matrices, and the type of the products that make their momentum orthogonal."""
        rates = {"lr": section.learning_rate, "weight_decay": section.weight_decay}
        super().__init__(groups, rates)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """DeepSpeed has no closure."""
        assert closure is None
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                gradient, state = matrix.grad, self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
                update = orthogonal(gradient.lerp(momentum, MOMENTUM), self._dtype)  # Nesterov's
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with the same singular vectors, whose values, but for tiny ones, lie between about
    0.7 and 1.2: five steps of the quintic in https://kellerjordan.github.io/posts/muon, in `dtype`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonAndAdamW(torch.optim.Optimizer):
    """Both behind one optimiser's face: they share its groups and its state."""

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        section: TrainSection,
        dtype: torch.dtype,
    ) -> None:
        """Groups of what Muon steps, all of them matrices, and of what AdamW does."""
        super().__init__([*matrices, *others], {"lr": section.learning_rate})
        self._parts = (Muon(matrices, section, dtype), _adamw(others, section))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Both step. DeepSpeed has no closure."""
        assert closure is None
        for part in self._parts:
            part.step()


def make_optimizer(
    head: DraftingHead, section: TrainSection, dtype: torch.dtype, *, fc_scale: float
) -> torch.optim.Optimizer:
    """Of what is trained in `head`, with products in `dtype`; the learning rate of `fc` is
    multiplied by fc_scale."""
    trained = [each for each in head.parameters() if each.requires_grad]
    if section.optimizer == "adamw":
        return _adamw(_groups(head, trained, fc_scale, ADAMW_MOMENTS), section)
    inner = {name: each for name, each in head.named_parameters() if "_head." not in name}
    matrices = [each for each in inner.values() if each.requires_grad and each.ndim == 2]
    others = [each for each in trained if all(each is not matrix for matrix in matrices)]
    return MuonAndAdamW(
        _groups(head, matrices, fc_scale, MUON_MOMENTS),
        _groups(head, others, fc_scale, ADAMW_MOMENTS),
        section,
        dtype,
    )


def _adamw(groups: list[dict[str, Any]], section: TrainSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups, lr=section.learning_rate, betas=BETAS, weight_decay=section.weight_decay, fused=True
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
                state = {
                    kind: torch.zeros_like(master, requires_grad=False) for kind in group["moments"]
                }
                if group["moments"] == ADAMW_MOMENTS:
                    state["step"] = torch.tensor(
                        float(step), dtype=torch.float32, device=master.device
                    )
                self._inner.state[master] = state

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
