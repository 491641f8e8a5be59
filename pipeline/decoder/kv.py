"""Paged key/value memory: one pool of pages, one allocator, shared by the target and the drafter.

    row 0   block table [3 5]    page 3  p p p p p p p p │ page 5  p p n n n n . .
    row 1   block table [2 0]    page 2  p p p n n n n . │ page 0  nobody's: inert rows write here

    p: committed   n: nodes of the tree being verified (or beams being drafted)   .: never read

A page id names the same page in every plane: all layers of the target and those of the drafter.
Nodes that were not accepted need no freeing: the next tree is written over them. What a drafter
keeps beside, of a size that does not grow with the text, lies in a second pool of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline.decoder.ops.layer import PAGE
from pipeline.errors import ConfigError

#: Of the memory that is free, how much a pool may take. A host is not ours alone. On a device, what
#: rounds and prompts take is counted before; the rest is for another engine, and for gaps that the
#: allocator leaves.
_DEVICE_SHARE, _HOST_SHARE = 0.8, 0.5
#: Devices whose rounds are captured as graphs; tests add the one that has no data.
GPU_TYPES = {"cuda"}


@dataclass(frozen=True)
class PlaneShape:
    """Keys and values of some layers, on every page of a pool."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return 2 * self.layers * self.kv_heads * PAGE * self.head_dim * self.dtype.itemsize


class DrafterMemory(Protocol):
    """The key/value memory that a drafter asks the engine for."""

    planes: tuple[PlaneShape, ...]  # on the pool's pages, in Planes.drafter
    drafter_kv: tuple[PlaneShape, ...]  # on the drafter's private pages, in Planes.drafter_kv
    drafter_pages: int  # private pages of each row


@dataclass(frozen=True)
class Planes:
    """The key/value memory of an engine. Each plane is [layers, 2, pages, G, PAGE, d]."""

    target: Tensor
    drafter: tuple[Tensor, ...] = ()
    drafter_kv: tuple[Tensor, ...] = ()  # the drafter's, on the pages of its own pool


class PageAllocator:
    """Which of `pages` pages are free. Page 0 is never handed out."""

    def __init__(self, pages: int, *, device: torch.device) -> None:
        self.pages, self.device = pages, device
        self.most_used = 0  # pages at a time
        # Popped from the end, lowest first, so that memory in use stays together.
        self._free = list(range(pages - 1, 0, -1))

    def planes(self, shapes: Sequence[PlaneShape]) -> tuple[Tensor, ...]:
        """Zeroed memory on all pages."""
        return tuple(map(self._plane, shapes))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out at all."""
        return self.pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None when fewer are free."""
        if count > len(self._free):
            return None
        allocated = [self._free.pop() for _ in range(count)]
        self.most_used = max(self.most_used, self.capacity - len(self._free))
        return allocated

    def free(self, pages: list[int]) -> None:
        """Return pages; their content stays, and readers never look at what they did not write."""
        self._free.extend(reversed(pages))

    def _plane(self, shape: PlaneShape) -> Tensor:
        size = shape.layers, 2, self.pages, shape.kv_heads, PAGE, shape.head_dim
        return torch.zeros(size, dtype=shape.dtype, device=self.device)


class Pools:
    """An engine's pages and their memory: the shared pool, and the drafter's private one."""

    def __init__(
        self,
        target_shape: PlaneShape,
        drafter: DrafterMemory | None,
        *,
        pages: int,
        rows: int,
        device: torch.device,
    ) -> None:
        """`pages` in the shared pool, and room for `rows` requests in the drafter's."""
        self.shared = PageAllocator(pages, device=device)
        private = drafter.drafter_pages if drafter else 0
        self.drafter_pages = PageAllocator(1 + rows * private, device=device)
        (target,) = self.shared.planes((target_shape,))
        self.planes = Planes(target)
        if drafter is not None:
            drafted = (
                self.shared.planes(drafter.planes),
                self.drafter_pages.planes(drafter.drafter_kv),
            )
            self.planes = Planes(target, *drafted)
        shapes = target_shape, *(drafter.planes if drafter else ())
        self._page_bytes = sum(shape.page_bytes for shape in shapes)
        self._drafter_page_bytes = (
            sum(each.page_bytes for each in drafter.drafter_kv) if drafter else 0
        )

    @property
    def most_used_bytes(self) -> int:
        """Keys and values of the pages that were in use at the fullest moment, in all planes."""
        private = self.drafter_pages.most_used * self._drafter_page_bytes
        return self.shared.most_used * self._page_bytes + private


def on_gpu(device: torch.device) -> bool:
    """Whether rounds are captured there, tokens leave through pinned memory, memory is planned."""
    return device.type in GPU_TYPES


def pages_for(entries: int) -> int:
    """Pages that hold `entries` cache entries."""
    return -(-entries // PAGE)


def pages_that_fit(
    shapes: Sequence[PlaneShape], device: torch.device, *, least: int, most: int, reserved: int = 0
) -> int:
    """Pages of a pool: `most`, or as many as a share of the free memory holds, after the bytes that
    are `reserved`.

    Raises ConfigError when that is fewer than `least`, which one request of full length takes.
    """
    page, free = sum(shape.page_bytes for shape in shapes), free_bytes(device)
    if free is None:
        return most
    share = _DEVICE_SHARE if on_gpu(device) else _HOST_SHARE
    room = max(free - reserved, 0) * share
    pages = min(most, int(room) // page)
    if pages < least:
        beside = f" beside {_gib(reserved)} GiB for rounds and prompts" if reserved else ""
        raise ConfigError(
            f"the keys and values of one request of full length take {_gib(least * page)} GiB, "
            f"and {share:.0%} of what is free{beside} are {_gib(room)} GiB",
            where=f"key/value memory on {device}",
            fix="allow shorter prompts or replies (max_length), fewer slots, or free memory",
        )
    return pages


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on a device; None where nobody says."""
    if on_gpu(device):
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = (_free_of_host(), _free_of_container(Path("/sys/fs/cgroup")))
    return min((limit for limit in limits if limit is not None), default=None)


def _free_of_host() -> int | None:
    about = Path("/proc/meminfo")
    if about.exists():
        lines = dict(line.split(":", 1) for line in about.read_text().splitlines())
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_of_container(group: Path) -> int | None:
    """What a control group (version 2) leaves; its file cache can be had back."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        return None


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
