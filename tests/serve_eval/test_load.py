"""Load on our own decoder: what its points are asked, and what imposed acceptance does."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.cli import main
from pipeline.config import RunConfig, load
from pipeline.decoder.engine import Engine
from pipeline.decoder.ops.tree import Tree
from pipeline.decoder.request import Completion, Request
from pipeline.errors import ConfigError
from pipeline.heads.registry import load_head
from pipeline.serve_eval.load import SimulatedLoad, filled_length, measure_load
from pipeline.serve_eval.measure import Comparison
from pipeline.serve_eval.questions import load_evaluation_prompts
from pipeline.target.open import open_target
from pipeline.tuning.verification import ImposedAcceptance, pattern_of
from tests.conftest import CHATML

NEW_TOKENS = 12


def _open(config: RunConfig) -> Comparison:
    target = open_target(config.target)
    head, _ = load_head(Path(config.run.uri) / "train/head")
    template = target.template()
    return Comparison(config, target, head, template, dtype=torch.float32, max_length=128)


@pytest.fixture
def thinking(finished: Path, tmp_path: Path) -> Path:
    """The target with a template that opens a thought where it is told to."""
    directory = tmp_path / "thinking"
    shutil.copytree(load(finished).target.source, directory)
    opened = "assistant\n{% if enable_thinking %}What{% endif %}{% endif %}"
    template = directory / "chat_template.jinja"
    assert template.read_text() == CHATML
    template.write_text(CHATML.replace("assistant\n{% endif %}", opened))
    return directory


def test_every_mode_and_context_has_curves_of_its_own(
    finished: Path, thinking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
    asked = {"concurrency": [1, 2], "requests": 4, "contexts": [40, 70], "modes": modes}
    settings = [f"eval.load={json.dumps(asked)}", f"eval.max_new_tokens={NEW_TOKENS}"]
    config = load(finished, [*settings, f"target.source={thinking}"])
    own = _open(config)
    template = open_target(config.target).template()
    tokenizer: Any = AutoTokenizer.from_pretrained(thinking)
    lengths: dict[bytes, set[int]] = defaultdict(set)
    generate = Engine.generate

    def recorded(engine: Engine, requests: Iterable[Request]) -> Iterator[Completion]:
        each = list(requests)
        for request in each:
            ending = tokenizer.decode(request.prompt_ids[-3:]).encode()
            lengths[ending[-4:]].add(len(request.prompt_ids))
        return generate(engine, each)

    monkeypatch.setattr(Engine, "generate", recorded)
    curves = measure_load(own, load_evaluation_prompts(config)[0], template, config.eval)
    settings_of = [(c.name, c.settings["mode"], c.settings["context"]) for c in curves]
    assert settings_of == [
        (way, mode, length)
        for mode in ("on", "off")
        for length in (40, 70)
        for way in ("plain", "speculative")
    ]
    assert lengths == {b"What": {40, 70}, b"ant\n": {40, 70}}
    for plain, drafted in zip(curves[::2], curves[1::2], strict=True):
        assert drafted.settings["enable_thinking"] == (drafted.settings["mode"] == "on")
        for curve in (plain, drafted):
            one, two = (point.cache_bytes for point in curve.points)
            assert one and two == 2 * one, "requests of one length hold as many pages each"
        ours, theirs = drafted.points[0].cache_bytes, plain.points[0].cache_bytes
        assert ours and theirs and ours > theirs, "the head has keys and values of its own"
    long, short = curves[2].points[0].cache_bytes, curves[0].points[0].cache_bytes
    assert long and short and long >= short


def test_contexts_that_do_not_fit_are_refused(finished: Path) -> None:
    config = load(finished, ["eval.load={concurrency: [1], contexts: [100]}"])
    assert filled_length(config.eval, 124) == 124
    with pytest.raises(ConfigError, match="100 tokens and a reply of 24 do not fit"):
        filled_length(config.eval, 123)
    with pytest.raises(ConfigError, match="contexts holds a number below 1"):
        load(finished, ["eval.load={contexts: [0]}"])


@pytest.mark.parametrize("tau", [1, 1.05, 1.5, 2.35, 3, 6])
def test_a_pattern_has_the_length_that_was_asked(tau: float) -> None:
    pattern = pattern_of(tau)
    assert 1 + sum(pattern) / len(pattern) == pytest.approx(tau)
    assert max(pattern) - min(pattern) <= 1


def test_imposed_acceptance_walks_to_the_deepest_node() -> None:
    """root ─┬─ a            of the first children a alone is accepted, behind b there is c."""
    tree = Tree(
        tokens=torch.tensor([[7, 8, 9, 10]]),
        parents=torch.tensor([[0, 0, 0, 2]]),
        tree_mask=torch.tensor([[0b0001, 0b0011, 0b0101, 0b1101]]),
        depth=torch.tensor([[0, 1, 1, 2]]),
    )
    imposed = ImposedAcceptance((2, 1, 0, 5), torch.device("cpu"))
    predicted = torch.tensor([[20, 21, 22, 23]])
    emitted = []
    for _ in range(4):
        output = imposed(tree, predicted, 3)
        emitted.append(output.tokens[0, : int(output.counts[0])].tolist())
    assert emitted == [[9, 10, 23], [9, 22], [20], [9, 10, 23]]


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).rglob("*"))


def test_simulated_acceptance_is_a_mode_of_its_own(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As much as was asked, whatever the head is worth; nothing of it enters the run."""
    generate = Engine.generate

    def endless(engine: Engine, requests: Iterable[Request]) -> Iterator[Completion]:
        each = list(requests)
        assert not any(request.stop_ids for request in each), "a token that nobody meant ends it"
        return generate(engine, each)

    monkeypatch.setattr(Engine, "generate", endless)
    config = load(finished)
    before, file = _files(config.run.uri), tmp_path / "simulated.json"
    asked = {"concurrency": [1, 2], "requests": 8}
    command = ["simulate", "-c", str(finished), f"eval.load={json.dumps(asked)}"]
    command += ["eval.tree={top_k: 1, steps: 3, nodes: 4}", "--json", str(file)]
    assert main([*command, "--acceptance", "1,2.5,4"]) == 0
    assert "imposed acceptance, not measured" in capsys.readouterr().out
    told = SimulatedLoad.model_validate_json(file.read_bytes())
    assert told.simulated and told.head == f"{config.run.uri}/train/head"
    assert {curve.name for curve in told.curves} == {"plain", "simulated"}
    points = list(told.points())
    assert [(each.imposed, each.concurrency) for each in points] == [
        (tau, count) for tau in (1.0, 2.5, 4.0) for count in (1, 2)
    ]
    for each in points:  # the last round of a reply is cut
        assert each.imposed - 0.25 < each.reached <= each.imposed
        assert each.gain == pytest.approx(each.simulated / each.plain)
        assert each.pays_from == pytest.approx(each.reached / each.gain)
    for curve in told.curves:
        assert {point.tokens for point in curve.points} == {8 * config.eval.max_new_tokens}
    assert _files(config.run.uri) == before
    assert main([*command, "--acceptance", "4.5"]) == 2
    assert "emits 1 to 4 tokens, not 4.5" in capsys.readouterr().err
    assert main([*command, "eval.max_new_tokens=100000"]) == 2
    assert "no prompt leaves room for its reply" in capsys.readouterr().err
    assert main([*command, "eval.tree=auto"]) == 2
    assert "tree: auto" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_head_that_is_not_there_yet_is_simulated_by_an_untrained_one(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    file = tmp_path / "simulated.json"
    command = ["simulate", "-c", str(finished), f"run.uri={tmp_path}/new", "--json", str(file)]
    command += [f"train.algorithm={algorithm}", f"eval.drafter.name={algorithm}"]
    command += ["--acceptance", "2", "eval.tree={top_k: 1, steps: 3, nodes: 4}"]
    command += ["eval.load={requests: 2}", "train.dflash={draft_vocab_size: 200, layers: 1}"]
    assert main(command) == 0
    told = SimulatedLoad.model_validate_json(file.read_bytes())
    (point,) = told.points()
    assert told.head == "untrained" and 1.7 < point.reached <= 2
    assert not (tmp_path / "new").exists()
    capsys.readouterr()
