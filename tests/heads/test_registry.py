"""Algorithm and drafter of an installed package: training to lossless decoding (docs/heads.md)."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.config import DrafterSection, RunConfig, TreeSection
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.decoder.request import Request
from pipeline.drafters.registry import load_drafter
from pipeline.errors import ConfigError, HeadError
from pipeline.exchange.export import export_head
from pipeline.heads.base import DraftingHead
from pipeline.heads.registry import algorithm_of, algorithms, open_head
from pipeline.store.states import StatesSample
from pipeline.target.open import open_target
from pipeline.train.plan import plan
from pipeline.train.stage import run
from tests.heads.conftest import edit
from tests.train.conftest import states, store_states, target_directory, tiny_config
from tests.train.runs import Configure, Store, head_of, lines_of, stop_at, without_speed

__all__ = ["states", "store_states", "target_directory", "tiny_config"]  # fixtures
TOY = Path(__file__).parent / "toy_head"
PAGE = Path(__file__).parents[2] / "docs/heads.md"
ENTRY_POINTS = (
    "[eagle3.heads]\ntoy = toy_head:ALGORITHM\n[eagle3.drafters]\necho = toy_head.echo:echo\n"
)
SETTINGS = {"algorithm": "toy", "options": {"draft_vocab_size": 60}, "dtype": "float32"}
TREE = TreeSection(top_k=2, steps=3, nodes=6)

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(entry_points)` puts the distribution toy-head on the path, as pip would."""
    site = tmp_path / "site-packages"

    def put(points: str) -> None:
        shutil.copytree(TOY, site / "toy_head", ignore=shutil.ignore_patterns("__pycache__"))
        (site / "toy_head-1.0.dist-info").mkdir()
        (site / "toy_head-1.0.dist-info/METADATA").write_text("Name: toy-head\nVersion: 1.0\n")
        (site / "toy_head-1.0.dist-info/entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(str(site))
        algorithms.cache_clear()

    yield put
    algorithms.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_head"]:
        del sys.modules[name]


@pytest.fixture
def trained(install: Install, tiny_config: Configure, store_states: Store) -> RunConfig:
    """A run whose toy head was trained."""
    install(ENTRY_POINTS)
    config = tiny_config(**SETTINGS, epochs=30, learning_rate=1e-2, checkpoint_every=7)
    store_states(config)
    run(config)
    return config


def replies(
    config: RunConfig, samples: list[StatesSample], name: str, head: DraftingHead | None
) -> list[tuple[tuple[int, ...], int]]:
    """Token ids and rounds of each prompt, decoded together in fp32."""
    target = open_target(config.target)
    layers = target.contract.capture_layers
    model = DecoderModel.load(
        target.directory, layers, device=torch.device("cpu"), dtype=torch.float32, max_length=80
    )
    requests = [
        Request(each.sample_id, tuple(each.token_ids[: 4 + n].tolist()), 24, ())
        for n, each in enumerate(samples)
    ]
    factory = load_drafter(DrafterSection(name=name), model, target, head)
    engine = Engine(model, drafter=factory(TREE) if factory else None, slots=4)
    done = {each.request_id: each for each in engine.generate(requests)}
    ordered = [done[request.request_id] for request in requests]
    return [(each.token_ids, each.statistics.rounds) for each in ordered]


def test_a_toy_head_trains_resumes_opens_and_decodes_losslessly(
    trained: RunConfig, states: list[StatesSample]
) -> None:
    lines = lines_of(trained)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    head, card = open_head(str(head_of(trained)), expected=open_target(trained.target).contract)
    assert algorithm_of(head).name == "toy" and head.shape.draft_vocab_size == 60
    assert plan(trained).parameters == card.metrics["parameters"] == head.count_parameters()
    plain, drafted = (replies(trained, states[:6], *of) for of in (("none", None), ("toy", head)))
    assert [ids for ids, _ in drafted] == [ids for ids, _ in plain]
    assert sum(rounds for _, rounds in drafted) < 0.9 * sum(rounds for _, rounds in plain)
    stored = (head_of(trained) / "model.safetensors").read_bytes()
    stop_at(trained, 7)
    run(trained)
    assert without_speed(lines_of(trained)) == without_speed(lines)
    assert (head_of(trained) / "model.safetensors").read_bytes() == stored


def test_what_a_toy_head_cannot_do_is_refused(trained: RunConfig, tiny_config: Configure) -> None:
    with pytest.raises(HeadError, match="sglang has no place for a head of algorithm toy"):
        export_head(str(head_of(trained)), format="sglang", out=f"{trained.run.uri}/out")
    edit(head_of(trained), sliding_window=7)
    with pytest.raises(HeadError, match="sliding_window is 7"):
        open_head(str(head_of(trained)))


def test_a_drafter_of_another_package_decodes_losslessly(
    install: Install, tiny_config: Configure, states: list[StatesSample]
) -> None:
    install(ENTRY_POINTS)
    plain, drafted = (replies(tiny_config(), states[:6], name, None) for name in ("none", "echo"))
    assert [ids for ids, _ in drafted] == [ids for ids, _ in plain]


@pytest.mark.parametrize(
    ("point", "problem"),
    [
        ("toy = toy_head.shape:SHAPE", "is not a HeadAlgorithm named toy"),
        ("other = toy_head:ALGORITHM", "is not a HeadAlgorithm named other"),
        ("eagle3 = pipeline.heads.eagle3:ALGORITHM", "eagle3 is a name of this package"),
    ],
)
def test_wrong_entry_points_are_refused(install: Install, point: str, problem: str) -> None:
    install(f"[eagle3.heads]\n{point}\n")
    with pytest.raises(ConfigError, match=problem) as caught:
        algorithms()
    assert point.split(" = ")[1] in str(caught.value.where)


def test_the_page_shows_the_package() -> None:
    """Files of the listing, and code that stands in them."""
    page, sources = PAGE.read_text(), {p.name: p.read_text() for p in TOY.glob("*.py")}
    listed = re.findall(r"^      (\w+\.py)  ", page, re.M)
    assert sorted(listed) == sorted(sources)
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert any(block in source for source in sources.values()), block
    (entries,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    points = entries.replace('project.entry-points."', "").replace('"', "")
    assert points.replace("\n\n", "\n") == ENTRY_POINTS
