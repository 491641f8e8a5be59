"""Several processes with one target: the same states, and no one left waiting."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.config import TargetSection, parse
from pipeline.errors import ConfigError, TargetError
from pipeline.target.open import open_target
from pipeline.target.parallel import joined

SaveTarget = Callable[..., Path]


class Ended(NamedTuple):
    """What one process left."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def save_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> SaveTarget:
    """`save_target(name, family, key=…)` → a random target like the tiny one, but for the keys."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_model: Any = AutoModelForCausalLM.from_config

    def save(name: str, family: str, **keys: Any) -> Path:
        directory = tmp_path_factory.mktemp("targets") / name
        shutil.copytree(tiny_target, directory)
        own = json.loads((tiny_target / "config.json").read_text())
        shape = {
            key: own[key]
            for key in own
            if key.startswith(("num_", "vocab")) or key.endswith(("_size", "_embeddings"))
        }
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**shape, "initializer_range": 0.2, **keys})
        make_model(config).save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="module")
def ended(
    save_target: SaveTarget, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Ended]]:
    """The two processes of every case in ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    targets = [
        save_target("plain", "llama"),
        save_target("tied", "llama", tie_word_embeddings=True, vocab_size=97),
        save_target("qwen3", "qwen3", head_dim=16),
    ]
    command = [sys.executable, "-m", "tests.target.ranks", str(folder), *map(str, targets)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return {
        name: [
            Ended(code, *((folder / f"{name}.{rank}.{end}").read_text() for end in ("out", "err")))
            for rank, code in enumerate(codes)
        ]
        for name, codes in json.loads(done.stdout.splitlines()[-1]).items()
    }


def test_two_processes_compute_the_states_of_one(ended: dict[str, list[Ended]]) -> None:
    """Grouped heads, a tied embedding with an odd number of rows, norms of single heads."""
    ranks = ended["states"]
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert "rank 0 speaks" in ranks[0].out and "speaks" not in ranks[1].out
    half_of_the_heads = {"plain": [16, 32], "tied": [16, 32], "qwen3": [32, 32]}
    for rank in ranks:
        measured = json.loads(rank.out.splitlines()[-1])
        assert {name: one["held"] for name, one in measured.items()} == half_of_the_heads
        assert all(0 < one["apart"] < 1e-5 for one in measured.values()), measured


def test_every_process_has_the_items_of_rank_zero(ended: dict[str, list[Ended]]) -> None:
    assert [json.loads(rank.out) for rank in ended["words"]] == [["one", {"two": [2]}, None]] * 2


GONE = "another of the 2 processes has ended or does not answer"


@pytest.mark.parametrize(
    ("case", "codes", "errors"),
    [
        ("rank_zero_fails", [75, 75], ["parts are missing", ""]),
        ("all_fail", [2, 2], ["a bad sample", ""]),
        ("one_cannot_load", [2, 2], ["", "no weights on this machine"]),
        ("rank_one_fails_alone", [75, 2], [GONE, "a card without memory"]),
        ("rank_one_is_killed", [75, -9], [GONE, ""]),
        ("rank_one_hangs", [75, 75], [GONE, GONE]),
    ],
)
def test_what_ends_one_process_ends_the_other(
    case: str, codes: list[int], errors: list[str], ended: dict[str, list[Ended]]
) -> None:
    """Within seconds, with the code of the one that failed, which alone says why."""
    ranks = ended[case]
    assert [rank.code for rank in ranks] == codes, ranks[0].err + ranks[1].err
    for rank, text in zip(ranks, errors, strict=True):
        lines = [line for line in rank.err.splitlines() if line.startswith("error:")]
        assert len(lines) == bool(text) and all(text in line for line in lines), lines
        assert "Traceback" not in rank.err


@pytest.mark.parametrize(
    ("family", "keys", "processes", "problem"),
    [
        ("llama", {}, 3, "num_attention_heads=4 cannot be shared by 3 processes"),
        ("llama", {}, 4, "num_key_value_heads=2 cannot be shared by 4 processes"),
        (
            "gpt_oss",
            {"num_local_experts": 4},
            2,
            "transformers has no plan for splitting the layers of gpt_oss",
        ),
    ],
)
def test_a_target_that_cannot_be_split_is_refused(
    family: str, keys: dict[str, Any], processes: int, problem: str, save_target: SaveTarget
) -> None:
    section = TargetSection(source=str(save_target("odd", family, **keys)), device="cpu")
    fix = "features.parallel=none and features.device_map=auto place whole layers"
    with pytest.raises(TargetError, match=f"{problem} .*{fix}") as caught:
        open_target(section).load(processes=processes)
    assert ("start 2 processes" in caught.value.fix) == (family == "llama")


def test_a_launcher_without_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes would do the whole work."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    problem = "4 processes were started, and each would do all of it"
    with (
        pytest.raises(ConfigError, match=rf"{problem} \(fix: set features.parallel=tensor"),
        joined("none", TargetSection(source="none"), stage="features"),
    ):
        pass


def test_a_target_is_split_one_way() -> None:
    features = {"parallel": "tensor", "device_map": "auto"}
    with pytest.raises(ConfigError, match=r"features: .* choose one"):
        parse({"target": {"source": "none"}, "features": features})
