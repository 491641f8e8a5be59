"""Replies on GPUs: how many hold a copy of the target, and how long it generates."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.planning.devices import BANDWIDTH_SHARE, FORWARD_SHARE, Device
from pipeline.planning.targets import TargetShape

#: Degrees of tensor parallelism that are tried: up to the eight GPUs of a node.
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Replicas:
    """Copies of the target over the workers."""

    count: int
    degree: int  # GPUs of each
    slots: int  # requests of each, side by side
    memory: dict[str, int]  # of one GPU, by what it holds

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())


def generating_replicas(
    target: TargetShape,
    device: Device,
    workers: int,
    *,
    concurrency: int | None,  # requests over all copies
    slots: int,  # of each copy, where there is no concurrency
    longest: int,  # tokens of a conversation
    width: int,  # bytes of a weight
    degrees: tuple[int, ...] = DEGREES,
) -> Replicas:
    """With the smallest degree that fits; the largest, if none does."""
    replicas = Replicas(0, 0, 0, {})
    for degree in degrees:
        count = max(1, workers // degree)
        each = -(-concurrency // count) if concurrency else slots
        memory = {
            "weights": target.parameters * width // degree,
            "keys and values": each * longest * target.key_value_bytes // degree,
        }
        replicas = Replicas(count, degree, each, memory)
        if device.holds(replicas.bytes):
            break
    return replicas


def generation_seconds(
    target: TargetShape,
    device: Device,
    replicas: Replicas,
    *,
    read: float,  # tokens of all prompts
    generated: float,  # tokens of all replies
    context: float,  # tokens that a generated one attends to, on average
    width: int,
    dtype: str,
) -> float:
    """Prompts are bound by arithmetic; a step of all slots by arithmetic or by memory."""
    flops = device.flops(dtype) * FORWARD_SHARE * replicas.degree
    bandwidth = device.bandwidth * BANDWIDTH_SHARE * replicas.degree
    prompts = 2.0 * target.active_parameters * read / flops
    each = 2.0 * target.active_parameters + target.attention_flops(context)
    operations = replicas.slots * each
    traffic = target.parameters * width + replicas.slots * context * target.key_value_bytes
    steps = generated / replicas.slots
    return (prompts + steps * max(operations / flops, traffic / bandwidth)) / replicas.count
