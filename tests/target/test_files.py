"""Which files hold the model: compared with what transformers ends with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import HeadError, TargetError
from pipeline.target.files import INDEX, WHOLE, weight_files
from pipeline.target.weights import TargetWeights

_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _noisy(directory: Path, name: str) -> None:
    """Another model's weights under `name`."""
    source = weight_files(directory)[0]
    tensors = load_file(source)
    _save(directory / name, {key: tensor * 1.5 + 0.01 for key, tensor in tensors.items()})


def _shard(directory: Path, *, both: bool = False) -> None:
    """The model in two shards; with `both`, one tensor differs between them and is in both."""
    tensors = load_file(directory / WHOLE)
    (directory / WHOLE).unlink()
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[half::2]} for half in range(2)]
    shards = {name: _SHARDS[half] for half in range(2) for name in names[half::2]}
    if both:
        name = next(iter(parts[0]))
        parts[1][name] = tensors[name] * 3 + 1
    for file, part in zip(_SHARDS, parts, strict=True):
        _save(directory / file, part)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def _stale_index(directory: Path) -> None:
    """Beside model.safetensors: an index that names shards, which hold other weights."""
    tensors = {name: tensor + 1 for name, tensor in load_file(directory / WHOLE).items()}
    _save(directory / _SHARDS[0], tensors)
    shards = dict.fromkeys(tensors, _SHARDS[0])
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def _consolidated(directory: Path) -> None:
    tensors = load_file(directory / WHOLE)
    renamed = {
        name.replace("model.", "").replace("lm_head", "output"): tensors[name] + 1
        for name in tensors
    }
    _save(directory / "consolidated.safetensors", renamed)


def _named_in_config(directory: Path) -> None:
    """config.json names another file than model.safetensors, which lies there as well."""
    _noisy(directory, "weights-v2.safetensors")
    _configure(directory, transformers_weights="weights-v2.safetensors")


def _configure(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        for one in changes:
            one(directory)

    return change


_DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "as saved": lambda _: None,
    "backup": lambda d: _noisy(d, "model_backup.safetensors"),
    "average": lambda d: _noisy(d, "model_ema.safetensors"),
    "adapter": lambda d: _noisy(d, "adapter_model.safetensors"),
    "consolidated": _consolidated,
    "stale index": _stale_index,
    "shards": _shard,
    "a tensor in two shards": lambda d: _shard(d, both=True),
    "shards and a backup": _both(_shard, lambda d: _noisy(d, "model_backup.safetensors")),
    "stray shard": _both(_shard, lambda d: _noisy(d, "model-00003-of-00003.safetensors")),
    "named in the configuration": _named_in_config,
}


@pytest.mark.parametrize("name", _DIRECTORIES)
def test_the_tensors_are_those_that_transformers_loads(name: str, target_copy: Path) -> None:
    from transformers import AutoModelForCausalLM

    _DIRECTORIES[name](target_copy)
    weights = TargetWeights(target_copy)
    expected = AutoModelForCausalLM.from_pretrained(target_copy).state_dict()
    assert set(weights) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(weights[key], tensor), key
    assert weights.count_parameters(tied=False) == sum(t.numel() for t in expected.values())


def _index(**tree: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / WHOLE).unlink()
        (directory / INDEX).write_text(json.dumps(tree))

    return change


def _only(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / WHOLE).rename(directory / name)

    return change


def _broken_index(directory: Path) -> None:
    _only("x.safetensors")(directory)
    (directory / INDEX).write_text("{")


def _list_as_index(directory: Path) -> None:
    _only("x.safetensors")(directory)
    (directory / INDEX).write_text("[]")


_REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda d: (d / WHOLE).unlink(), r"has no weights: neither model\.safetensors nor"),
    "pickle": (_only("pytorch_model.bin"), r"only weights as pickle \(pytorch_model\.bin\)"),
    "another name": (_only("model_ema.safetensors"), r"has model_ema\.safetensors and neither"),
    "shards without index": (_only(_SHARDS[0]), r"has shards of weights .* and no model\.safe"),
    "broken index": (_broken_index, r"index\.json: cannot be read as JSON"),
    "a list": (_list_as_index, r"is no JSON object"),
    "no map": (_index(metadata={}), r"needs `metadata`, and `weight_map`"),
    "no metadata": (_index(weight_map={"a": "b.safetensors"}), r"needs `metadata`"),
    "missing shard": (
        _index(metadata={}, weight_map={"a": "lost.safetensors"}),
        r"lost\.safetensors is missing",
    ),
    "outside": (
        _index(metadata={}, weight_map={"a": "../x.safetensors"}),
        r"names '\.\./x\.safetensors', which lies outside",
    ),
    "absolute": (_index(metadata={}, weight_map={"a": "/x.safetensors"}), r"lies outside"),
    "other kind": (_index(metadata={}, weight_map={"a": "x.bin"}), r"names 'x\.bin', no safetens"),
    "configured elsewhere": (
        lambda d: _configure(d, transformers_weights="../model.safetensors"),
        r"config\.json: names '\.\./model\.safetensors', which lies outside",
    ),
    "configured as pickle": (
        lambda d: _configure(d, transformers_weights="model.bin"),
        r"transformers_weights='model\.bin' is no safetensors file",
    ),
    "configured and missing": (
        lambda d: _configure(d, transformers_weights="lost.safetensors"),
        r"lost\.safetensors is missing",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_transformers_would_not_load_is_named(name: str, target_copy: Path) -> None:
    change, message = _REFUSED[name]
    change(target_copy)
    with pytest.raises(TargetError, match=message):
        weight_files(target_copy)
    with pytest.raises(HeadError, match=message):
        weight_files(target_copy, error=HeadError)
