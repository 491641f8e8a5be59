"""config.json by strangers: refused by name, before memory or minutes are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TargetSection
from pipeline.errors import TargetError
from pipeline.target.architecture import read_config
from pipeline.target.open import open_target, open_template

SIZES: list[tuple[str, Any]] = [
    *(("vocab_size", each) for each in (2**40, 0, -1)),
    *(("num_hidden_layers", each) for each in (10**9, 10**5, 0, -1)),
    *(("hidden_size", each) for each in (2**40, 0, -32)),
    *(("num_attention_heads", each) for each in (2**40, 0, -4)),
    *(("num_key_value_heads", each) for each in (2**40, 0, -2)),
    *(("head_dim", each) for each in (2**40, 0, -8)),
    *(("intermediate_size", each) for each in (2**50, -1)),
    *(("max_position_embeddings", each) for each in (2**60, 0, -1)),
    *(("num_labels", each) for each in (10**8, -1)),
    *(("rms_norm_eps", each) for each in (1e300, -1.0, float("nan"))),
]
ROPE: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 0.0},
    {"rope_type": "linear", "factor": -1.0},
    {"rope_type": "default", "rope_theta": 0.0},
    {"rope_type": "default", "rope_theta": -5.0},
    {"rope_type": "default", "rope_theta": float("nan")},
]


@pytest.fixture
def edit(target_copy: Path) -> Any:
    def edit(**changes: Any) -> Path:
        path = target_copy / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return target_copy

    return edit


@pytest.mark.parametrize(("name", "value"), SIZES)
def test_a_size_that_no_model_has(edit: Any, name: str, value: Any) -> None:
    for fields, place in (({name: value}, name), ({"part": {name: value}}, f"part.{name}")):
        directory = edit(**fields)
        with pytest.raises(TargetError) as caught:
            read_config(directory, f"target.source={directory}")
        start = f"target.source={directory}, config.json: {place}: {value} is not from"
        assert str(caught.value).startswith(start)
        (directory / "config.json").write_text("{}")


@pytest.mark.parametrize("rope", ROPE, ids=str)
def test_angles_that_are_no_numbers(edit: Any, rope: dict[str, Any]) -> None:
    directory = edit(rope_parameters={"rope_theta": 1e4, **rope})
    with pytest.raises(TargetError, match="turn positions by no finite angle"):
        open_target(TargetSection(source=str(directory)))


@pytest.mark.parametrize(
    "fields",
    [{"pad_token_id": 10**9}, {"num_attention_heads": 3}, {"layer_types": [1] * 8}],
    ids=str,
)
def test_fields_that_contradict_each_other(edit: Any, fields: dict[str, Any]) -> None:
    directory = edit(**fields)
    with pytest.raises(TargetError) as caught:
        open_target(TargetSection(source=str(directory)))
    assert str(caught.value).startswith(f"target.source={directory}: ")


@pytest.mark.parametrize("limit", [[], "much", {"a": 1}], ids=str)
def test_a_limit_of_the_tokenizer_that_is_no_number(target_copy: Path, limit: Any) -> None:
    path = target_copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": limit}))
    with pytest.raises(TargetError, match=r"tokenizer_config.json: model_max_length .* number"):
        open_template(TargetSection(source=str(target_copy))).start("Hi")
