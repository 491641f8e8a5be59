"""DeepSpeed, the one way to train: the same engine on a CPU core and on a fleet of GPUs.

Started by a launcher (`deepspeed`, `torchrun`), it joins that group; started as it is, it makes a
group of one. Compute runs in `train.dtype`; with bfloat16 DeepSpeed keeps fp32 masters of the
weights. AdamW is torch's own, so no compiler is needed.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config import TrainSection, local_rank
from pipeline.errors import CorruptShard, DataError
from pipeline.target.arithmetic import resolve_dtype
from pipeline.train.data.batches import TrainBatch
from pipeline.train.group import first_decides, join_group, quiet, take_from_first
from pipeline.train.optimizer_state import MOMENTS, OptimizerState, set_weight, whole_shape
from pipeline.train.ttt.model import StepResult, TttModel


class TrainingState(NamedTuple):
    """All that an optimiser step changes, whole and on the CPU, for any number of processes."""

    weights: Mapping[str, Tensor]  # of the head: fp32 masters of what is trained, the rest as it is
    moments: Mapping[str, Tensor]  # "exp_avg/<name>" and "exp_avg_sq/<name>" of what is trained
    step: int  # as AdamW counts


class Trainer:
    """A model in training: forward, backward and optimiser step through DeepSpeed."""

    def __init__(
        self, model: TttModel, section: TrainSection, device: torch.device, *, fc_scale: float = 1.0
    ) -> None:
        """Join or make the process group and hand the model over.

        Parameters that require no gradient stay as they are.

        fc_scale multiplies the learning rate of `fc`. Raises MissingPackage without deepspeed.
        """
        self._deepspeed = deepspeed = join_group(device, minutes=section.timeout_minutes)
        self.model = model
        self._sharded_weights = section.zero_stage == 3
        self.device = torch.device("cuda", local_rank()) if device.type == "cuda" else device
        self.dtype = resolve_dtype(section.dtype, device)
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        model.to(self.device)
        optimizer = torch.optim.AdamW(
            _groups(model, fc_scale),
            lr=section.learning_rate,
            betas=section.betas,
            weight_decay=section.weight_decay,
            fused=True,
        )
        with quiet():
            self._engine, self._optimizer, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=_settings(section, self.dtype)
            )
        self._state = OptimizerState(self._optimizer, section.zero_stage)

    def step(
        self, batches: Iterable[TrainBatch], rate: float
    ) -> Iterator[tuple[TrainBatch, StepResult]]:
        """One optimiser step over `train.accumulate` micro-batches, at learning rate `rate`.

        Raises DataError with the sample ids when a loss or a gradient is not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        for batch in batches:
            with quiet() if self._sharded_weights else nullcontext():  # it gathers weights
                result: StepResult = self._engine(batch.to(self.device, self.dtype))
            if not bool(torch.isfinite(result.loss)):
                raise _not_finite("loss", float(result.loss.detach()), batch)
            skipped = self._engine.skipped_steps
            with quiet():
                self._engine.backward(result.loss)
                self._engine.step()
            if self._engine.skipped_steps != skipped:
                raise _not_finite("gradient norm", float("nan"), batch)
            yield batch, StepResult(result.loss.detach(), result.hits, result.labels)

    def weights(self) -> dict[str, Tensor]:
        """The head's tensors, whole and on the CPU, by name; every process takes part."""
        with quiet(), self._whole():
            return {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in self.model.head.state_dict().items()
            }

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum of `values` over all processes."""
        if self.world == 1:
            return values
        values = values.to(self.device)
        torch.distributed.all_reduce(values)
        return values.cpu()

    def state(self) -> TrainingState | None:
        """What `restore` takes, on the first process; None on the others, which take part."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._trained().items():
            for kind in ("master", *MOMENTS):
                whole = self._state.whole(parameter, kind)
                if self.rank == 0:
                    tensors[f"{kind}/{name}"] = whole.to("cpu", copy=True)
        weights = self.weights()
        if self.rank > 0:
            return None
        masters = {name: tensors.pop(f"master/{name}") for name in self._trained()}
        return TrainingState(weights | masters, tensors, self._state.step)

    def restore(self, read: Callable[[], TrainingState], *, where: str) -> None:
        """Take back what `state` gave, which the first process reads and sends the others.

        Raises CorruptShard, naming `where`, for the state of another head, and what `read` raises.
        """
        states: list[TrainingState] = []

        def read_checked() -> int:
            states.append(read())
            self._check(states[0], where)
            return states[0].step

        self._state.begin(first_decides(read_checked))
        state = states[0] if states else None
        trained, buffers = self._trained(), dict(self.model.head.named_buffers())
        for name, tensor in self.model.head.state_dict(keep_vars=True).items():
            if name in buffers:
                continue  # they follow from the vocabulary, and are the same
            whole = self._received(state and state.weights[name], tensor, trained=name in trained)
            set_weight(tensor, whole)
            if name in trained:
                self._state.put(trained[name], "master", whole)
                for kind in MOMENTS:
                    moment = state and state.moments[f"{kind}/{name}"]
                    self._state.put(trained[name], kind, self._received(moment, tensor))

    def _check(self, state: TrainingState, where: str) -> None:
        """Raise CorruptShard unless the state is of this head."""
        head, tensors = self.model.head, self.model.head.state_dict(keep_vars=True)
        shapes = {name: whole_shape(tensor) for name, tensor in tensors.items()}
        moments = {f"{kind}/{name}": shapes[name] for name in self._trained() for kind in MOMENTS}
        same = _shapes(state.weights) == shapes and _shapes(state.moments) == moments
        if not same or any(
            not torch.equal(state.weights[name], buffer.cpu())
            for name, buffer in head.named_buffers()
        ):
            problem = "the checkpoint is of a head with other tensors or another vocabulary"
            raise CorruptShard(problem, where=where, fix="run `eagle3 train --force`")

    def _received(self, sent: Tensor | None, like: Tensor, *, trained: bool = True) -> Tensor:
        """The first process's tensor on all, on the device; float32 for what is trained."""
        dtype = torch.float32 if trained else like.dtype
        if sent is None:
            received = torch.empty(whole_shape(like), dtype=dtype, device=self.device)
        else:
            received = sent.to(self.device, dtype)
        take_from_first(received, self.device)
        return received

    def _trained(self) -> dict[str, nn.Parameter]:
        parameters = self.model.head.named_parameters()
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}

    def peak_memory(self) -> float:
        """Most memory that this process has held, in GB: of the GPU, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    def _whole(self) -> AbstractContextManager[Any]:
        """While it is open, parameters that ZeRO 3 has split are there in full."""
        if not self._sharded_weights:
            return nullcontext()
        parameters = list(self.model.head.parameters())
        gathered: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(parameters)
        return gathered


def _groups(model: TttModel, fc_scale: float) -> list[dict[str, Any]]:
    """What is trained, in groups of one learning rate each."""
    fc = model.head.fc.weight
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    others = [parameter for parameter in trained if parameter is not fc]
    return [{"params": others, "scale": 1.0}, {"params": [fc], "scale": fc_scale}]


def _settings(section: TrainSection, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # a micro-batch is one packed row of tokens
        "gradient_accumulation_steps": section.accumulate,
        "gradient_clipping": section.clip_norm,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": section.zero_stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,  # torch's AdamW with ZeRO
        "steps_per_print": 1 << 40,
    }


def _not_finite(what: str, value: float, batch: TrainBatch) -> DataError:
    samples = ", ".join(batch.sample_ids[:8]) + (" …" if len(batch.sample_ids) > 8 else "")
    lower = "lower train.learning_rate or train.clip_norm"
    fix = f"look at these samples' states; if they are sound, {lower}"
    return DataError(f"the {what} is {value}", where=f"batch of samples {samples}", fix=fix)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
