"""`bench.drafters`: rows with heads of their own, prompts of a length, τ by context."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from bench import drafters
from bench.drafters import Row, of_length
from pipeline.config import Eagle3DrafterSection
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.eagle3.shape import HeadShape
from pipeline.heads.registry import save_head
from pipeline.records import TargetContract
from tests.heads.conftest import make_head
from tests.heads.test_dflash_import import drafter


def test_a_row_names_its_head_and_its_settings() -> None:
    row = Row.parse("eagle3:head=some/dir:draft_window=256")
    assert (
        row.head == Path("some/dir")
        and row.section.settings(Eagle3DrafterSection).draft_window == 256
    )
    assert Row.parse("ngram").head is None
    for text in ("medusa", "eagle3:draft_window=wide", "eagle3:nothing=1"):
        with pytest.raises(argparse.ArgumentTypeError, match=text.split(":")[0]):
            Row.parse(text)


@pytest.mark.parametrize("tokens", [4, 7, 12, 40])
def test_prompts_of_a_length_begin_as_all_do_and_end_as_their_question(tokens: int) -> None:
    questions = [(1, 2, 10 + n, 20 + n, 30 + n, 40 + n) for n in range(3)]
    for index, question in enumerate(questions):
        prompt = of_length(questions, index, tokens)
        assert len(prompt) == tokens and prompt[:2] == (1, 2)
        assert prompt[2:][-4:] == question[2:][-min(4, tokens - 2) :]


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.drafters", *arguments])
    drafters.main()


def test_tau_by_context_in_one_table(
    tiny_target: Path,
    contract: TargetContract,
    shape: HeadShape,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(1)
    save_head(tmp_path / "eagle3", make_head(shape), HeadCard(contract))
    save_head(tmp_path / "dflash", drafter(tiny_target), HeadCard(contract))
    common = ["--target", str(tiny_target), "--prompts", "1", "--new-tokens", "8"]
    common += ["--threads", "1", "--out", str(tmp_path), "--sets", "40,80,999999"]
    rows = f"ngram,eagle3:head={tmp_path}/eagle3,eagle3,dflash:head={tmp_path}/dflash,self_spec"
    _run(monkeypatch, *common, "--tree", "3/2/6", "--rows", rows)
    shown = capsys.readouterr().out
    assert "999999: left out, 999,999 tokens are more than the" in shown
    assert "  eagle3  " in shown and "left out, no --head of it" in shown
    figures = json.loads((tmp_path / "drafters.json").read_text())["figures"]
    named = {name.partition(".")[0] for name in figures}
    assert named == {"40", "80"} and len(figures) == 8
    assert all(each["tau"] >= 1 and each["tree"] == "3/2/6" for each in figures.values())
    assert figures["80.self_spec"]["tau"] > 2, "everything is visible to it"
    table = shown.splitlines()[-7:-1]
    assert table[0].split() == ["τ", "40", "80", "999999"]
    assert [line.split()[-1] for line in table[1:]] == ["–"] * 5
    with pytest.raises(SystemExit, match=r"no config\.json"):
        _run(monkeypatch, *common, "--rows", f"eagle3:head={tmp_path}")
    save_head(tmp_path / "other", make_head(shape), HeadCard(contract))
    two = ["--head", f"{tmp_path}/eagle3", f"{tmp_path}/other"]
    with pytest.raises(SystemExit, match="several heads are for eagle3: name one"):
        _run(monkeypatch, *common, *two, "--rows", "eagle3")
