"""End ids are those of transformers, and the tokenizer's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TargetSection
from pipeline.errors import TargetError
from pipeline.target.open import open_target
from pipeline.target.template import load_template

MISSING = object()  # no such file, or no such field


def with_end_ids(copy: Path, config: Any, generation: Any) -> Path:
    """The target with other `eos_token_id` in its two files."""
    fields = json.loads((copy / "config.json").read_text())
    fields.pop("eos_token_id", None)
    fields |= {} if config is MISSING else {"eos_token_id": config}
    (copy / "config.json").write_text(json.dumps(fields))
    file = copy / "generation_config.json"
    if generation is MISSING:
        file.unlink()
    elif isinstance(generation, str):
        file.write_text(generation)
    else:
        file.write_text(json.dumps(generation))
    return copy


def ids_of(target: Path) -> tuple[int, ...]:
    return load_template(target, source="tiny", system_prompt=None).stop_ids


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        (5, MISSING),
        ([5, 6], MISSING),
        ([6, 5], {"eos_token_id": None}),
        (5, {"eos_token_id": 7}),
        ([5, 6], {"eos_token_id": [7, 8]}),
        (5, {"do_sample": True, "temperature": 0.0, "eos_token_id": 9}),
        (5, {"do_sample": False, "temperature": 0.0, "top_p": 0.3, "eos_token_id": [9]}),
        (-1, {"eos_token_id": [9]}),
        (MISSING, MISSING),
        (None, MISSING),
        (MISSING, {}),
    ],
)
def test_end_ids_are_transformers_own(target_copy: Path, config: Any, generation: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = with_end_ids(target_copy, config, generation)
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    expected = model.generation_config.eos_token_id
    if expected is None and isinstance(generation, dict) and isinstance(config, list):
        expected = config  # SGLang reads config.json beside a file that names none
    named = set(expected if isinstance(expected, list) else [expected]) - {None}
    own = AutoTokenizer.from_pretrained(target).eos_token_id
    assert ids_of(target) == tuple(sorted({*named, own}))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (-1, "-1 is outside the vocabulary of 316"),
        ([1, 316], "316 is outside the vocabulary of 316"),
        (2**62, "is outside the vocabulary of 316"),
        ("1", '"1" is not a token id'),
        (1.5, "1.5 is not a token id"),
        (True, "true is not a token id"),
        ([1, None], "null is not a token id"),
        ([[1, 2]], r"\[1, 2\] is not a token id"),
        ({"id": 1}, r'{"id": 1} is not a token id'),
        ([], "is an empty list"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_is_no_end_id_is_named(target_copy: Path, file: str, value: Any, problem: str) -> None:
    named = (5, {"eos_token_id": value}) if file.startswith("generation") else (value, MISSING)
    target = with_end_ids(target_copy, *named)
    where = rf"{file}.*eos_token_id.*{problem}.*fix: name the ids"
    with pytest.raises(TargetError, match=where):
        ids_of(target)


@pytest.mark.parametrize("value", ["1", True, [[1]], {"id": 1}, 316])
def test_opening_such_a_target_is_a_clear_error(target_copy: Path, value: Any) -> None:
    """transformers reads config.json as a whole before anything else does."""
    target = with_end_ids(target_copy, value, MISSING)
    with pytest.raises(TargetError, match=r"config\.json.*eos_token_id.*fix: (correct|name)"):
        open_target(TargetSection(source=str(target))).template()


def test_a_target_s_other_settings_are_no_matter(target_copy: Path) -> None:
    """transformers itself refuses to load a model beside the last of them."""
    settings = {"eos_token_id": 5, "do_sample": True, "temperature": 0.0, "max_new_tokens": -1}
    target = with_end_ids(target_copy, 6, settings)
    opened = open_target(TargetSection(source=str(target), device="cpu"))
    assert 5 in opened.template().stop_ids
    assert opened.load().model.generation_config.max_new_tokens is None


@pytest.mark.parametrize("text", ["{broken", "[1]", "\x00"])
def test_a_file_that_is_no_json_object_is_named(target_copy: Path, text: str) -> None:
    target = with_end_ids(target_copy, 5, text)
    with pytest.raises(TargetError, match=r"generation_config\.json.*fix: .*download the file"):
        ids_of(target)


def test_the_tokenizer_s_own_is_left_out_where_the_model_has_no_such_row(target_copy: Path) -> None:
    target = with_end_ids(target_copy, 5, MISSING)
    fields = json.loads((target / "tokenizer_config.json").read_text())
    fields["eos_token"] = "<extra>"
    (target / "tokenizer_config.json").write_text(json.dumps(fields))
    assert ids_of(target) == (5,)


def test_the_decoder_s_part_of_a_configuration(target_copy: Path) -> None:
    target = with_end_ids(target_copy, MISSING, MISSING)
    fields = json.loads((target / "config.json").read_text())
    part = {"text_config": {"vocab_size": 316, "eos_token_id": [7]}}
    del fields["vocab_size"]
    (target / "config.json").write_text(json.dumps(fields | part))
    assert 7 in ids_of(target)
