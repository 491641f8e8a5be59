"""What README.md and docs/ show is there: links, paths, commands, keys, defaults, rendered jobs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import parse_arguments
from pipeline.config import RunConfig, _fields_at, overridden, parse
from pipeline.jobs import render

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
#: What a documented command writes into the tree.
WRITTEN = {"tests/gpu_results/"}
#: What every run needs and a command in a document leaves to the reader's configuration.
TREE: dict[str, Any] = {
    "target": {"source": "org/model"},
    "synth": {"sources": [{"source": "hub:org/prompts"}]},
}


def test_rendered_jobs_follow_the_table_of_exit_codes() -> None:
    """The page's example of `jobs`, and what its table says of 0, 1, 2, 75, 130 and crashes."""
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGES["docs/fleet.md"], re.DOTALL)
    tree: dict[str, Any] = {
        "run": {"uri": "gs://bucket/heads/x"},
        "eval": {"sources": [{"source": "hub:org/questions"}]},
    }
    config = parse(TREE | tree | yaml.safe_load(example))
    _, job = yaml.safe_load_all(render(config, "kubernetes")["features.yaml"])
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert job["spec"]["backoffLimitPerIndex"] == 20
    script = render(config, "slurm")["features.sbatch"]
    assert "case $code in\n  0 | 1 | 2) ;;" in script
    assert "75 | 130 | 143) again=yes ;;" in script
    assert '*) [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || again=yes ;;' in script


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        is_there = path.exists()
        if is_there and anchor:
            is_there = anchor in anchors(path.read_text(encoding="utf-8"))
        lost += [] if is_there else [target]
    assert not lost


def missing_paths(text: str) -> list[str]:
    """Paths (`pipeline/train/init.py`) and modules (`pipeline.jobs.launch`) that are not there."""
    rooms = "bench|configs|docs|experiments|pipeline|tests"
    paths = set(re.findall(rf"(?<![\w./:-])(?:{rooms})/[\w./-]*[\w/]", text)) - WRITTEN
    modules = set(re.findall(r"(?<![\w./-])(?:bench|pipeline|tests)(?:\.[a-z_]\w*)+", text))
    missing = {path for path in paths if not (ROOT / path).exists()}
    for module in modules - paths:
        path = ROOT.joinpath(*module.split("."))
        if not (path.is_dir() or path.with_suffix(".py").is_file()):
            missing.add(module)
    return sorted(missing)


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_and_modules_exist(page: str) -> None:
    assert missing_paths(PAGES[page]) == []


def test_missing_paths_are_caught() -> None:
    text = "`pipeline/train/init.py`, `pipeline/heads/`, `pipeline.api`, gs://bucket/docs/x, "
    assert missing_paths(text) == []
    text += "pipeline/train/start.py, configs/none.yaml, pipeline.eagle3.ttt, bench/none"
    missing = ["bench/none", "configs/none.yaml", "pipeline.eagle3.ttt", "pipeline/train/start.py"]
    assert missing_paths(text) == missing


def commands(text: str) -> Iterator[list[str]]:
    """The words after `eagle3` of every command in a block, however it is launched."""
    text = re.sub(r"\\\n\s*", " ", text)
    starts = r"(?:eagle3|(?:torchrun|deepspeed)[^\n]*? pipeline\.cli)"
    for line in re.findall(rf"^    {starts} +(.*)$", text, re.M):
        yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_ones_that_eagle3_takes(page: str) -> None:
    for words in commands(PAGES[page]):
        arguments = vars(parse_arguments(words))  # exits where it does not
        overridden(dict(TREE), arguments.get("overrides", []))  # raises for an unknown key


def test_commands_are_found() -> None:
    shown = [list(commands(text)) for text in PAGES.values()]
    assert sum(map(len, shown)) > 40
    with pytest.raises(SystemExit):
        parse_arguments(["inspect", "HEAD", "what", "it", "is"])


@pytest.mark.parametrize("page", PAGES)
def test_make_has_the_targets(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))
    named = re.findall(r"(?:^    |`)make ((?:[a-z][a-z-]* ?)+)", PAGES[page], re.M)
    assert {target for targets in named for target in targets.split()} <= known


@pytest.mark.parametrize("page", PAGES)
def test_named_keys_are_keys_of_the_configuration(page: str) -> None:
    text = re.sub(r"\[[^\]]*\]\([^)]*\)", "", PAGES[page])
    sections = "|".join(RunConfig.model_fields)
    #: Not `run.yaml`, `/train.json`, `run.store_…_seconds`.
    key = rf"(?<![\w./-])(?:{sections})(?:\.[a-z][a-z_0-9]*)+(?![\w…/])"
    named = {each for each in re.findall(key, text) if not _is_file(each)}
    assert {each for each in named if not _is_key(each)} == set()


def _is_file(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("yaml", "json", "jsonl", "html", "md", "sbatch", "gz")


def _is_key(name: str) -> bool:
    *section, key = name.split(".")
    return key in _fields_at(section)


def test_documented_defaults_are_those_of_the_configuration() -> None:
    """The table of docs/training.md; `off` and `the target's` are None or 0."""
    table = PAGES["docs/training.md"].partition("## Switches")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.M)
    checked = 0
    for keys, defaults in rows:
        names, said = keys.replace("`", "").split(", "), defaults.replace("`", "").split(", ")
        for name, value in zip(names, said * len(names) if len(said) == 1 else said, strict=True):
            path = name if name.startswith("features.") else f"train.{name}"
            *section, key = path.split(".")
            default = _fields_at(section)[key].get_default(call_default_factory=True)
            if value in ("off", "the target's"):
                assert not default, name
            else:
                assert default == _read(value), name
            checked += 1
    assert checked > 30


def _read(value: str) -> Any:
    """1e-3 is a text to YAML."""
    try:
        return float(value)
    except ValueError:
        return yaml.safe_load(value)
