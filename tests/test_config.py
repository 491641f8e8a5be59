"""The configuration: strict, frozen, overridable, and explained where it is declared."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline import cli
from pipeline.config import (
    NgramSection,
    RunConfig,
    RunSection,
    Section,
    TrainSection,
    _section_in,
    cache_directory,
    cpu_kernels,
    load,
    parse,
    store_retry_seconds,
    store_timeout_seconds,
    take_settings,
)
from pipeline.errors import ConfigError
from pipeline.records import STAGES, Stage

ROOT = Path(__file__).resolve().parents[1]
TREE: dict[str, Any] = {
    "target": {"source": "some/model"},
    "synth": {"sources": [{"source": "prompts.jsonl"}]},
}


def with_value(dotted: str, value: Any) -> dict[str, Any]:
    """TREE with one more key."""
    section, key = dotted.split(".", 1)
    return {**TREE, section: {**TREE.get(section, {}), key: value}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "# a comment\ntarget:\n  source: some/model\n"
        "synth:\n  sources:\n    - source: prompts.jsonl\n",
        encoding="utf-8",
    )
    return path


def test_defaults_and_file_make_a_config(file: Path) -> None:
    config = load(file)
    assert config.target.source == "some/model"
    assert config.run.threads == len(os.sched_getaffinity(0)), "0 is resolved before freezing"
    assert config == parse(TREE)


@pytest.mark.parametrize(
    ("dotted", "fix"),
    [
        ("synth.max_promts", "did you mean 'max_prompts'?"),
        ("target.sauce", "did you mean 'source'?"),
        ("train.learning_rat", "did you mean 'learning_rate'?"),
    ],
)
def test_unknown_key_names_the_nearest(dotted: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_value(dotted, 1), where="run.yaml")
    assert caught.value.where == f"run.yaml: {dotted}"
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("tree", "where", "fix"),
    [
        ({**TREE, "sinth": {}}, "sinth", "did you mean 'synth'?"),
        (
            {**TREE, "synth": {"sources": [{"source": "a", "licence": "MIT"}]}},
            "synth.sources.0.licence",
            "did you mean 'license'?",
        ),
        (
            {**TREE, "train": {"head_config": {"init_layr": 1}}},
            "train.head_config.init_layr",
            "did you mean 'init_layer'?",
        ),
    ],
)
def test_unknown_key_is_found_at_every_depth(tree: dict[str, Any], where: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tree, where="run.yaml")
    assert (caught.value.where, caught.value.fix) == (f"run.yaml: {where}", fix)


def test_unknown_key_without_a_neighbour_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_value("target.zzzzzz", 1))
    assert "source" in caught.value.fix and "capture_layers" in caught.value.fix


@pytest.mark.parametrize(
    ("dotted", "value", "problem"),
    [
        ("run.seed", -1, "greater than or equal to 0"),
        ("run.seed", "many", "valid integer"),
        ("target.capture_layers", [], "capture"),
        ("synth.temperature", -0.1, "greater than or equal to 0"),
        ("target.dtype", "int4", "'bfloat16'"),
        ("train.learning_rate", "inf", "train.learning_rate: Input should be a finite number"),
        ("train.grace_seconds", "Infinity", "finite number, got 'Infinity'"),
        ("synth.temperature", "nan", "finite number"),
        ("train.timeout_minutes", 1e300, "less than or equal to"),
    ],
)
def test_wrong_value_says_what_is_right(dotted: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_value(dotted, value))
    assert dotted in caught.value.where
    assert problem in f"{caught.value.where}: {caught.value.problem}"
    section, key = dotted.split(".")
    described = RunConfig.model_fields[section].annotation
    model = _section_in(described)
    assert model is not None
    described_as = str(model.model_fields[key].description)
    assert caught.value.fix == " ".join(described_as.split())


@pytest.mark.parametrize(
    ("dotted", "value", "problem", "fix"),
    [
        ("train", None, "is empty", "leave it out or write {}"),
        ("train.head_config", None, "is empty", "leave it out or write {}"),
        ("target", None, "is empty", "write {source: …}"),
        ("target", "x", "'x' is not a mapping of its keys", "write target.source=x"),
        ("eval.drafter", "ngram", "'ngram' is not a mapping", "write eval.drafter.name=ngram"),
        ("synth.sources", ["x.jsonl"], "'x.jsonl' is not a mapping", "write {source: x.jsonl}"),
        ("eval.drafter", None, "is empty", "leave it out or write {}"),
        ("synth.pii", True, "True is not a mapping", "write synth.pii.enabled=true"),
        ("eval.drafter", {"lookup": True}, "True is not", "write {key: value}; known keys here: "),
        ("eval.tree", 3, "3 is not a mapping", "known keys here: top_k, steps, nodes"),
        ("eval.compare", [{"name": "x", "tree": 3}], "3 is not a mapping", "top_k, steps, nodes"),
        ("jobs.stages", {"train": None}, "is empty", "leave it out or write {}"),
        ("synth.sources", "x", "Input should be a list, got 'x'", ""),
        ("jobs.stages", 3, "Input should be a mapping, got 3", ""),
    ],
)
def test_what_is_no_section_says_what_to_write(
    dotted: str, value: Any, problem: str, fix: str
) -> None:
    tree = with_value(dotted, value) if "." in dotted else {**TREE, dotted: value}
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    assert dotted in caught.value.where
    assert caught.value.problem.startswith(problem) and fix in caught.value.fix
    assert "instance of" not in str(caught.value)


@pytest.mark.parametrize(
    ("dotted", "value", "where"),
    [
        ("run.uri", "a\0b", "run.uri"),
        ("synth.sources", [{"source": "a\0b"}], "synth.sources.0.source"),
    ],
)
def test_a_null_character_is_refused(dotted: str, value: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=f"^config: {where}: holds a null character"):
        parse(with_value(dotted, value))


@pytest.mark.parametrize("text", ["inf", "-inf", "nan"])
def test_no_number_of_any_section_is_infinite(text: str) -> None:
    """In lists and mappings of a section, too; where a text may stand, it is one."""
    for dotted, value in [
        ("synth.category_shares", {"a": text}),
        ("eval.load", {"temperatures": [text]}),
        ("jobs.stages", {"train": {"hours": text}}),
        ("run.ray", {"gpus": text}),
    ]:
        with pytest.raises(ConfigError, match="finite number"):
            parse(with_value(dotted, value))
    said = parse(with_value("target.chat_template_kwargs", {"mode": text}))
    assert said.target.chat_template_kwargs == {"mode": text}


def test_settings_that_contradict_each_other_are_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**TREE, "train": {"algorithm": "dflash", "dropout": 0.1}})
    assert caught.value.where == "config: train"
    assert caught.value.problem == "dropout is only supported with algorithm: eagle3"
    assert caught.value.fix == "turn it off"


@pytest.mark.parametrize(
    ("dotted", "value", "problem"),
    [
        ("target.capture_layers", [], "at least 1 item"),
    ],
)
def test_a_key_of_two_types_is_named_once(dotted: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_value(dotted, value))
    assert caught.value.where == f"config: {dotted}"
    assert problem in caught.value.problem


def test_missing_value_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"target": {}})
    assert caught.value.where == "config: target.source"
    assert caught.value.problem == "required but not set"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        load(tmp_path / "nowhere.yaml")
    assert caught.value.where == str(tmp_path / "nowhere.yaml")


def test_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"run\.yaml: byte 1 is not UTF-8"):
        load(tmp_path / "run.yaml")


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("target:\n  source: a\nsynth: [1, 2\nrun: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid YAML") as caught:
        load(path)
    assert caught.value.where == f"{path}:4"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text\n"])
def test_yaml_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("run.seed=3", "run.seed", 3),
        ("run.seed = 3", "run.seed", 3),
        ("target.capture_layers=[1, 5, 9]", "target.capture_layers", (1, 5, 9)),
        ("synth.system_prompt='a=b.c'", "synth.system_prompt", "a=b.c"),
        ("synth.system_prompt=", "synth.system_prompt", None),
        ("synth.pii.enabled=false", "synth.pii.enabled", False),
        ("train.head_config.draft_vocab_size=512", "train.head_config.draft_vocab_size", 512),
        ("train.learning_rate=1.0e-4", "train.learning_rate", 1e-4),
        (
            "train.learning_rate=1e-4",
            "train.learning_rate",
            1e-4,
        ),  # YAML 1.1 reads this spelling as text
    ],
)
def test_override_replaces_one_value(file: Path, override: str, path: str, value: Any) -> None:
    found: Any = load(file, [override])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.seed", "not of the form section.key=value"),
        ("=3", "not of the form"),
        ("run..seed=3", "not of the form"),
        ("run.seed=[1", "not valid YAML"),
        ("target.source.deeper=1", "'source' is not a section"),
        ("run.sed=1", "unknown key 'sed'"),
        ("seed=1", "unknown key 'seed'"),
    ],
)
def test_override_of_the_wrong_form(file: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, [override])
    assert problem in caught.value.problem
    assert "\n" not in str(caught.value)


def test_override_of_an_empty_section(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("target: {source: a}\ntrain:\n", encoding="utf-8")
    assert load(tmp_path / "run.yaml", ["train.epochs=9"]).train.epochs == 9


def test_force_switch(file: Path) -> None:
    assert load(file, force=True).run.force
    assert not load(file).run.force


def test_config_is_frozen() -> None:
    config = parse(TREE)
    with pytest.raises(ValidationError, match="frozen"):
        config.run = config.run  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.train.head_config.draft_vocab_size = 1  # type: ignore[misc]


def sections(model: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The model and every section below it."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = _section_in(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{path}.{name}".strip("."))


def test_every_field_is_described() -> None:
    fields = [
        (path, name, field)
        for path, model in sections(RunConfig)
        for name, field in model.model_fields.items()
    ]
    assert len(fields) > 60, "the walk reaches the nested sections"
    assert [
        f"{path}.{name}"
        for path, name, field in fields
        if not (field.description or "").endswith(".")
    ] == []


def test_stage_hash_follows_its_own_section_only() -> None:
    base, seed, train = (
        parse(TREE),
        parse(with_value("run.seed", 1)),
        parse(with_value("train.epochs", 9)),
    )
    assert base.section_hash("train") != train.section_hash("train")
    assert base.section_hash("synth") == train.section_hash("synth")
    assert base.section_hash("synth") != seed.section_hash("synth")


@pytest.mark.parametrize(
    "change",
    [
        ("run.uri", "elsewhere"),
        ("run.threads", 1),
        ("run.force", True),
        ("run.cache_dir", "/tmp/x"),
    ],
)
def test_stage_hash_ignores_where_and_how_fast(change: tuple[str, Any]) -> None:
    assert parse(TREE).section_hash("synth") == parse(with_value(*change)).section_hash("synth")


@pytest.mark.parametrize(
    ("stage", "dotted", "value"),
    [
        *((stage, "target.dtype", dtype) for stage in STAGES for dtype in ("float16", "float32")),
        *((stage, "target.device", "cuda") for stage in STAGES),
        ("train", "train.dtype", "bfloat16"),
        ("train", "train.activation_checkpointing", True),
        ("train", "train.compile", True),
        ("train", "train.wandb", "disabled"),
        ("train", "train.keep_checkpoints", 9),
        ("features", "features.batch_tokens", 64),
        ("synth", "synth.batch_size", 1),
        ("synth", "synth.head", "heads/one"),
        ("synth", "synth.dlp", {"endpoint": "dlp.example"}),
    ],
)
def test_arithmetic_and_batching_make_no_two_runs_differ(
    stage: Stage, dotted: str, value: Any
) -> None:
    changed = parse(with_value(dotted, value))
    assert changed != parse(TREE) and changed.section_hash(stage) == parse(TREE).section_hash(stage)


@pytest.mark.parametrize(
    ("stage", "dotted", "value"),
    [
        ("synth", "target.capture_layers", [1, 2, 3]),
        ("synth", "synth.shard_prompts", 7),
        ("features", "features.shard_tokens", 7),
        ("features", "target.source", "another/model"),
        ("train", "train.batch_tokens", 7),
        ("train", "train.accumulate", 7),
        ("eval", "eval.tree", "auto"),
    ],
)
def test_what_shapes_bytes_makes_runs_differ(stage: Stage, dotted: str, value: Any) -> None:
    changed = parse(with_value(dotted, value))
    assert changed.section_hash(stage) != parse(TREE).section_hash(stage)


def test_a_key_of_the_process_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0")
    monkeypatch.setenv("EAGLE3_STORE_RETRY_SECONDS", "7")
    monkeypatch.setenv("EAGLE3_STORE_TIMEOUT_SECONDS", "8")
    take_settings(RunSection())
    assert (cache_directory(), cpu_kernels()) == (tmp_path / "eagle3", False)
    assert (store_retry_seconds(), store_timeout_seconds()) == (7, 8)
    take_settings(RunSection(cache_dir="/c"))
    assert cache_directory() == Path("/c")


def test_the_learning_rate_is_the_algorithm_s_own(file: Path) -> None:
    """Unless one is given; `show` prints what is used."""
    assert load(file, []).train.learning_rate == 1e-3
    blocks = load(file, ["train.algorithm=dflash"])
    assert blocks.train.learning_rate == 2e-4
    assert blocks.model_dump(mode="json")["train"]["learning_rate"] == 2e-4
    assert TrainSection.model_validate(blocks.train.model_dump()) == blocks.train
    chain = load(file, ["train.head_config.heads=3"])
    assert chain.train.learning_rate == 3e-4
    assert load(file, ["train.head_config.heads=1"]).train.learning_rate == 1e-3
    both = ["train.head_config.heads=3", "train.algorithm=dflash"]
    assert load(file, both).train.learning_rate == 2e-4
    muon = ["train.algorithm=dflash", "train.optimizer=muon"]
    assert load(file, muon).train.learning_rate == 1e-3
    given = ["train.algorithm=dflash", "train.learning_rate=0.001"]
    assert load(file, given).train.learning_rate == 1e-3
    with pytest.raises(ConfigError, match=r"train\.learning_rate"):
        load(file, ["train.algorithm=dflash", "train.learning_rate=0"])


def test_a_drafter_s_settings_stand_beside_its_name(file: Path) -> None:
    drafter = load(file, ["eval.drafter={name: ngram, max_match: 4}"]).eval.drafter
    assert drafter.settings(NgramSection) == NgramSection(max_match=4)
    assert drafter.model_dump()["matches"] == 8, "manifests hold the defaults too"
    assert drafter != load(file, ["eval.drafter.name=ngram"]).eval.drafter


@pytest.mark.parametrize(
    ("override", "where", "problem"),
    [
        ("eval.drafter.name=medusa", "eval.drafter.name", "no drafter has this name"),
        ("eval.drafter.draft_windw=64", "eval.drafter", "did you mean 'draft_window'?"),
        ("eval.drafter.ngram={max_match: 4}", "eval.drafter", "eagle3 has no setting 'ngram'"),
        ("eval.drafter={name: ngram, matches: 0}", "eval.drafter.matches", "greater than 0"),
        ("eval.drafter={name: ngram, max_match: 0.5}", "eval.drafter.max_match", "integer"),
        ("eval.drafter.name=standalone", "eval.drafter.source", "required"),
        ("eval.tree.steps=0", "eval.tree.steps", "greater than 0"),
        ("jobs.stages.train.gpu=8", "jobs.stages.train.gpu", "did you mean 'gpus'?"),
    ],
)
def test_wrong_settings_are_named(file: Path, override: str, where: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(file, [override])
    assert refused.value.where == f"{file}: {where}" and problem in str(refused.value)


def test_an_installed_package_adds_a_drafter_with_settings(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_drafter.py").write_text(
        "from pipeline.config import Section\n"
        "class ToySection(Section):\n"
        "    depth: int = 3\n"
        "def make(section, model, target): ...\n"
        "make.drafter_settings = ToySection\n"
    )
    folder = tmp_path / "toy_drafter-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: toy_drafter\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[eagle3.drafters]\ntoy = toy_drafter:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    toy = load(file, ["eval.drafter={name: toy, depth: 5}"]).eval.drafter
    settings = {"name": "toy", "lookup": None, "depth": 5}
    assert (toy.model_dump(), toy.needs_head) == (settings, False)
    with pytest.raises(ConfigError, match=r"has no setting 'deph' .*did you mean 'depth'"):
        load(file, ["eval.drafter={name: toy, deph: 5}"])


HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("train.wandb_project", HEX),
        ("train.wandb_project", HEX.upper()),
        ("train.wandb_project", "wandb_v1_" + HEX),
        ("run.uri", HEX),
        ("run.uri", "s3://user:pass-w0rd@bucket/run"),
        ("target.source", "hf_abcdefghijklmnopqrstuvwxyz012345"),
        ("train.start_from", "Bearer abcdefgh12345678"),
        ("jobs.image", "ghp_0123456789abcdefghij0123456789abcdef"),
        ("run.cache_dir", f"\n{HEX}\n"),
    ],
)
def test_a_key_is_refused_wherever_it_stands_and_never_shown(
    dotted: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(TREE))
    for command in (["train", "--plan"], ["show"], ["jobs", "render", "--for", "slurm"]):
        override = f"{dotted}={json.dumps(value)}"
        assert cli.main([*command, "-c", str(path), override]) == 2
        said = "".join(capsys.readouterr())
        assert dotted in said and "take it out" in said
        assert value.strip() not in said and "w0rd" not in said


def test_a_commit_is_no_key() -> None:
    tree = {**TREE, "target": {"source": "org/model", "revision": HEX}}
    assert parse(tree).target.revision == HEX
    tree["run"] = {"uri": f"runs/{HEX}"}
    assert parse(tree).run.uri == f"runs/{HEX}"


GONE = """
import os, sys, tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
sys.path.insert(0, sys.argv[1])
from pipeline.cli import main
for command in (["synth", "-c", "x.yaml"], ["verify", "run"], ["gc", "run"], ["inspect", "head"],
                ["jobs", "render", "-c", "x.yaml", "--for", "slurm"], ["schema"],
                ["export", "head", "--format", "sglang", "--out", "out"]):
    print(main(command))
"""


def test_a_deleted_working_directory_is_named() -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", GONE, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout.split() == ["2"] * 7 and len(lines) == 7, done.stderr
    assert all(line.startswith("error: the working directory: cannot be found") for line in lines)


@pytest.mark.parametrize(
    ("own", "turns"),
    [({}, 2000), ({"OMP_WAIT_POLICY": "passive"}, 0), ({"GOMP_SPINCOUNT": "7"}, 7)],
)
def test_waiting_threads_spin_briefly_by_default(own: dict[str, str], turns: int) -> None:
    free = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-c", "import pipeline, torch"],
        env={**free, **own, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{turns}'" in done.stderr  # what GNU OpenMP says of itself


def test_every_refusal_of_a_section_says_what_to_do() -> None:
    """After a semicolon; the section's own text, shown in its place, would be no advice."""
    silent = []
    for file in sorted((ROOT / "pipeline/config").glob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            decorators = " ".join(map(ast.unparse, function.decorator_list))
            if "model_validator" not in decorators and not function.name.startswith("check_"):
                continue
            raised = [each for each in ast.walk(function) if isinstance(each, ast.Raise)]
            texts = [ast.unparse(each.exc) for each in raised if each.exc]
            silent += [text for text in texts if "ValueError" in text and "; " not in text]
    assert not silent
