"""Head directories of every kind: read, written and made as their architecture or shape says.

LlamaForCausalLMEagle3   one EAGLE-3 head      checkpoint.py
ChainedDraftModel        a head for each step  chained/
DFlashDraftModel         a block drafter       dflash/
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.checkpoint import (
    BLOCK_DRAFTER,
    CHAINED,
    CONFIG,
    HEAD_FILES,
    HeadCard,
    check_card,
    open_files,
    write_files,
)
from pipeline.heads.dflash.checkpoint import dflash_config, read_dflash_config
from pipeline.heads.dflash.shape import DflashHead, DflashShape
from pipeline.heads.eagle3.checkpoint import load_head, save_head
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.known import architectures_of
from pipeline.heads.mtp.checkpoint import chained_config, read_chained_config
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape
from pipeline.heads.tensors import fill_head, read_json, read_tensors
from pipeline.records import TargetContract
from pipeline.store.location import Location, as_directory


def open_head(
    location: Location | str, *, expected: TargetContract | None = None
) -> tuple[DraftingHead, HeadCard]:
    """Read the head at a directory or URI, of any kind, in float32: the one way to a head of ours.

    Every field of its config.json is honoured or refused, every tensor is checked. Raises HeadError
    with file, field and fix, or ContractMismatch when it is for another target than `expected`.
    """
    with head_directory(location) as directory:
        return load_any_head(directory, expected=expected)


@contextmanager
def head_directory(location: Location | str) -> Iterator[Path]:
    """A head's files as a local directory, for the time of the block."""
    place = Location(location) if isinstance(location, str) else location
    with as_directory(place, HEAD_FILES) as directory:
        yield directory


def load_any_head(
    directory: Path, *, expected: TargetContract | None = None
) -> tuple[DraftingHead, HeadCard]:
    """`open_head` of a local directory."""
    path, where = directory / CONFIG, f"head {directory}: {CONFIG}"
    card = open_files(directory, expected)
    body = read_json(path)
    architectures = architectures_of(body, where)
    head: DraftingHead
    if BLOCK_DRAFTER in architectures:
        tensors = read_tensors(directory)
        block, layers = read_dflash_config(body, where, has_rows="lm_head.weight" in tensors)
        check_card(card, block, layers, where)
        head = fill_head(DflashHead, block, tensors, where=f"head {directory}")
    elif CHAINED in architectures:
        chain, layers = read_chained_config(body, where)
        check_card(card, chain, layers, where)
        tensors = read_tensors(directory)
        head = fill_head(ChainedHead, chain, tensors, where=f"head {directory}")
    else:
        return load_head(directory, expected=expected)
    return head, card


def save_any_head(directory: Path, head: DraftingHead, card: HeadCard) -> None:
    """Write a head of any kind atomically, weights in bfloat16; an existing one is replaced."""
    if isinstance(head, Eagle3Head):
        save_head(directory, head, card)
        return
    if isinstance(head, DflashHead):
        config = dflash_config(head.shape, card.contract)
    else:
        assert isinstance(head, ChainedHead)
        config = chained_config(head.shape, card.contract)
    write_files(directory, config, head.state_dict(), card)


def empty_head(shape: DraftShape) -> DraftingHead:
    """A head of the kind that a shape is of, not started."""
    if isinstance(shape, DflashShape):
        return DflashHead(shape)
    if isinstance(shape, ChainedShape):
        return ChainedHead(shape)
    assert isinstance(shape, HeadShape)
    return Eagle3Head(shape)
