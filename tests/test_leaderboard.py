"""The leaderboard's files, and what its table says of known counts."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.leaderboard.experiment import Experiment, configured, read_experiments
from bench.leaderboard.peers import train_peer
from bench.leaderboard.results import CellResult, PromptResult, keep_results, read_results
from bench.leaderboard.runs import TREE, Bench, _changes
from bench.leaderboard.table import (
    BEGIN,
    END,
    Row,
    Spread,
    Spreads,
    interval,
    page,
    replace_rows,
    rows_of,
    table,
)
from bench.leaderboard.usage import Trained, Usage, run_measured
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError, Eagle3Error, StageConflict
from pipeline.records import Stage
from pipeline.store.manifest import Awaited, Begin, stage_location

#: Of seeds that are alike.
ALIKE = Spreads(Spread(0.0, 1), Spread(0.0, 1))
ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "configs/smollm2-135m.yaml"


def cell(row: str, seed: int, tokens: list[int], machine: str = "a CPU") -> CellResult:
    """Prompts of ten rounds each."""
    prompts = [
        PromptResult(name=f"set/{index}", rounds=10, tokens=count)
        for index, count in enumerate(tokens)
    ]
    return CellResult(
        row=row,
        budget=1000,
        seed=seed,
        data_tokens=1000,
        trained_tokens=3000,
        cpu_hours=0.5,
        parameters=10,
        machine=machine,
        commit="abc",
        questions="def",
        tree=TREE,
        new_tokens=8,
        prompts=tuple(prompts),
    )


def row(name: str, *tokens: list[int]) -> Row:
    cells = tuple(cell(name, seed, counts) for seed, counts in enumerate(tokens))
    return Row(Experiment(name=name, about=f"About {name}."), 1000, cells)


def test_every_experiment_makes_a_configuration() -> None:
    experiments = read_experiments(ROOT / "experiments", [])
    assert experiments[0].name == "default"
    drawn = ["synth.max_prompts=10"]  # as the leaderboard's own overrides do
    default = configured(BASE, experiments[0], drawn)
    for experiment in experiments[1:]:
        changed = configured(BASE, experiment, drawn)
        stages = [
            (each.target, each.synth, each.features, each.train, each.eval)
            for each in (changed, default)
        ]
        assert experiment.about.endswith(".")
        assert experiment.peer or stages[0] != stages[1], experiment.name
        assert changed.synth and default.synth
        shares = {} if experiment.name == "plain-mix" else default.synth.category_shares
        assert changed.synth.category_shares == shares, experiment.name


def test_a_row_against_another_has_its_changes_too(tmp_path: Path) -> None:
    for name, text in {
        "default": "changes: {synth: {max_prompts: 9, category_shares: {chat: 3}}}",
        "base": "changes: {train: {epochs: 2, head_config: {fc_norm: true}}}",
        "next": "against: base\nchanges: {train: {epochs: 4, head_config: {norm_output: true}}}",
        "last": "against: next\nchanges: {features: {encoding: bf16}}",
        "even": "changes: {synth: {category_shares: {}}}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(f"about: {name}.\n{text}\n")
    config = configured(BASE, read_experiments(tmp_path, ["last"])[0], [])
    head = config.train.head_config
    assert (config.train.epochs, head.fc_norm, head.norm_output) == (4, True, True)
    assert config.synth and config.features.encoding == "bf16"
    assert config.synth.category_shares == {"chat": 3}
    even = configured(BASE, read_experiments(tmp_path, ["even"])[0], [])
    assert even.synth and even.synth.max_prompts == 9 and even.synth.category_shares == {}
    (tmp_path / "base.yaml").write_text("about: base.\nagainst: last\n")
    with pytest.raises(ConfigError, match="no other experiment"):
        read_experiments(tmp_path, ["last"])  # a circle
    (tmp_path / "base.yaml").unlink()
    with pytest.raises(ConfigError, match="no other experiment"):
        read_experiments(tmp_path, ["last"])


def test_rows_are_compared_with_what_they_name() -> None:
    rows = [row("default", [10, 10]), row("base", [20, 20]), row("other", [21, 21])]
    other = Experiment(name="other", about="About other.", against="base")
    lines = table([*rows[:2], rows[2]._replace(experiment=other)], ALIKE).splitlines()
    assert "| `base` +0.100 (+0.10 … +0.10) |" in lines[2] and "| `default` +" in lines[3]


def test_what_is_no_experiment_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment lk-hibrid"):
        read_experiments(ROOT / "experiments", ["lk-hibrid"])
    (tmp_path / "default.yaml").write_text("about: x\n")
    (tmp_path / "odd.yaml").write_text("about: x\nchange: {}\n")
    with pytest.raises(Eagle3Error, match="change"):
        read_experiments(tmp_path, [])
    (tmp_path / "odd.yaml").write_text("about: x\nchanges: {train: {epoch: 3}}\n")
    with pytest.raises(ConfigError, match="epoch"):
        configured(BASE, read_experiments(tmp_path, ["odd"])[0], [])


def test_a_difference_of_the_same_prompts_is_surer_than_either_row() -> None:
    """One row emits a token more on each prompt, and prompts differ by much more."""
    tokens = [12, 18, 24, 30, 13, 17, 29, 22]
    default, other = row("default", tokens, tokens), row("other", *[[n + 1 for n in tokens]] * 2)
    assert default.tau() == pytest.approx(sum(tokens) / 80)
    assert default.draws().std() > 0.1
    lines = table([default, other], ALIKE).splitlines()
    assert "| 1,000 | `other` | 2.163 (1.6" in lines[2]
    assert "| `default` +0.100 (+0.10 … +0.10) | 2 | 3.0 | 0.50 | abc |" in lines[2]
    assert lines[3].startswith("| 1,000 | `default` | 2.062")


def test_a_difference_is_over_the_seeds_that_both_have() -> None:
    """The other row has the second and third seed, in which the default is 1 and then 2 better."""
    default = row("default", [10, 10], [22, 22], [33, 33])
    cells = tuple(cell("other", seed, [count, count]) for seed, count in ((1, 21), (2, 31)))
    other = Row(Experiment(name="other", about="About other."), 1000, cells)
    [line] = [line for line in table([default, other], ALIKE).splitlines() if "`other`" in line]
    assert "| 2.600 (" in line and "| `default` -0.150 (-0.15 … -0.15) | 2 |" in line
    strangers = Row(other.experiment, 1000, (cell("other", 7, [10, 10]),))
    assert "1.000 (1.00 … 1.00) |  | 1 |" in table([default, strangers], ALIKE)
    assert Spreads.of([default, strangers]).difference.free == 0


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_an_interval_holds_what_is_true_as_often_as_it_says(seeds: int) -> None:
    """Two rows that are equal but for what their seeds are worth; others say how much that is."""
    random, runs, held, blind = np.random.default_rng(seeds), 60, 0, 0

    def drawn(prompts: Any, count: int) -> Row:
        worth, noise = random.normal(0, 0.4, (count, 1)), random.normal(0, 0.5, (count, 40))
        return row("any", *(50 * (prompts + worth + noise)).astype(int).tolist())

    for _ in range(runs):
        prompts, spread = random.normal(20, 4, 40), []
        for _ in range(8):
            mine, theirs = drawn(prompts, 3), drawn(prompts, 3)
            spread.append(mine.tau_by_seed() - theirs.tau_by_seed())
        mine, theirs = drawn(prompts, seeds), drawn(prompts, seeds)
        draws = mine.draws() - theirs.draws()
        for known in (Spread.of(spread), Spread(0.0, 0)):
            low, high = interval(draws, mine, known)
            held += bool(known.free) and low <= 0 <= high
            blind += not known.free and low <= 0 <= high
    assert held >= 0.9 * runs
    assert blind < 0.75 * runs  # planted: of prompts alone


def test_the_newest_result_of_a_cell_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read_results(path) == []
    first = [cell("other", seed, [10, 20]) for seed in (1, 0)]
    assert keep_results(path, first) == first[::-1]
    again, elsewhere = cell("other", 1, [11, 21]), cell("other", 1, [12, 22], machine="b CPU")
    assert keep_results(path, [elsewhere, again]) == [first[1], again, elsewhere]
    assert read_results(path) == [first[1], again, elsewhere]
    path.write_text(path.read_text().replace('"seed":0', '"seed":"x"'))
    with pytest.raises(Eagle3Error, match=r"results\.jsonl:1: seed"):
        read_results(path)


def test_machines_have_tables_of_their_own() -> None:
    """A set of data is worth more than a seed, so nothing is compared across machines."""
    cells = [cell("default", 0, [10, 20]), cell("gone", 0, [11, 21])]
    cells += [cell("default", 0, [30, 40], machine="b CPU")]
    known = {"default": Experiment(name="default", about="About default.")}
    here, there = page(rows_of(cells, known)).split("\n\n**")
    assert here.startswith("**a CPU**: 2 prompts, tree 5/4/16, at most 8 tokens\n\n| training")
    assert "1.600" in here and "+0.100" in here and "3.500" not in here
    assert there.startswith("b CPU") and "3.500" in there and "+" not in there.partition("* `")[0]
    assert "* `default`: About default.\n* `gone`: no longer" in there


def test_data_made_at_another_time_have_a_table_of_their_own() -> None:
    """So have those of before, whose cells do not say when."""
    fresh = cell("default", 0, [30, 40]).model_copy(update={"since": "2026-11-28 09:20"})
    cells = [cell("default", 0, [10, 20]), cell("other", 0, [11, 21]), fresh]
    tables = page(rows_of(cells, {}))
    assert tables.count("| training data") == 2
    assert "**a CPU**, data of 2026-11-28 09:20: 2 prompts" in tables


def test_a_process_is_measured_and_its_failure_ends_the_bench() -> None:
    held = bytearray(1_500_000_000)  # which a child counts that is forked from here
    code = "import numpy, time; x = numpy.ones(40_000_000)\nwhile time.process_time() < 1: pass"
    usage = run_measured([sys.executable, "-c", code], os.environ)
    assert usage.peak_gb and 0.32 < usage.peak_gb < 1 and 1 <= usage.cpu_hours * 3600 < 20
    with pytest.raises(SystemExit, match="3"):
        run_measured([sys.executable, "-c", "raise SystemExit(3)"], os.environ)
    assert held


def test_a_row_of_another_trainer_needs_its_interpreter(tmp_path: Path) -> None:
    [peer] = read_experiments(ROOT / "experiments", ["specforge"])
    config = configured(BASE, peer, ["synth.max_prompts=9", f"run.uri={tmp_path}"])
    with pytest.raises(ConfigError, match="--peer-python"):
        train_peer(config, peer, None)
    with pytest.raises(Eagle3Error, match="trainer"):
        Experiment.from_fields(
            {"name": "x", "about": "X.", "peer": {"trainer": "nobody"}}, where="x", fix="y"
        )


def test_what_is_kept_stands_in_the_document() -> None:
    kept = read_results(ROOT / "experiments/results.jsonl")
    known = {each.name: each for each in read_experiments(ROOT / "experiments", [])}
    document = (ROOT / "docs/leaderboard.md").read_text()
    assert replace_rows(document, page(rows_of(kept, known))) == document


def test_all_seeds_share_data_and_a_result_of_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages and decoding are left out here: which of them a cell asks for, and what it keeps."""
    asked: list[tuple[str, str]] = []

    def run(bench: Bench, stage: Stage, overrides: Sequence[str]) -> Usage:
        config = load(BASE, overrides)
        uri = Path(config.run.uri)
        asked.append((stage, f"{uri.parent.name}/{uri.name}"))
        parent = None
        if config.train.follow and stage == "train":
            states = Begin.of(config, "features", None, {})
            states.create(stage_location(str(uri), "features"))
            parent = Awaited.of(states)
        Begin.of(config, stage, parent, {}).create(stage_location(str(uri), stage))
        return Usage(0.5, 1.5)

    def train(bench: Bench, _: RunConfig, overrides: Sequence[str]) -> Trained:
        return Trained(run(bench, "train", overrides), 1000, 3000, 10)

    def measured(bench: Bench, config: RunConfig, *_: object) -> CellResult:
        made = cell("plain-mix", config.run.seed, [10, 20])
        return made.model_copy(update={"questions": bench._questions_digest()})

    monkeypatch.setattr(Bench, "_run", run)
    monkeypatch.setattr(Bench, "_train", train)
    monkeypatch.setattr(Bench, "_measured", measured)
    [plain] = read_experiments(ROOT / "experiments", ["plain-mix"])

    def bench(new_tokens: int = 8, *common: str) -> Bench:
        return Bench(BASE, tmp_path, [], common=common, prompts_per_set=2, new_tokens=new_tokens)

    for seed in (0, 1, 1):
        assert bench().result(plain, 1000, seed).seed == seed
    trained = [("train", f"plain-mix/1000-{seed}") for seed in range(2)]
    assert set(asked) == {("features", "data/0"), ("synth", "data/0"), *trained}
    assert [asked.count(one) for one in trained] == [1, 1]
    links = [tmp_path / "plain-mix" / f"1000-{seed}" / "synth" for seed in range(2)]
    assert {link.resolve() for link in links} == {tmp_path / "data/0/synth"}
    for other in (bench(9), bench(8, "train.epochs=7")):
        with pytest.raises(StageConflict, match="another row, data set or evaluation"):
            other.result(plain, 1000, 0)
    # A lookup is beside the head of another row, which is there already.
    asked.clear()
    rival = Experiment(name="beside", about="", against="plain-mix")
    beside = rival.model_copy(
        update={"changes": {**plain.changes, "eval": {"drafter": {"lookup": {}}}}}
    )
    with pytest.raises(ConfigError, match="row plain-mix has no head for 4000-0 yet"):
        bench().result(beside, 4000, 0)
    for _ in range(2):
        made = bench().result(beside, 1000, 0)
        assert (made.trained_tokens, made.cpu_hours) == (3000, 0.5)
    assert "train" not in dict(asked)
    head = tmp_path / "beside/1000-0/train"
    assert head.resolve() == tmp_path / "plain-mix/1000-0/train"
    # States of another kind are of the same samples; other samples have states of their own.
    asked.clear()
    bench(8, "features.encoding=bf16").result(plain, 2000, 0)
    bench(8, "synth.max_new_tokens=7").result(plain, 3000, 0)
    assert {("features", "data/1"), ("features", "data/2")} < set(asked)
    assert (tmp_path / "data/1/synth").resolve() == tmp_path / "data/0/synth"
    assert not (tmp_path / "data/2/synth").is_symlink()
    # Training that follows deletes states: none that others read.
    asked.clear()
    [follows] = read_experiments(ROOT / "experiments", ["window-10"])
    for _ in range(2):
        bench(8, "synth.max_prompts=10").result(follows, 1000, 0)
    assert sorted(stage for stage, _ in asked) == ["synth", "train"]
    assert not (tmp_path / "window-10/1000-0/features").is_symlink()


def test_processes_that_begin_together_choose_the_same_folder(tmp_path: Path) -> None:
    """Before either has begun a stage in it."""
    [row, other] = read_experiments(ROOT / "experiments", ["default", "alternatives"])
    together, drawn = threading.Barrier(4), ["synth.max_prompts=10"]

    def choose(experiment: Experiment) -> Path:
        bench = Bench(BASE, tmp_path, [], common=drawn, prompts_per_set=2, new_tokens=8)
        config = configured(BASE, experiment, drawn)
        together.wait()
        return bench._data(config)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(choose, [row] * 4)) == {tmp_path / "data/0"}
        assert set(pool.map(choose, [other] * 4)) == {tmp_path / "data/1"}
    assert (tmp_path / "data/1/synth").readlink() == Path("../0/synth")
    assert {each.name for each in tmp_path.iterdir()} == {"data"}


def test_a_key_that_is_younger_than_a_result_changes_nothing(tmp_path: Path) -> None:
    """At its default; results take hours."""
    [plain] = read_experiments(ROOT / "experiments", ["plain-mix"])
    config = configured(BASE, plain, [f"run.uri={tmp_path}"])
    begun = Begin.of(config, "train", None, {})
    assert begun.shaping is not None
    older = {name: value for name, value in begun.shaping["train"].items() if name != "clip_norm"}
    shaping = {**begun.shaping, "train": older}
    begun.model_copy(update={"shaping": shaping, "config_hash": "another"}).create(
        stage_location(str(tmp_path), "train")
    )
    assert _changes(config, tmp_path, "train") == {}
    clipped = configured(BASE, plain, [f"run.uri={tmp_path}", "train.clip_norm=9"])
    assert _changes(clipped, tmp_path, "train") == {"train.clip_norm": ("0.5", "9.0")}


def test_the_table_replaces_the_one_before_and_nothing_else() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_rows(document, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert BEGIN in (ROOT / "docs/leaderboard.md").read_text()
