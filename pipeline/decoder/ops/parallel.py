"""One model over the processes of a group (Megatron-LM, arXiv:1909.08053, §3).

Each process holds a slice of every layer, computes its own heads and its own part of the MLP, and
keeps the keys and values of those heads alone; what attention and the MLP add is summed over all:

    rank 0   hidden ─ q0 q1 · k0 ─ attention ─ output ─┐     ┌─ half of gate, up ─ down ─┐
                                                       Σ ────┤                           Σ ─ hidden
    rank 1   hidden ─ q2 q3 · k1 ─ attention ─ output ─┘     └─ the other half ──── down ─┘

    qkv, gate_up     the rows of a rank       (a key/value head that several ranks ask is on each)
    output, down     the columns of a rank
    lm_head          the rows of a rank; logits are gathered whole

The embedding and all norms are on every rank, and so is all that is no product: every rank drafts,
verifies and schedules alike, on equal numbers. What rank 0 has decided is sent to the others all
the same (`agree`): a rank that erred in a bit would verify another tree.

Shapes: Q query heads, G key/value heads, d head size, I inner size of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from pipeline.errors import UnsupportedModel
from pipeline.target.parallel import Group

#: torch 2.13 has renamed it.
_all_gather: Callable[[Tensor, Tensor], Any] = getattr(
    distributed, "all_gather_single", distributed.all_gather_into_tensor
)


@dataclass(frozen=True)
class TensorGroup:
    """The processes of torch's default group, and what they send each other.

    Every rank makes the same calls in the same order. On GPUs they are captured with a round.
    """

    rank: int
    size: int

    @classmethod
    def of(cls, processes: Group) -> TensorGroup | None:
        """None where there is one process."""
        return None if processes.size == 1 else cls(processes.rank, processes.size)

    def sum(self, part: Tensor) -> Tensor:
        """Over all ranks, which may be written over `part`.

        On CPUs it is added in the order of ranks: what a token gives does not depend on its batch.
        """
        if part.device.type != "cpu":
            distributed.all_reduce(part)
            return part
        parts = self._parts(part)
        total = parts[0].to(torch.promote_types(part.dtype, torch.float32))
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def gather(self, part: Tensor) -> Tensor:
        """Columns [T, n] of each rank → [T, size · n], in the order of ranks."""
        return self._parts(part).movedim(0, 1).flatten(1)

    def agree(self, decided: Tensor) -> Tensor:
        """Rank 0's on every rank, written over `decided`."""
        distributed.broadcast(decided, 0)
        return decided

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of all ranks."""
        return int(self._parts(torch.tensor([value], device=device)).min())

    def _parts(self, part: Tensor) -> Tensor:
        """[size, ..]: of each rank. Bytes are sent: every backend knows them."""
        parts = part.new_empty(self.size, *part.shape)
        sent = part.contiguous().view(torch.uint8)
        _all_gather(parts.view(torch.uint8).flatten(0, 1), sent)
        return parts


class VocabularySlice(NamedTuple):
    """The rows of an lm_head that a rank has."""

    rows: Any  # packed [ceil(V / size), H], of the last ranks filled up with zeros
    vocabulary: int  # V
    group: TensorGroup


def vocabulary_rows(weight: Tensor, group: TensorGroup) -> Tensor:
    """Of lm_head [V, H] those of `VocabularySlice`."""
    count = -(-len(weight) // group.size)
    own = weight[group.rank * count : (group.rank + 1) * count]
    return torch.cat((own, own.new_zeros(count - len(own), weight.shape[1])))


class LayerSizes(NamedTuple):
    """Of a decoder layer."""

    queries: int  # Q
    groups: int  # G
    head_dim: int  # d
    inner: int  # I

    def divides(self, ranks: int) -> bool:
        """Whether as many ranks can have equal slices."""
        whole = self.queries % ranks == self.inner % ranks == 0
        return whole and (self.groups % ranks == 0 or ranks % self.groups == 0)


@dataclass(frozen=True)
class LayerDivision:
    """A layer of some sizes among the ranks of a group; without one it is whole."""

    sizes: LayerSizes
    group: TensorGroup | None

    @property
    def part(self) -> LayerSizes:
        """Sizes of a rank's slice."""
        if self.group is None:
            return self.sizes
        ranks, (queries, groups, head_dim, inner) = self.group.size, self.sizes
        return LayerSizes(queries // ranks, max(groups // ranks, 1), head_dim, inner // ranks)

    def check(self, *, where: str) -> None:
        """Raise UnsupportedModel where ranks would have unequal slices."""
        if self.group is None or self.sizes.divides(self.group.size):
            return
        queries, groups, _, inner = self.sizes
        ranks = [str(each) for each in range(1, queries + 1) if self.sizes.divides(each)]
        problem = f"{queries} query heads, {groups} key/value heads and {inner} columns of the MLP"
        raise UnsupportedModel(
            f"{problem} cannot be divided among {self.group.size} processes",
            where=where,
            fix=f"start as many as divide them: {', '.join(ranks)}",
        )

    def slice(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A rank's part of a layer's tensors, which have their Hugging Face names."""
        sliced = dict(layer)
        if self.group is None:
            return sliced
        part, rank, size = self.part, self.group.rank, self.sizes.head_dim
        first = rank * self.sizes.groups // self.group.size  # key/value head
        heads = {"q": _columns(rank * part.queries * size, part.queries * size)}
        heads |= dict.fromkeys("kv", _columns(first * size, part.groups * size))
        inner = _columns(rank * part.inner, part.inner)
        rows = {f"self_attn.{name}_proj": each for name, each in heads.items()}
        rows |= {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        columns = {"self_attn.o_proj": heads["q"], "mlp.down_proj": inner}
        for name, held in layer.items():
            module, _, kind = name.rpartition(".")
            if module in rows:
                sliced[name] = held[rows[module]]
            elif module in columns and kind == "weight":
                sliced[name] = held[:, columns[module]]
            elif module in columns and rank:  # a bias, which is added once
                del sliced[name]
            elif module == "self_attn.qkv_proj":  # Phi-3
                sizes = [each * size for each in (self.sizes.queries, *[self.sizes.groups] * 2)]
                parts = zip(torch.split(held, sizes), heads.values(), strict=True)
                sliced[name] = torch.cat([each[own] for each, own in parts])
            elif module == "mlp.gate_up_proj":
                sliced[name] = torch.cat([each[inner] for each in held.chunk(2)])
        return sliced


def _columns(first: int, count: int) -> slice:
    return slice(first, first + count)
