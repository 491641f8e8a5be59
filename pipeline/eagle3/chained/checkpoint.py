"""Chained heads on disk.

    config.json        ChainedDraftModel: the layer as a Llama configuration, K, what head 0 reads
    model.safetensors  mtp_layers.0 … K-1; fc or target_norm; lm_head, d2t, t2d; no embedding
    eagle3.json        contract, provenance and metrics, as of every head

No server reads this directory; `mtp.py` writes what one reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.eagle3.chained.head import ChainedShape
from pipeline.eagle3.checkpoint import CHAINED, CONFIG
from pipeline.eagle3.formats.fields import layer_config, validated
from pipeline.eagle3.formats.foreign import read_json
from pipeline.errors import HeadError
from pipeline.records import CAPTURE_CONVENTION, TargetContract


def chained_config(shape: ChainedShape, contract: TargetContract) -> dict[str, Any]:
    """config.json of a head directory."""
    return {
        "architectures": [CHAINED],
        **layer_config(shape),
        "draft_vocab_size": shape.draft_vocab_size,
        "heads": shape.heads,
        "chain_input": shape.chain_input,
        "attention_bias": shape.attention_bias,
        "target_layer_ids": list(contract.capture_layers),
        "aux_layer_convention": CAPTURE_CONVENTION,
    }


def read_chained_shape(directory: Path) -> ChainedShape:
    """The shape in a directory's config.json. Raises HeadError."""
    body, where = read_json(directory / CONFIG), f"head {directory}: {CONFIG}"
    fields = {name: body[name] for name in ChainedShape.model_fields if name in body}
    shape = validated(ChainedShape, fields, where)
    if shape.heads < 1:
        problem = f"heads is {shape.heads}, it can be 1 or more"
        raise HeadError(problem, where=where, fix="export the head again")
    return shape
