"""Head directories: `config.json`, `model.safetensors` and `eagle3.json`, read and written.

docs/head-format.md specifies them. The card (`eagle3.json`) carries contract, provenance, metrics.
Every kind of head and every dialect is read here:

    which file    as transformers chooses (target/files.py): model.safetensors, else the shards of
                  its index; any other file beside them changes nothing
    each tensor   of a type that we compute with, finite; all that the head has, and no other, in
                  the shapes of config.json
    d2t, t2d      offsets → target ids, distinct and inside the vocabulary; rows put in order.
                  A head of another trainer may leave out t2d, which d2t decides (`add_t2d`)

Loaders skip a tensor that they do not know and keep random weights where one is missing; here both
are errors that name the tensor. Directories are written atomically.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pipeline import documents
from pipeline.console import notice
from pipeline.errors import HeadError, StoreError
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.fields import Layers
from pipeline.records import TargetContract, match_contracts
from pipeline.target.files import weight_files
from pipeline.target.weights import TargetWeights

Head = TypeVar("Head", bound=DraftingHead)


MAPS = ("d2t", "t2d")


#: What trainers leave in their checkpoints and no head needs: the verifier's own weights.
_IGNORED = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


_PASS_A_HEAD = "pass the directory of an EAGLE-3 head"


FETCH_AGAIN = "download or export the head again"


CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "eagle3.json"


HEAD_FILES = CONFIG, WEIGHTS, CARD


@dataclass(frozen=True)
class HeadCard:
    """`eagle3.json`: which target the head is for, what it was made from, how good it is."""

    contract: TargetContract
    provenance: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


def open_files(directory: Path, expected: TargetContract | None) -> HeadCard:
    """The card of a head directory of any kind, all of whose files are there.

    Raises HeadError, or ContractMismatch when it is for another target than `expected`.
    """
    where = f"head {directory}"
    for name in HEAD_FILES:
        if not (directory / name).is_file():
            fix = "pass a head directory that `eagle3 train` wrote"
            raise HeadError(f"has no {name}", where=where, fix=fix)
    card = read_card(directory / CARD)
    if expected is not None:
        match_contracts(expected, card.contract, where=where)
    return card


def check_card(card: HeadCard, shape: DraftShape, layers: Layers | None, where: str) -> None:
    """Raise HeadError where a config.json is of another target than the card beside it."""
    contract = card.contract
    pairs: list[tuple[str, Any, Any]] = [
        (shape.width_field, shape.target_width, contract.hidden_size),
        ("vocab_size", shape.vocab_size, contract.vocab_size),
    ]
    pairs += [("capture_layers", layers, contract.capture_layers)] if layers else []
    for name, value, of_card in pairs:
        if value != of_card:
            problem = f"{name} is {value}, in {CARD} {of_card}"
            raise HeadError(problem, where=where, fix="export the head again")


def read_card(path: Path) -> HeadCard:
    """The card in an `eagle3.json`. Raises HeadError with file, field and fix."""
    body, where = read_json(path), f"head {path.parent}: {CARD}"
    fix = "export or import the head again"
    parts = {name: body.get(name) for name in ("contract", "provenance", "metrics")}
    for name, value in parts.items():
        if not isinstance(value, dict):
            problem = f"{name} is {value!r}, not an object" if name in body else f"lacks {name}"
            raise HeadError(problem, where=where, fix=fix)
    try:
        contract = TargetContract.model_validate(parts["contract"])
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("contract", *first["loc"])))
        problem = f"{field} is {first['input']!r}: it {first['msg'].removeprefix('Input ')}"
        problem = f"lacks {field}" if first["type"] == "missing" else problem
        raise HeadError(problem, where=where, fix=fix) from error
    for name, value in (("parameters", contract.parameters), ("num_layers", contract.num_layers)):
        if value < 1:
            raise HeadError(f"contract.{name} is {value}", where=where, fix=fix)
    return HeadCard(contract, parts["provenance"] or {}, parts["metrics"] or {})


def write_files(
    directory: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], card: HeadCard
) -> None:
    """Write a new head directory atomically, weights in bfloat16. Raises StoreError."""
    partial = directory.with_name(f".{directory.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        partial.mkdir(parents=True)
        for name, data in encode_files(config, tensors, card).items():
            (partial / name).write_bytes(data)
        os.rename(partial, directory)
    except OSError as error:
        problem = f"cannot write the head: {error.strerror}"
        fix = "free some space or choose a writable directory"
        raise StoreError(problem, where=str(directory), fix=fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def encode_files(
    config: dict[str, Any], tensors: Mapping[str, Tensor], card: HeadCard
) -> dict[str, bytes]:
    """The files of a head directory by name, weights in bfloat16."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one = _stored(tensor)
        # safetensors refuses names that share memory, as embedding and lm_head of tied targets do.
        is_shared = any(one.data_ptr() == each.data_ptr() for each in stored.values())
        stored[name] = one.clone() if is_shared else one
    texts = {CONFIG: config, CARD: card_fields(card)}
    files = {name: f"{json.dumps(fields, indent=2)}\n".encode() for name, fields in texts.items()}
    return {**files, WEIGHTS: save(stored, metadata={"format": "pt"})}


def card_fields(card: HeadCard) -> dict[str, Any]:
    """What `eagle3.json` holds."""
    return {
        "contract": card.contract.model_dump(mode="json"),
        "provenance": card.provenance,
        "metrics": card.metrics,
    }


def _stored(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError when it is absent or no object."""
    try:
        body = documents.read_json(path)
    except FileNotFoundError:
        raise HeadError("no such file", where=str(path), fix=_PASS_A_HEAD) from None
    except (OSError, ValueError) as error:
        raise HeadError(f"cannot be read: {error}", where=str(path), fix=FETCH_AGAIN) from error
    if not isinstance(body, dict):
        raise HeadError("is no JSON object", where=str(path), fix=FETCH_AGAIN)
    return body


def read_tensors(
    directory: Path, is_included: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The included tensors of a head directory, in the types they are stored in.

    Raises HeadError for a file that cannot be read, a type that we do not compute with, and a
    tensor that holds NaN or infinity.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory, error=HeadError):
        try:
            documents.check_header(file)
            with safe_open(file, framework="pt") as stored:
                for name in set(stored.keys()) - _IGNORED:
                    if is_included(name):
                        tensors[name] = _checked(name, stored.get_tensor(name), str(file))
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            problem = f"cannot be read: {error}"
            raise HeadError(problem, where=str(file), fix=FETCH_AGAIN) from error
    return tensors


def _checked(name: str, tensor: Tensor, where: str) -> Tensor:
    """The tensor as it is. Raises HeadError for a weight that cannot be computed with."""
    if name.rpartition(".")[2] in MAPS:
        return tensor
    if tensor.dtype not in _FLOATS:
        problem = f"{name} is {str(tensor.dtype).removeprefix('torch.')}"
        fix = "save the head in bfloat16, float16 or float32"
        raise HeadError(f"{problem}, a type that heads are not computed in", where=where, fix=fix)
    if not bool(tensor.isfinite().all()):
        count = int((~tensor.isfinite()).sum())
        problem = f"{name} holds NaN or infinity in {count:,} of {tensor.numel():,} places"
        fix = "take an earlier checkpoint of its training"
        raise HeadError(problem, where=where, fix=fix)
    return tensor


def shapes_of(kind: Callable[[Any], DraftingHead], shape: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors; none is allocated."""
    with torch.device("meta"):
        parts = kind(shape).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in parts.items()}


def fill_head(
    kind: Callable[[Any], Head], shape: Any, tensors: dict[str, Tensor], *, where: str
) -> Head:
    """A float32 head of `shape` with these tensors; rows in ascending order of target id.

    Raises HeadError on the first tensor that is missing, surplus or of another shape, and for a
    vocabulary map that is none.
    """
    if shape.draft_vocab_size == shape.vocab_size:  # the whole vocabulary needs no map
        identity = {
            "d2t": torch.zeros(shape.vocab_size, dtype=torch.int64),
            "t2d": torch.ones(shape.vocab_size, dtype=torch.bool),
        }
        tensors = {**identity, **tensors}
    check_tensors(shapes_of(kind, shape), tensors, where)
    target_ids = draft_ids(tensors["d2t"], tensors["t2d"], where)
    order = target_ids.argsort()
    weights = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    if "lm_head.weight" in weights:
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
    head = kind(shape).float()
    head.load_state_dict({**weights, **{name: getattr(head, name) for name in MAPS}})
    head.set_vocabulary(target_ids[order])
    return head


def check_tensors(
    expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], where: str
) -> None:
    """Raise HeadError for a tensor that is missing, surplus or of another shape."""
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    if missing:
        problem = f"has no tensor {', '.join(missing)}"
        reason = "a reader that goes on without would draft from random ones"
        fix = f"use a head with all weights; {reason}"
        raise HeadError(problem, where=where, fix=fix)
    if surplus:
        problem = f"has a tensor that this head has no place for: {', '.join(surplus)}"
        fix = "use a head without it; a reader that skips it would draft with other maths"
        raise HeadError(problem, where=where, fix=fix)
    for name, expected_shape in expected.items():
        shape = tuple(tensors[name].shape)
        if shape != expected_shape:
            problem = f"{name} is {list(shape)} where config.json asks for {list(expected_shape)}"
            sizes = "hidden, intermediate and vocabulary sizes, heads, head_dim"
            fix = f"correct config.json ({sizes}), or export the head again"
            raise HeadError(problem, where=where, fix=fix)


def add_t2d(tensors: dict[str, Tensor], vocab_size: int, directory: Path) -> dict[str, Tensor]:
    """The tensors of another trainer's head, with the t2d [V] that follows from its d2t.

    Servers skip t2d, and ModelOpt does not write it. Raises HeadError for a d2t that is none.
    """
    if "d2t" not in tensors or "t2d" in tensors or is_own(directory):
        return tensors
    offsets = _whole("d2t", tensors["d2t"], str(directory)).flatten()
    ids = offsets + torch.arange(len(offsets))
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids[(ids >= 0) & (ids < vocab_size)]] = True
    # Nothing confirms d2t now: with target ids in place of offsets it may stay in the vocabulary.
    notice("import", f"t2d is missing: made from d2t, read as offsets ({directory})")
    return {**tensors, "t2d": t2d}


def is_own(directory: Path) -> bool:
    """Whether this package wrote the head, which then lacks nothing."""
    return (directory / CARD).is_file()


def draft_ids(d2t: Tensor, t2d: Tensor, where: str) -> Tensor:
    """Target ids [Vd] of the draft rows, from their offsets d2t [Vd].

    Raises HeadError unless t2d [V] marks the same tokens, each once.
    """
    offsets, marked = _whole("d2t", d2t, where), _whole("t2d", t2d, where)
    if not bool(((marked == 0) | (marked == 1)).all()):
        problem = "t2d holds other values than 0 and 1"
        raise HeadError(problem, where=where, fix="export the head again with its vocabulary map")
    ids, marked = offsets + torch.arange(len(offsets)), marked.bool()
    inside = bool(((ids >= 0) & (ids < len(marked))).all())
    distinct = len(set(ids.tolist())) == len(ids) == int(marked.sum())
    if inside and distinct and bool(marked[ids].all()):
        return ids
    if torch.equal(offsets.sort().values, marked.nonzero().flatten()):
        problem = "d2t holds target ids where offsets belong"
        raise HeadError(problem, where=where, fix="subtract 0, 1, 2, … from its rows")
    problem = (
        "d2t and t2d do not name the same distinct target tokens: "
        "row i + d2t[i] must be marked in t2d, once each"
    )
    if not inside:
        problem = f"d2t leads outside the vocabulary of {len(marked)} tokens; {problem}"
    raise HeadError(problem, where=where, fix="export the head again with its vocabulary map")


def _whole(name: str, values: Tensor, where: str) -> Tensor:
    """A vocabulary map in int64. Raises HeadError for a type that cannot hold whole numbers."""
    wide = values.dtype is torch.float32 and bool((values == values.round()).all())
    if values.dtype in (*_INTEGERS, torch.bool) or wide:
        return values.long()
    problem = f"{name} is {str(values.dtype).removeprefix('torch.')}, not whole numbers"
    raise HeadError(problem, where=where, fix=f"store {name} in an integer type")


#: Fields whose text is a place, unless it names something public.
_PLACES = frozenset({"source", "start_from", "head", "imported from", "model"})


_PUBLIC = ("hub:", "package:")


def published(card: HeadCard) -> HeadCard:
    """The card for a head that leaves its run."""
    contract = card.contract
    if contract.revision == "local":
        contract = contract.model_copy(update={"source": last_part(contract.source)})
    return replace(card, contract=contract, provenance=without_places(card.provenance))


def without_places(facts: Any, field: str = "") -> Any:
    """The same JSON; of paths and URIs only the last part is left."""
    if isinstance(facts, dict):
        return {name: without_places(value, name) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [without_places(value, field) for value in facts]
    is_place = isinstance(facts, str) and field in _PLACES and not facts.startswith(_PUBLIC)
    return last_part(facts) if is_place and not is_hub_id(facts) else facts


def last_part(place: str) -> str:
    """Of a path or a URI, on whatever system it was written; never a bucket or a host."""
    protocol, separator, rest = place.replace("\\", "/").partition("://")
    path = rest.partition("/")[2] if separator else protocol
    return PurePath(path).name or "unnamed"


def is_hub_id(text: str) -> bool:
    """`org/name`, and no file beside the run."""
    path = PurePath(text)
    looks_so = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text, re.ASCII) is not None
    return looks_so and path.suffix not in (".jsonl", ".gz", ".ndjson", ".parquet", ".gguf")


@torch.no_grad()
def fill_rows(foreign: ForeignHead, weights: TargetWeights, where: str) -> ForeignHead:
    """Copy the target's rows into an lm_head that the directory leaves to the target."""
    del where
    if foreign.lacks_rows:
        head = foreign.head
        head.lm_head.weight.copy_(weights.lm_head()[head.target_ids()])
    return foreign


#: Embeddings closer than bfloat16 can tell apart are the same; trainers store them in float32,
#: float16 or bfloat16.
_EMBEDDING_TOLERANCE = 2.0**-7


def has_targets_embedding(foreign: ForeignHead, weights: TargetWeights) -> bool:
    """Whether the embedding that a directory ships is the target's; also where it ships none."""
    if foreign.embedding is None:
        return True
    of_target, of_head = weights.embedding().float(), foreign.embedding.float()
    same_shape = of_head.shape == of_target.shape
    return same_shape and torch.allclose(of_head, of_target, rtol=_EMBEDDING_TOLERANCE, atol=1e-6)


@dataclass(frozen=True)
class ForeignHead:
    """What a directory of another trainer holds, under our names."""

    dialect: str
    #: Output indices; None leaves them to the loader's default.
    capture_layers: Layers | None
    head: DraftingHead  # float32
    embedding: Tensor | None  # [V, H], when it ships one
    lacks_rows: bool = False  # its lm_head is the target's rows of its draft vocabulary
    lm_head: Tensor | None = None  # [V, H], when it ships one that is not the head's own
    reads_final_state: bool = False  # the high aux state has to be the target's final one
    #: Adds what the head takes from the target. Raises HeadError where that contradicts it.
    complete: Callable[[ForeignHead, TargetWeights, str], ForeignHead] = fill_rows
