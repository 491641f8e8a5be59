"""The command line: what it accepts, what it prints, and how it fails."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from pipeline import __version__, cli, runtime
from pipeline.config import RunConfig
from pipeline.errors import NotLossless
from pipeline.records import STAGES, Plan

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        "target: {source: some/model}\nsynth: {sources: [{source: prompts.jsonl}]}\n",
        encoding="utf-8",
    )
    return file


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The single line that a failing command leaves on standard error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def shown(capsys: pytest.CaptureFixture[str]) -> RunConfig:
    return RunConfig.model_validate(yaml.safe_load(capsys.readouterr().out))


def test_show_prints_what_loads_to_the_same_config(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", "-c", str(config_file), "synth.max_prompts=7"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(first, encoding="utf-8")
    assert cli.main(["show", "-c", str(tmp_path / "again.yaml")]) == 0
    assert capsys.readouterr().out == first
    assert "max_prompts: 7" in first


@pytest.mark.parametrize(
    "order",
    [
        ["-c", "FILE", "run.seed=3", "synth.top_k=5"],
        ["run.seed=3", "synth.top_k=5", "-c", "FILE"],
        ["run.seed=3", "-c", "FILE", "synth.top_k=5"],
    ],
)
def test_overrides_stand_anywhere(
    order: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["show", *(str(config_file) if word == "FILE" else word for word in order)]) == 0
    )
    config = shown(capsys)
    assert config.synth is not None
    assert (config.run.seed, config.synth.top_k) == (3, 5)


def test_later_override_wins(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "run.seed=1", "-c", str(config_file), "run.seed=2"]) == 0
    assert shown(capsys).run.seed == 2


def test_schema_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) == set(RunConfig.model_fields)


def test_published_schema_of_reports_is_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", "report"]) == 0
    printed = capsys.readouterr().out
    published = Path(__file__).resolve().parents[1] / "docs/report-schema.json"
    assert published.read_text(encoding="utf-8") == printed, (
        "write it again: eagle3 schema report > docs/report-schema.json"
    )
    schema = json.loads(printed)
    for name, part in {"EvalReport": schema, **schema["$defs"]}.items():
        for field, about in part.get("properties", {}).items():
            assert about.get("description"), f"{name}.{field} is not described"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(
        f"    {command} " in text
        for command in [*STAGES, "run", "show", "schema", "inspect", "export", "import"]
    )


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["synth"], "-c/--config"),
        (["bogus"], "bogus"),
        ([], "command"),
        (["train", "-c", "FILE", "--frce"], "unknown option '--frce'"),
        (["schema", "more"], "'more'"),
        (["drafters", "more"], "takes no argument 'more'"),
        (["inspect"], "HEAD"),
        (["inspect", "head", "more"], "takes no argument 'more'"),
        (["export", "head", "--out", "there"], "--format"),
        (["export", "head", "--out", "there", "--format", "onnx"], "'onnx'"),
        (["import", "there", "--out", "head"], "--target"),
        *(
            (["plan-decode", "-c", "FILE", option, value], option)
            for option, values in {
                "--prompts": ("0", "1,2"),
                "--new-tokens": ("-3", "x"),
                "--most-tokens": ("0",),
                "--budget": ("-1",),
                "--bandwidth": ("nan", "-1", "inf", "0"),
                "--tflops": ("nan", "1e999"),
                "--drafters": (",",),
                "--alpha": ("eagle3=nan",),
            }.items()
            for value in values
        ),
        (["synth", "-c", "FILE", "--plan", "--workers", "0"], "--workers"),
        (["simulate", "-c", "FILE", "--acceptance", "2,nan"], "--acceptance"),
        (["compare", "one", "other", "--tolerance", "nan"], "--tolerance"),
        (["compare", "one", "other", "--tolerance", "-0.1"], "--tolerance"),
        (["gc", "run", "--quiet-minutes", "nan"], "--quiet-minutes"),
    ],
)
def test_misuse_is_one_line_and_code_2(
    argv: list[str], part: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(config_file) if word == "FILE" else word for word in argv])
    assert ended.value.code == 2
    line = error_line(capsys)
    assert line.startswith("error: ") and part in line and "(fix: " in line


@pytest.mark.parametrize("command", ["plan-decode", "simulate"])
def test_a_file_that_cannot_be_written_is_known_before_the_work(
    command: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or the target, which is not there, would be the error."""
    for file, part in ((tmp_path / "none/x.json", "no directory"), (tmp_path, "is a directory")):
        assert cli.main([command, "-c", str(config_file), "--json", str(file)]) == 2
        line = error_line(capsys)
        assert line.startswith(f"error: {file}: cannot be written: ") and part in line


def test_a_full_disk_is_one_line(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "target.source=meta-llama/Llama-3.1-8B-Instruct"
    paper = ["--bandwidth", "1000", "--tflops", "100", "--json", "/dev/full"]
    assert cli.main(["plan-decode", "-c", str(config_file), shape, *paper]) == 2
    assert "error: /dev/full: cannot be written: No space left" in error_line(capsys)


def test_user_error_is_one_line_and_code_2(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["synth", "-c", str(config_file), "synth.max_promts=3"]) == 2
    line = error_line(capsys)
    assert (
        line.startswith(f"error: {config_file}: synth.max_promts: ")
        and "did you mean 'max_prompts'?" in line
    )


def test_value_with_line_breaks_stays_one_line(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", "-c", str(config_file), 'run.seed="a\\n\\nb"']) == 2
    assert error_line(capsys).startswith("error: ")


class _Rooms:
    """Stands in for the stages: tested is which of them the command line calls, and with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []
        self.raises: Exception | None = None
        self.fails_at = ""  # "": anywhere

    def run(self, config: RunConfig, stage: str) -> None:
        self.calls.append(("run", stage, config.run.force))
        if self.raises and self.fails_at in ("", stage):
            raise self.raises

    def plan_of(self, stage: str):  # type: ignore[no-untyped-def]
        def plan(config: RunConfig, parent: Plan | None = None) -> Plan:
            self.calls.append(("plan", stage, config.run.force))
            return Plan.model_validate(
                {
                    "stage": stage,
                    "state": "2 of 3 [shards] committed",
                    "records": 1234,
                    "tokens": 56789,
                    "storage_bytes": 3 << 20,
                }
                | {
                    "peak_memory_bytes": 3 << 29,
                    "basis": ["12 tokens a prompt", "[red] is no colour here"],
                }
            )

        return plan


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Rooms]:
    rooms = _Rooms()
    monkeypatch.setattr(cli, "run", rooms.run)
    monkeypatch.setattr(cli, "plan_of", rooms.plan_of)
    yield rooms


def test_run_goes_through_all_stages_in_order(rooms: _Rooms, config_file: Path) -> None:
    assert cli.main(["run", "-c", str(config_file)]) == 0
    assert rooms.calls == [
        ("run", stage, False) for stage in ("synth", "features", "train", "eval")
    ]


def test_a_stage_is_three_frames_from_the_command(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`main`, `runtime.run`, and the stage's own `run`."""
    from pipeline.synth import stage

    frames: list[str] = []
    monkeypatch.setattr(
        stage, "run", lambda config: frames.extend(each.name for each in traceback.extract_stack())
    )
    assert cli.main(["synth", "-c", str(config_file)]) == 0
    assert frames[frames.index("main") :] == ["main", "run", "<lambda>"]


def test_one_stage_with_force(rooms: _Rooms, config_file: Path) -> None:
    assert cli.main(["train", "-c", str(config_file), "--force"]) == 0
    assert rooms.calls == [("run", "train", True)]


def test_failure_ends_the_run_with_the_errors_own_code(
    rooms: _Rooms, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rooms.raises = NotLossless("token 3 differs", where="prompt a", fix="report it")
    assert cli.main(["run", "-c", str(config_file)]) == 1
    assert rooms.calls == [("run", "synth", False)]
    assert error_line(capsys) == "error: prompt a: token 3 differs (fix: report it)"


def test_a_json_error_names_the_stage_and_not_the_command(
    rooms: _Rooms,
    config_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE3_LOG", "json")
    monkeypatch.setenv("RANK", "3")
    rooms.fails_at = "features"
    rooms.raises = NotLossless("token 3 differs", where="prompt a", fix="report it")
    assert cli.main(["run", "-c", str(config_file)]) == 1
    error = json.loads(error_line(capsys))
    assert (error["stage"], error["rank"]) == ("features", 3)


def test_our_own_bug_keeps_its_traceback(rooms: _Rooms, config_file: Path) -> None:
    rooms.raises = AssertionError("broken invariant")
    with pytest.raises(AssertionError, match="broken invariant"):
        cli.main(["synth", "-c", str(config_file)])


def test_plan_prints_a_table_and_runs_nothing(
    rooms: _Rooms, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "-c", str(config_file), "--plan"]) == 0
    assert [kind for kind, _, _ in rooms.calls] == ["plan"] * 4
    text = capsys.readouterr().out
    for part in (
        "2 of 3 [shards] committed",
        "1,234",
        "56,789",
        "3.0 MiB",
        "1.5 GiB",
        "12 tokens a prompt",
        "[red] is no colour here",
    ):
        assert text.count(part) == 4, part


def test_every_stage_has_a_door_and_a_plan() -> None:
    assert set(runtime.ROOMS) == set(STAGES)
    for stage in STAGES:
        assert callable(importlib.import_module(f"pipeline.{runtime.ROOMS[stage]}.stage").run)
        assert callable(cli.plan_of(stage))


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "--version"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == f"eagle3 {__version__}\n"


#: A command whose configuration takes a minute to read; it says so, and that it has begun.
WAITING = """
import sys, time
import pipeline.config
from pipeline.cli import main

def wait(*_, **__):
    print("reading", flush=True)
    time.sleep(60)

pipeline.config.read_file = wait
sys.exit(main())
"""


def interrupted(sent: signal.Signals) -> tuple[int, str]:
    """Exit code and stderr of a command that a real signal reaches while it reads."""
    command = [sys.executable, "-c", WAITING, "show", "-c", "run.yaml"]
    # A shell's background jobs ignore the signal, and so would everything that they start.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, preexec_fn=heeding
    )
    assert process.stdout
    with process:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(sent)
        _, error = process.communicate(timeout=60)
    return process.returncode, error


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_one_line_and_code_130(sent: signal.Signals) -> None:
    code, error = interrupted(sent)
    assert code == 130
    assert error.splitlines() == [
        "error: interrupted (fix: run the same command again; "
        "it continues after the last committed work)"
    ]


def test_reader_that_stops_early_is_no_error() -> None:
    pipeline = f"{sys.executable} -m pipeline.cli schema | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", pipeline], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
