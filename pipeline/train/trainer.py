"""DeepSpeed, the one way to train: the same engine on a CPU core and on a fleet of GPUs.

Started by a launcher (`deepspeed`, `torchrun`), it joins that group; started as it is, it makes a
group of one. Compute runs in `train.dtype`; with bfloat16 DeepSpeed keeps fp32 masters of the
weights. AdamW is torch's own, so no compiler is needed.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeline.config import TrainSection
from pipeline.errors import DataError, MissingPackage
from pipeline.target.arithmetic import resolve_dtype
from pipeline.train.data.batches import TrainBatch
from pipeline.train.ttt.model import StepResult, TttModel

Value = TypeVar("Value")


def rank() -> int:
    """Number of this process among those that the launcher started; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_zero_first(action: Callable[[], Value], device: torch.device) -> Value:
    """Do `action` on the first process and, when it is done there, on all others.

    Joins the launcher's group for it; a process without a launcher just does it.
    """
    if world() == 1:
        return action()
    _join_group(_deepspeed(), device)
    if rank() > 0:
        torch.distributed.barrier()
    done = action()
    if rank() == 0:
        torch.distributed.barrier()
    return done


class Trainer:
    """A model in training: forward, backward and optimiser step through DeepSpeed."""

    def __init__(
        self, model: TttModel, section: TrainSection, device: torch.device, *, fc_scale: float = 1.0
    ) -> None:
        """Join or make the process group and hand the model over.

        Parameters that require no gradient stay as they are.

        fc_scale multiplies the learning rate of `fc`. Raises MissingPackage without deepspeed.
        """
        self._deepspeed = deepspeed = _deepspeed()
        _join_group(deepspeed, device)
        self.model = model
        self._sharded_weights = section.zero_stage == 3
        self.device = torch.device("cuda", _local_rank()) if device.type == "cuda" else device
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
        with _quiet():
            self._engine, self._optimizer, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=_settings(section, self.dtype)
            )

    def step(
        self, batches: Iterable[TrainBatch], rate: float
    ) -> Iterator[tuple[TrainBatch, StepResult]]:
        """One optimiser step over `train.accumulate` micro-batches, at learning rate `rate`.

        Raises DataError with the sample ids when a loss or a gradient is not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        for batch in batches:
            with _quiet() if self._sharded_weights else nullcontext():  # it gathers weights
                result: StepResult = self._engine(batch.to(self.device, self.dtype))
            if not bool(torch.isfinite(result.loss)):
                raise _not_finite("loss", float(result.loss.detach()), batch)
            skipped = self._engine.skipped_steps
            with _quiet():
                self._engine.backward(result.loss)
                self._engine.step()
            if self._engine.skipped_steps != skipped:
                raise _not_finite("gradient norm", float("nan"), batch)
            yield batch, StepResult(result.loss.detach(), result.hits, result.labels)

    def weights(self) -> dict[str, Tensor]:
        """The head's tensors, whole and on the CPU, by name; every process takes part."""
        with _quiet(), self._whole():
            return {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in self.model.head.state_dict().items()
            }

    def broadcast(self, value: Value) -> Value:
        """What the first process passes, on all of them."""
        if self.world == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum of `values` over all processes."""
        if self.world == 1:
            return values
        values = values.to(self.device)
        torch.distributed.all_reduce(values)
        return values.cpu()

    def save(self, directory: Path) -> None:
        """Write weights, masters and optimiser state; every process takes part."""
        with _quiet():
            parent, tag = str(directory.parent), directory.name
            self._engine.save_checkpoint(parent, tag=tag, save_latest=False)

    def load(self, directory: Path) -> None:
        """Take all of `save`'s state back."""
        with _quiet():
            path, _ = self._engine.load_checkpoint(str(directory.parent), tag=directory.name)
        assert path is not None, "a marked checkpoint is complete"

    def barrier(self) -> None:
        """Wait for every process."""
        if self.world > 1:
            torch.distributed.barrier()

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


def _deepspeed() -> Any:
    """The package, told which accelerator to use and to keep its log to errors."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with _quiet(), _silent_descriptors():
            import deepspeed  # type: ignore[import-untyped]
            from deepspeed.ops.op_builder import cpu  # type: ignore[import-untyped]
    except ImportError as error:
        problem, fix = f"training needs deepspeed: {error}", "pip install 'eagle3[train]'"
        raise MissingPackage(problem, where="train", fix=fix) from error
    # Its shared-memory collective is compiled with g++ when the group is made, on a machine that
    # may have none; gloo is enough.
    deepspeed.ops.__compatible_ops__[cpu.ShareMemCommBuilder.NAME] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _join_group(deepspeed: Any, device: torch.device) -> None:
    """The launcher's group when there is one.

    Else a group of one, kept in memory: it opens no port.
    """
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(_local_rank())
    if "RANK" not in os.environ and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    if not deepspeed.comm.is_initialized():
        with _quiet():
            deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


@contextmanager
def _silent_descriptors() -> Iterator[None]:
    """Nothing reaches the terminal: DeepSpeed's import tries the compiler, which complains."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of DeepSpeed and of what it imports: they are about its own use of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
