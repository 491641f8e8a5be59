"""A block drafter of another trainer, in the layout of DFlashDraftModel, read and checked.

    config.json        fields of Qwen3, block_size, dflash_config: mask_token_id, target_layer_ids
    *.safetensors      fc, hidden_norm, layers.*, norm; where there is a draft vocabulary d2t, t2d,
                       lm_head

The authors' own checkpoints have neither a draft vocabulary nor an lm_head: the target's rows give
the logits, of all of its tokens. Of a part of them, rows that are missing are the target's, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipeline.eagle3.checkpoint import BLOCK_DRAFTER, CONFIG
from pipeline.eagle3.dflash.checkpoint import check_numbers
from pipeline.eagle3.dflash.head import DflashHead, DflashShape
from pipeline.eagle3.formats.fields import (
    layer_ids,
    refuse_unsupported,
    rope_parameters,
    validated,
)
from pipeline.eagle3.formats.foreign import ForeignHead, fill_head, load_tensors, read_json
from pipeline.errors import HeadError

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
#: Fields of a Qwen3 configuration that this drafter carries as they are.
_COPIED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "num_hidden_layers"),
)
#: Fields that could change the maths of a layer.
_OF_THE_LAYER = ("hidden_act", "attention_bias", "mlp_bias", "target_hidden_size", "hidden_size")


def is_block_drafter(directory: Path) -> bool:
    """Whether a directory's config.json is of a block drafter. Raises HeadError."""
    return BLOCK_DRAFTER in (read_json(directory / CONFIG).get("architectures") or ())


def read_foreign_blocks(directory: Path) -> ForeignHead:
    """Read a block drafter's directory. Raises HeadError with file, field and fix.

    The rows of an lm_head that it lacks are for the caller to fill (`lacks_rows`).
    """
    body, where = read_json(directory / CONFIG), f"{directory}/{CONFIG}"
    tensors = {name.removeprefix("model."): each for name, each in load_tensors(directory).items()}
    embedding = tensors.pop(_EMBEDDING, None)
    shape, layers = _read_config(body, where, has_rows=_LM_HEAD in tensors)
    lacks_rows = not shape.target_lm_head and _LM_HEAD not in tensors
    if lacks_rows:
        tensors[_LM_HEAD] = torch.zeros(shape.draft_vocab_size, shape.hidden_size)
    head = DflashHead(shape)
    fill_head(head, tensors, where=str(directory))
    return ForeignHead("dflash", layers, head, embedding, lacks_rows)


def _read_config(
    body: dict[str, Any], where: str, *, has_rows: bool
) -> tuple[DflashShape, tuple[int, int, int]]:
    """Shape and aux layers, which are output indices. Raises HeadError."""
    refuse_unsupported({name: body.get(name) for name in _OF_THE_LAYER}, where)
    sliding = set(body.get("layer_types") or ()) - {"full_attention"}
    if sliding:
        problem = f"layer_types has {', '.join(sorted(map(str, sliding)))}"
        fix = "import a drafter whose layers attend to everything"
        raise HeadError(f"{problem}: every layer here has full attention", where=where, fix=fix)
    own = body.get("dflash_config")
    settings = own if isinstance(own, dict) else {}
    fields = {name: body[name] for name in _COPIED if body.get(name) is not None}
    for name in ("block_size", "mask_token_id"):
        value = settings.get(name, body.get(name))
        fields |= {} if value is None else {name: value}
    fields["rope_parameters"] = rope_parameters(body, where)
    fields["draft_vocab_size"] = body.get("draft_vocab_size") or fields.get("vocab_size")
    whole = fields["draft_vocab_size"] == fields.get("vocab_size")
    fields["target_lm_head"] = whole and not has_rows
    shape = validated(DflashShape, fields, where)
    check_numbers(shape, where)
    ids = settings.get("target_layer_ids") or body.get("target_layer_ids")
    layers = layer_ids(ids, where, "target_layer_ids", offset=0)
    if layers is None:
        fix = "write the output indices of the three layers that fc reads"
        raise HeadError("lacks dflash_config.target_layer_ids", where=where, fix=fix)
    return shape, layers
