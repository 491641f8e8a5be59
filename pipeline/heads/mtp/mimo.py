"""Chained heads in MiMo's layout of multi-token prediction, for a dense target of any family.

    config.json        MiMoForCausalLM on the fields of Qwen2, num_nextn_predict_layers
    model.safetensors  model.mtp_layers.0 … K-1, with biases of queries, keys and values;
                       model.embed_tokens and lm_head, the target's; d2t and t2d, read by us alone

That name makes SGLang (mimo_mtp.py, MiMoMTP) and vLLM (mimo_mtp.py, MiMoMTPModel) build their MTP
class, whose maths are those of head.py: head 0 reads the target's final state, the next hidden
state is the normed output, the embedding at position 0 is zero, and logits are the target's own
lm_head's. So a head that reads aux states, or has trained its lm_head, cannot be written so.

DeepSeek's NextN layout (model.layers.L.eh_proj …) has other layers, and passes on un-normed states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.console import notice
from pipeline.errors import HeadError
from pipeline.heads.checkpoint import (
    CONFIG,
    ForeignHead,
    HeadCard,
    add_t2d,
    check_tensors,
    draft_ids,
    read_json,
    read_tensors,
    shapes_of,
    write_files,
)
from pipeline.heads.fields import (
    LAYER_FIELDS,
    LAYER_RULES,
    architectures_of,
    check_layer_types,
    default_head_dim,
    layer_config,
    layer_ids,
    refuse_unknown,
    validated,
)
from pipeline.heads.mtp.shape import ChainedHead, ChainedShape
from pipeline.heads.rope import rope_parameters
from pipeline.records import TargetContract
from pipeline.target.weights import TargetWeights

ARCHITECTURES = ("MiMoForCausalLM", "MiMoMTP", "MiMoMTPModel")


_COUNT = "num_nextn_predict_layers"


_LAYERS = "model.mtp_layers."


_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


_MAPS = ("d2t", "t2d")


_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")


#: Beside the fields of a shape: of the whole model, or said by the tensors, as Qwen2's biases are.
_READ = (
    *("architectures", "model_type", "num_hidden_layers", "tie_word_embeddings", "attention_bias"),
    *("draft_vocab_size", "target_layer_ids", _COUNT),
)


def export_mtp(
    directory: Path, head: ChainedHead, card: HeadCard, *, embedding: Tensor, lm_head: Tensor
) -> None:
    """Write `head` in MiMo's layout, its card beside it; embedding and lm_head [V, H] are the
    target's. Raises HeadError for a head that those servers would compute otherwise.
    """
    where = "--format mtp"
    if head.shape.chain_input != "final":
        problem = "head 0 reads aux states, MTP classes give it the target's final state"
        fix = "train with train.head_config.chain_input=final"
        raise HeadError(problem, where=where, fix=fix)
    own, of_target = (each.bfloat16() for each in (head.lm_head.weight, lm_head))
    if not torch.equal(own, of_target[head.target_ids()]):
        problem = "lm_head was trained, MTP classes use the target's"
        raise HeadError(problem, where=where, fix="train with train.train_lm_head=false")
    tensors = _tensors(head, embedding, lm_head)
    write_files(directory, _config(head.shape, card.contract), tensors, card)
    if (heads := head.shape.heads) > 1:
        vllm = "vLLM's MiMoMTPModel drafts with the first head alone"
        notice("export", f"{heads} heads: {vllm}, SGLang's MiMoMTP keeps the last it reads")


def _config(shape: ChainedShape, contract: TargetContract) -> dict[str, Any]:
    layer = layer_config(shape)
    others = {name: layer[name] for name in layer if name not in ("attention_bias", "mlp_bias")}
    return {
        "architectures": [ARCHITECTURES[0]],
        **others,
        "model_type": "qwen2",
        "num_hidden_layers": contract.num_layers,
        _COUNT: shape.heads,
        "use_sliding_window": False,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_layer_ids": list(contract.capture_layers),
    }


def _tensors(head: ChainedHead, embedding: Tensor, lm_head: Tensor) -> dict[str, Tensor]:
    named = {
        f"model.{name}": tensor
        for name, tensor in head.state_dict().items()
        if name.startswith("mtp_layers.")
    }
    attention, size = head.shape, head.shape.head_dim
    heads = attention.num_attention_heads, *[attention.num_key_value_heads] * 2
    for number in range(head.shape.heads):
        for name, count in zip(_BIASES, heads, strict=True):  # Qwen2's layers always have them
            named.setdefault(f"{_LAYERS}{number}.{name}", torch.zeros(count * size))
    maps = {name: getattr(head, name) for name in _MAPS}
    return {**named, **maps, _EMBEDDING: embedding, _LM_HEAD: lm_head}


def is_mtp(body: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model with MTP layers, of whatever family."""
    return _COUNT in body


def read_mtp(directory: Path) -> ForeignHead:
    """Read heads in MiMo's layout; what they take from the target is added by `complete_mtp`.

    A checkpoint of a whole model is read for its MTP layers alone. Raises HeadError with file,
    field and fix.
    """
    body, where = read_json(directory / CONFIG), f"{directory}/{CONFIG}"
    _refuse_unsupported(body, where)
    tensors = _load(directory, where)
    embedding, lm_head = (tensors.pop(name, None) for name in (_EMBEDDING, _LM_HEAD))
    plain = all(
        not bool(tensor.any()) for name, tensor in tensors.items() if name.endswith(_BIASES)
    )
    if plain:
        tensors = {name: each for name, each in tensors.items() if not name.endswith(_BIASES)}
    head = _head(_shape(body, where, bias=not plain), tensors, directory)
    layers = layer_ids(body.get("target_layer_ids"), where, "target_layer_ids", offset=0)
    return ForeignHead(
        "mtp",
        layers,
        head,
        embedding,
        lm_head=lm_head,
        reads_final_state=True,
        complete=complete_mtp,
    )


@torch.no_grad()
def complete_mtp(foreign: ForeignHead, weights: TargetWeights, where: str) -> ForeignHead:
    """Give heads that `read_mtp` read the target's rows and its last norm.

    Raises HeadError for heads that came with another lm_head.
    """
    head, stored, lm_head = foreign.head, foreign.lm_head, weights.lm_head()
    assert isinstance(head, ChainedHead)
    if stored is not None and not torch.equal(stored.bfloat16(), lm_head.bfloat16()):
        fix = "pass the target that the head was trained for with --target"
        raise HeadError("lm_head.weight is not the target's", where=where, fix=fix)
    head.lm_head.weight.copy_(lm_head[head.target_ids()])
    head.target_norm.copy_(weights.final_norm())
    return foreign


def _refuse_unsupported(body: dict[str, Any], where: str) -> None:
    architectures = architectures_of(body, where)
    if not any(name in ARCHITECTURES for name in architectures):
        problem = f"MTP layers of {', '.join(architectures) or 'no architecture'} are not supported"
        fix = f"import heads of a dense layer, architectures [{ARCHITECTURES[0]}]"
        raise HeadError(problem, where=where, fix=fix)
    refuse_unknown(body, where, read=(*LAYER_FIELDS, *_READ), rules=LAYER_RULES)
    check_layer_types(body, where)


def _shape(body: dict[str, Any], where: str, *, bias: bool) -> ChainedShape:
    names = set(ChainedShape.model_fields) - {"rope_parameters"}
    fields = {name: body[name] for name in names if body.get(name) is not None}
    fields.setdefault("num_key_value_heads", body.get("num_attention_heads"))
    fields.setdefault("head_dim", default_head_dim(body, where))
    fields.setdefault("draft_vocab_size", body.get("vocab_size"))
    fields |= {"heads": body[_COUNT], "chain_input": "final", "attention_bias": bias}
    fields |= {"rope_parameters": rope_parameters(body, where)}
    if type(body[_COUNT]) is not int or body[_COUNT] < 1:
        problem = f"{_COUNT} is {body[_COUNT]!r}"
        raise HeadError(problem, where=where, fix="import a checkpoint that has MTP layers")
    return validated(ChainedShape, fields, where)


def _head(shape: ChainedShape, tensors: dict[str, Tensor], directory: Path) -> ChainedHead:
    """Float32 heads of `shape`, but for what is the target's."""
    maps, where = {name: tensors.pop(name) for name in _MAPS if name in tensors}, str(directory)
    maps = add_t2d(maps, shape.vocab_size, directory)
    ids = torch.arange(shape.vocab_size)
    if maps:
        check_tensors({"d2t": (shape.draft_vocab_size,), "t2d": (shape.vocab_size,)}, maps, where)
        ids = draft_ids(maps["d2t"], maps["t2d"], where)
    if len(ids) != shape.draft_vocab_size:
        problem = f"draft_vocab_size is {shape.draft_vocab_size}, its map has {len(ids)} tokens"
        raise HeadError(problem, where=where, fix="export the head again with its vocabulary map")
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    sizes = shapes_of(ChainedHead, shape)
    inner = {name: sizes[name] for name in sizes if name.startswith("mtp_layers.")}
    check_tensors(inner, named, where)
    head = ChainedHead(shape)
    head.load_state_dict({**head.state_dict(), **named})
    head.set_vocabulary(ids.sort().values)
    return head


def _load(directory: Path, where: str) -> dict[str, Tensor]:
    """What is not the model's own."""
    own_names = (*_MAPS, _EMBEDDING, _LM_HEAD)
    tensors = read_tensors(directory, lambda name: name in own_names or _LAYERS in name)
    if not any(name.startswith(_LAYERS) for name in tensors):
        problem = f"has no tensor {_LAYERS}… in its weights"
        raise HeadError(problem, where=where, fix="import a checkpoint with MTP layers")
    return tensors
