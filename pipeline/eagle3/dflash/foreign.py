"""A block drafter of another trainer, in the layout of DFlashDraftModel, read and checked.

    config.json        fields of Qwen3, block_size, dflash_config: mask_token_id, target_layer_ids
    *.safetensors      fc, hidden_norm, layers.*, norm; where there is a draft vocabulary d2t, t2d,
                       lm_head

The authors' own checkpoints have neither a draft vocabulary nor an lm_head: the target's rows give
the logits, of all of its tokens. Of a part of them, rows that are missing are the target's, too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.eagle3.checkpoint import BLOCK_DRAFTER, CONFIG
from pipeline.eagle3.dflash.checkpoint import read_dflash_config
from pipeline.eagle3.dflash.head import DflashHead
from pipeline.eagle3.formats.foreign import ForeignHead
from pipeline.eagle3.formats.known import architectures_of
from pipeline.eagle3.formats.tensors import fill_head, read_json, read_tensors
from pipeline.errors import HeadError

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def is_block_drafter(directory: Path) -> bool:
    """Whether a directory's config.json is of a block drafter. Raises HeadError."""
    path = directory / CONFIG
    return BLOCK_DRAFTER in architectures_of(read_json(path), str(path))


def read_foreign_blocks(directory: Path) -> ForeignHead:
    """Read a block drafter's directory. Raises HeadError with file, field and fix.

    The rows of an lm_head that it lacks are for the caller to fill (`lacks_rows`).
    """
    body, where = read_json(directory / CONFIG), f"{directory}/{CONFIG}"
    tensors = {name.removeprefix("model."): each for name, each in read_tensors(directory).items()}
    embedding = tensors.pop(_EMBEDDING, None)
    shape, layers = read_dflash_config(body, where, has_rows=_LM_HEAD in tensors)
    if layers is None:
        fix = "write the output indices of the three layers that fc reads"
        raise HeadError("lacks dflash_config.target_layer_ids", where=where, fix=fix)
    lacks_rows = not shape.target_lm_head and _LM_HEAD not in tensors
    if lacks_rows:
        tensors[_LM_HEAD] = torch.zeros(shape.draft_vocab_size, shape.hidden_size)
    head = fill_head(DflashHead, shape, tensors, where=str(directory))
    return ForeignHead("dflash", layers, head, embedding, lacks_rows)
