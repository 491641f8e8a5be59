"""A base model with a chat template from the configuration is the target that ships it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import cli
from pipeline.api import open_engine
from pipeline.config import RunConfig, TargetSection, parse
from pipeline.errors import ConfigError, ContractMismatch, TemplateError
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import Eagle3Head, HeadShape
from pipeline.heads.init import random_init, shape_for
from pipeline.heads.registry import save_head
from pipeline.records import match_contracts
from pipeline.target.open import Target, open_contracted_target, open_target, open_template
from tests.conftest import CHATML

NUMBERED = "{% for m in messages %}{{ loop.index }}. {{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def base(tiny_target: Path, tmp_path: Path) -> Path:
    """The tiny target without a chat template."""
    directory = tmp_path / "base"
    shutil.copytree(tiny_target, directory)
    (directory / "chat_template.jinja").unlink()
    assert "chat_template" not in json.loads((directory / "tokenizer_config.json").read_text())
    return directory


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML, encoding="utf-8")
    return path


def section(base: Path, template: object = None) -> TargetSection:
    return parse({"target": {"source": str(base), "chat_template": template}}).target


def opened(base: Path, template: object = None) -> Target:
    return open_target(section(base, template))


def test_a_base_model_says_which_key_gives_it_a_template(base: Path) -> None:
    with pytest.raises(TemplateError, match=r"no chat template.*set target\.chat_template"):
        opened(base).template()


@pytest.mark.parametrize("as_text", [True, False])
def test_prompts_are_those_of_transformers_with_that_template(
    base: Path, file: Path, as_text: bool
) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "What is it?"}]
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    expected = tokenizer.apply_chat_template(
        messages, chat_template=CHATML, add_generation_prompt=True, return_dict=False
    )
    given = section(base, CHATML if as_text else str(file))
    assert open_target(given).template().conversation(messages) == expected
    assert open_template(given).conversation(messages) == expected


def test_it_takes_the_place_of_the_target_s_own(tiny_target: Path) -> None:
    template = opened(tiny_target, NUMBERED).template()
    assert template.text(template.start("Hi"), special=True) == "1. Hi<|im_end|>\n"


def test_a_wrong_one_is_named_by_its_key(base: Path) -> None:
    with pytest.raises(TemplateError, match=r"target\.chat_template: .* cannot be rendered"):
        opened(base, "{% for m in messages %}{{ m.content }}").template()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no/such.jinja", "cannot be read: No such file"),
        ("x" * 5000, "cannot be read: File name too long"),
        (7, "valid string"),
    ],
)
def test_what_is_neither_file_nor_template(base: Path, value: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        section(base, value)
    assert caught.value.where == "config: target.chat_template"


def test_a_file_without_a_template(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("chatml\n")
    with pytest.raises(ConfigError, match=r"is not a Jinja template.*neither \{\{ nor \{%"):
        section(base, str(path))
    path.write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ConfigError, match=r"not UTF-8"):
        section(base, str(path))


def test_the_configuration_holds_the_text(base: Path, file: Path) -> None:
    """Another text in the same file is another run, and other machines do not need the file."""

    def read() -> RunConfig:
        return parse({"target": {"source": str(base), "chat_template": str(file)}})

    first = read()
    file.write_text(NUMBERED)
    second = read()
    file.unlink()
    assert first.target.chat_template == CHATML
    assert RunConfig.model_validate_json(first.model_dump_json()) == first
    assert first.section_hash("synth") != second.section_hash("synth")


@pytest.mark.parametrize("embedded", [True, False])
def test_the_contract_is_that_of_a_target_which_ships_it(
    tiny_target: Path, base: Path, file: Path, embedded: bool
) -> None:
    shipped = tiny_target
    if embedded:  # as older versions of transformers save it
        shipped = base.with_name("embedded")
        shutil.copytree(base, shipped)
        path = shipped / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHATML}))
    own, repeated = opened(shipped).contract, opened(shipped, CHATML).contract
    match_contracts(own, repeated, where="a head")
    other, none = opened(shipped, NUMBERED).contract, opened(base).contract
    for different in (other, none):
        with pytest.raises(ContractMismatch, match=r"contract\.chat_template_hash"):
            match_contracts(own, different, where="a head")
    if not embedded:
        match_contracts(own, opened(base, str(file)).contract, where="a head")


def test_a_head_carries_it(base: Path, file: Path, tmp_path: Path) -> None:
    """What opens a target by a head's contract needs no configuration."""
    from transformers import AutoConfig

    target = opened(base, str(file))
    shape = shape_for(
        HeadShape,
        AutoConfig.from_pretrained(base),
        draft_vocab_size=64,
        intermediate_size=40,
        num_attention_heads=None,
        num_key_value_heads=None,
    )
    head = Eagle3Head(shape)
    random_init(head, seed=1)
    head.set_vocabulary(torch.arange(64) * 2)
    own, out = tmp_path / "head", tmp_path / "speculators"
    save_head(own, head, HeadCard(target.contract, {}, {}))
    file.unlink()

    expected = target.template().start("Hi")
    again = open_contracted_target(target.contract, where="head")
    assert again.template().start("Hi") == expected
    ways: list[dict[str, Any]] = [{"head": str(own)}, {"chat_template": CHATML}]
    for given in ways:
        template = open_engine(str(base), max_length=128, **given)[1]
        assert template.start("Hi") == expected
    assert cli.main(["inspect", str(own)]) == 0
    export = ["export", str(own), "--format", "speculators", "--out", str(out)]
    assert cli.main([*export, "--target", str(base)]) == 0
    imported = ["import", str(out), "--target", str(base), "--out"]
    assert cli.main([*imported, str(tmp_path / "back")]) == 0
    (out / "eagle3.json").unlink()  # as another trainer's
    file.write_text(CHATML)
    assert cli.main([*imported, str(tmp_path / "given"), "--chat-template", str(file)]) == 0
    hashes = {
        json.loads((tmp_path / name / "eagle3.json").read_text())["contract"]["chat_template_hash"]
        for name in ("head", "back", "given")
    }
    assert hashes == {target.contract.chat_template_hash}
    assert cli.main([*imported, str(tmp_path / "no"), "--chat-template", "no.jinja"]) == 2
