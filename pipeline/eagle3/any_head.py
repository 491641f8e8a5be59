"""Head directories of every kind: read, written and made as their architecture or shape says.

LlamaForCausalLMEagle3   one EAGLE-3 head      checkpoint.py
ChainedDraftModel        a head for each step  chained/
DFlashDraftModel         a block drafter       dflash/
"""

from __future__ import annotations

from pathlib import Path

from pipeline.eagle3.chained.checkpoint import chained_config, read_chained_shape
from pipeline.eagle3.chained.head import ChainedHead, ChainedShape
from pipeline.eagle3.checkpoint import (
    BLOCK_DRAFTER,
    CHAINED,
    CONFIG,
    HeadCard,
    open_files,
    read_shape,
    read_weights,
    save_head,
    write_files,
)
from pipeline.eagle3.dflash.checkpoint import dflash_config, read_dflash_shape
from pipeline.eagle3.dflash.head import DflashHead, DflashShape
from pipeline.eagle3.formats.foreign import read_json
from pipeline.eagle3.head import DraftingHead, DraftShape, Eagle3Head, HeadShape
from pipeline.records import TargetContract


def load_any_head(
    directory: Path, *, expected: TargetContract | None = None
) -> tuple[DraftingHead, HeadCard]:
    """Read a head directory of any kind, as its architecture says, in float32.

    Raises HeadError, or ContractMismatch when it is for another target than `expected`.
    """
    card = open_files(directory, expected)
    head = empty_head(read_any_shape(directory))
    read_weights(directory, head)
    return head.float(), card


def read_any_shape(directory: Path) -> DraftShape:
    """The shape in a head directory's config.json, as its architecture says. Raises HeadError."""
    architectures = read_json(directory / CONFIG).get("architectures") or ()
    if BLOCK_DRAFTER in architectures:
        return read_dflash_shape(directory)
    if CHAINED in architectures:
        return read_chained_shape(directory)
    return read_shape(directory)


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
