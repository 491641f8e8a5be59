"""A head of another trainer, read and checked.

    config.json        detect the dialect → shape, aux layers
    *.safetensors      rename → complete, nothing surplus, of the right shapes
    d2t, t2d           offsets → target ids, distinct and inside the vocabulary; rows put in order

Loaders skip a tensor that they do not know and keep random weights where one is missing; here both
are errors that name the tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.eagle3.formats import sglang, speculators
from pipeline.eagle3.head import DraftingHead, Eagle3Head
from pipeline.errors import HeadError

Dialect = Literal["sglang", "speculators", "dflash", "mtp"]

_MAPS = ("d2t", "t2d")
#: What trainers leave in their checkpoints and no head needs: the verifier's own weights.
_IGNORED = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})
#: SGLang's older names of the three norms before fc.
_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}

_PASS_A_HEAD = "pass the directory of an EAGLE-3 head"
_FETCH_AGAIN = "download or export the head again"


@dataclass(frozen=True)
class ForeignHead:
    """What a directory holds, under our names."""

    dialect: Dialect
    #: Output indices; None leaves them to the loader's default.
    capture_layers: tuple[int, int, int] | None
    head: DraftingHead  # float32
    embedding: Tensor | None  # [V, H], when it ships one
    lacks_rows: bool = False  # its lm_head is the target's rows of its draft vocabulary
    lm_head: Tensor | None = None  # [V, H], when it ships one that is not the head's own


def read_foreign(directory: Path) -> ForeignHead:
    """Read a head directory in either dialect. Raises HeadError with file, field and fix."""
    body = read_json(directory / "config.json")
    where = f"{directory}/config.json"
    dialect = _detect(body, where)
    shape, layers = (speculators if dialect == "speculators" else sglang).read_config(body, where)
    tensors = {_head_name(name): tensor for name, tensor in load_tensors(directory).items()}
    embedding = tensors.pop(speculators.EMBEDDING, None)
    head = Eagle3Head(shape)
    fill_head(head, tensors, where=str(directory))
    return ForeignHead(dialect, layers, head, embedding)


def _detect(body: dict[str, Any], where: str) -> Dialect:
    """The dialect of a config.json. Raises HeadError for what is no EAGLE-3 head."""
    if speculators.MODEL_TYPE in body:
        return "speculators"
    if sglang.ARCHITECTURE in (body.get("architectures") or []) or "draft_vocab_size" in body:
        return "sglang"
    known = f"{speculators.MODEL_TYPE} nor architectures [{sglang.ARCHITECTURE}]"
    problem = f"is no EAGLE-3 head's: it has neither {known} nor draft_vocab_size"
    raise HeadError(problem, where=where, fix=_PASS_A_HEAD)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError when it is absent or no object."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadError("no such file", where=str(path), fix=_PASS_A_HEAD) from None
    except (OSError, ValueError) as error:
        raise HeadError(f"cannot be read: {error}", where=str(path), fix=_FETCH_AGAIN) from error
    if not isinstance(body, dict):
        raise HeadError("is no JSON object", where=str(path), fix=_FETCH_AGAIN)
    return body


def fill_head(head: DraftingHead, tensors: dict[str, Tensor], *, where: str) -> None:
    """Put `tensors` into a float32 head; rows are put in ascending order of target id.

    Raises HeadError on the first tensor that is missing, surplus or of another shape, and for a
    vocabulary map that is none.
    """
    shape = head.shape
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if shape.draft_vocab_size == shape.vocab_size:  # the whole vocabulary needs no map
        identity = {
            "d2t": torch.zeros(shape.vocab_size, dtype=torch.int64),
            "t2d": torch.ones(shape.vocab_size, dtype=torch.bool),
        }
        tensors = {**identity, **tensors}
    check_tensors(expected, tensors, where)
    target_ids = draft_ids(tensors["d2t"], tensors["t2d"], where)
    order = target_ids.argsort()
    weights = {name: tensor.float() for name, tensor in tensors.items() if name not in _MAPS}
    if "lm_head.weight" in weights:
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
    head.load_state_dict({**weights, **{name: getattr(head, name) for name in _MAPS}})
    head.set_vocabulary(target_ids[order])


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """All that a head needs of a directory's *.safetensors, as they are. Raises HeadError."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        problem = "has no *.safetensors"
        if any(directory.glob("*.bin")):
            problem += " (a pytorch_model.bin is a pickle, which can run code)"
        fix = "save the head's weights as safetensors"
        raise HeadError(problem, where=str(directory), fix=fix)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            problem = f"cannot be read: {error}"
            raise HeadError(problem, where=str(file), fix=_FETCH_AGAIN) from error
    return {name: tensor for name, tensor in tensors.items() if name not in _IGNORED}


def _head_name(name: str) -> str:
    """The name that `Eagle3Head` has for a tensor of either dialect."""
    name = speculators.head_name(name.removeprefix("model."))
    for legacy, current in _LEGACY.items():
        name = name.replace(legacy, current)
    return name


def check_tensors(
    expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], where: str
) -> None:
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    if missing:
        problem = f"has no tensor {', '.join(missing)}"
        reason = "a reader that goes on without would draft from random ones"
        fix = f"import a head with all weights; {reason}"
        raise HeadError(problem, where=where, fix=fix)
    if surplus:
        problem = f"has a tensor that this head has no place for: {', '.join(surplus)}"
        fix = "import a head without it; a reader that skips it would draft with other maths"
        raise HeadError(problem, where=where, fix=fix)
    for name, wanted in expected.items():
        shape = tuple(tensors[name].shape)
        if shape != wanted:
            problem = f"{name} is {list(shape)} where config.json asks for {list(wanted)}"
            sizes = "hidden, intermediate and vocabulary sizes, heads, head_dim"
            fix = f"correct config.json ({sizes}), or export the head again"
            raise HeadError(problem, where=where, fix=fix)


def draft_ids(d2t: Tensor, t2d: Tensor, where: str) -> Tensor:
    """Target ids [Vd] of the draft rows, from their offsets d2t [Vd].

    Raises HeadError unless t2d [V] marks the same tokens, each once.
    """
    ids = d2t.long() + torch.arange(len(d2t))
    marked = t2d.bool()
    inside = bool(((ids >= 0) & (ids < len(marked))).all())
    distinct = len(set(ids.tolist())) == len(ids) == int(marked.sum())
    if inside and distinct and bool(marked[ids].all()):
        return ids
    if torch.equal(d2t.long().sort().values, marked.nonzero().flatten()):
        problem = "d2t holds target ids where offsets belong"
        raise HeadError(problem, where=where, fix="subtract 0, 1, 2, … from its rows")
    problem = (
        "d2t and t2d do not name the same distinct target tokens: "
        "row i + d2t[i] must be marked in t2d, once each"
    )
    raise HeadError(problem, where=where, fix="export the head again with its vocabulary map")
