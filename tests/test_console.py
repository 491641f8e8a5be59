"""Notices, progress and errors: on a terminal, in a batch log, and as JSON."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import cli, console
from pipeline.console import (
    Pace,
    fail,
    long_step,
    notice,
    on_terminal,
    progress_bar,
    show_supervised,
)
from pipeline.errors import ConfigError
from tests.conftest import QUESTIONS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_LOG", "json")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> float:
    """A line every tenth of a second instead of every half minute."""
    assert console.LINE_SECONDS <= 30
    monkeypatch.setattr(console, "LINE_SECONDS", 0.1)
    return 0.1


class Watch:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_progress_line_says_count_rate_and_time_left() -> None:
    watch = Watch()
    pace = Pace("samples", 408, clock=watch)
    watch.now += 30
    assert pace.text() == "0 / 408 samples (0 %), 30 s so far"
    watch.now += 27
    pace.done = 120
    assert pace.text() == "120 / 408 samples (29 %), 2.1 samples/s, 2 min left"
    pace.done, pace.note = 408, "loss 1.2"
    assert pace.text() == "408 / 408 samples (100 %), 7.2 samples/s, 0 s left; loss 1.2"


def test_what_an_earlier_run_did_counts_but_makes_no_rate() -> None:
    watch = Watch()
    pace = Pace("tokens", 10_000, done=9_000, clock=watch)
    watch.now += 10
    assert pace.rate is None and pace.seconds_left is None
    pace.done += 500
    assert pace.text() == "9,500 / 10,000 tokens (95 %), 50 tokens/s, 10 s left"
    assert pace.fields() == {
        "done": 9_500,
        "total": 10_000,
        "unit": "tokens",
        "rate": 50.0,
        "seconds_left": 10.0,
    }


def test_bytes_and_unknown_totals_are_readable() -> None:
    watch = Watch()
    pace = Pace("bytes", 3 << 30, clock=watch)
    watch.now += 64
    pace.done = 1 << 30
    assert pace.text() == "1.0 GiB / 3.0 GiB (33 %), 16.0 MiB/s, 2 min left"
    pace = Pace("steps", None, clock=watch)
    watch.now += 50
    pace.done = 2
    assert pace.text() == "2 steps, 0.04 steps/s"


def test_lines_come_now_and_then_also_while_nothing_advances(
    hasty: float, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    with progress_bar("synth", unit="samples", total=8, done=2) as bar:
        for _ in range(50):
            bar.advance(0.02)
        time.sleep(4.5 * hasty)
    most = (time.monotonic() - begun) / hasty
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= most, lines
    assert all(line.startswith("   synth 3 / 8 samples (38 %), ") for line in lines)
    time.sleep(2 * hasty)
    assert capsys.readouterr().out == "", "the end of the block ends the lines"


def test_a_bar_stands_with_other_lines_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with progress_bar("synth", unit="prompts", total=4) as bar:
        notice("synth", "a notice")
        print("a print")
        bar.advance(3, "loss 2")
    shown = capsys.readouterr().out
    assert "a notice" in shown and "a print" in shown and "3/4" in shown
    assert console.paces["synth"].done == 3 and console.paces["synth"].rate, "for the metrics"


def test_a_standard_output_that_is_closed_stops_nothing() -> None:
    """By the launcher, before the process began: /dev/null takes its place, not the next file."""
    program = (
        "import sys; from pipeline.cli import main; code = main(['schema']); "
        "from pipeline.console import notice; notice('synth', 'x'); sys.exit(code + 7)"
    )
    shell = f'"{sys.executable}" -c "{program}" >&-'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (7, "")


def test_short_work_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("eval", unit="turns", total=2) as bar, long_step("eval", "loading"):
        bar.advance(2)
    assert capsys.readouterr().out == ""


def test_of_blocks_within_blocks_the_innermost_reports(
    hasty: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        progress_bar("train", unit="steps", total=2),
        long_step("target", "dequantising x.gguf"),
    ):
        time.sleep(3.5 * hasty)
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(
        line.startswith("  target dequantising x.gguf, ") and line.endswith(" so far")
        for line in lines
    )


def test_notices_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    notice("synth", "[red]a[/] prompts/[b].jsonl [/nothing]")
    assert capsys.readouterr().out == "   synth [red]a[/] prompts/[b].jsonl [/nothing]\n"


CONTROLS = (
    "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\x1b]8;;http://x\x1b\\e\rf\u202eg\ud800h\x00\x85i\x1bc"
)


def test_an_error_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a launcher write to one place, unbuffered: a second write for the line's end
    lets another's error in between."""
    written: list[str] = []

    class Unbuffered(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Unbuffered())
    assert fail("a: b (fix: c)", 2) == 2
    assert written == ["error: a: b (fix: c)\n"]


def test_nothing_that_is_shown_steers_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a notice nor in an error, a sample, or a JSON line; there it is still told."""
    notice("synth", f"{CONTROLS}\n   synth forged")
    assert fail(CONTROLS, 2) == 2
    printed = capsys.readouterr()
    assert printed.out == "   synth abcde fgh i    synth forged\n" and printed.out.count("\n") == 1
    assert printed.err == "error: abcde fgh i\n"
    monkeypatch.setenv("EAGLE3_LOG", "json")
    notice("synth", CONTROLS, category=CONTROLS)
    line = capsys.readouterr().out
    assert line.isascii() and json.loads(line)["category"] == CONTROLS
    monkeypatch.delenv("EAGLE3_LOG")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_supervised("synth", [7, 8], [False, True], lambda ids: f"\x1b[2J{CONTROLS}\n" * len(ids))
    shown = capsys.readouterr().out
    assert "abcde" in shown and not set(shown) & set("\x00\r\x85\x9b\u202e") and "[2J" not in shown


def test_an_error_that_quotes_a_long_value_stays_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    fail("x: " + "y" * 10**6, 2)
    assert len(capsys.readouterr().err) < 5000


def test_a_sample_s_text_is_for_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def show() -> str:
        show_supervised("synth", [7, 8, 9], [False, True, True], lambda ids: "secret" * len(ids))
        return capsys.readouterr().out

    assert show() == "   synth a sample: 2 of 3 tokens are supervised\n"
    monkeypatch.setenv("FORCE_COLOR", "1")  # of build servers: their logs are no terminals
    assert not on_terminal() and "secret" not in show()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert on_terminal() and "secret" in show()
    monkeypatch.setenv("EAGLE3_LOG", "json")
    assert not on_terminal() and "secret" not in show()


def test_json_notices_and_errors(as_json: None, capsys: pytest.CaptureFixture[str]) -> None:
    notice("synth", "[bold]24 prompts[/]\nτ", tau=1.5)
    assert fail("a:\n b (fix: c)", 2, stage="train") == 2
    printed = capsys.readouterr()
    record, error = json.loads(printed.out), json.loads(printed.err)
    assert printed.out.count("\n") == printed.err.count("\n") == 1
    for each in (record, error):
        at = datetime.fromisoformat(each.pop("time"))
        assert at.utcoffset() is not None and abs(time.time() - at.timestamp()) < 60
        assert each.pop("worker") == f"{socket.gethostname()}-{os.getpid()}"
    message = "[bold]24 prompts[/]\nτ"
    assert record == {"level": "info", "stage": "synth", "message": message, "tau": 1.5}
    assert error == {
        "level": "error",
        "stage": "train",
        "message": "a: b (fix: c)",
        "exit_code": 2,
    }


def test_json_progress(hasty: float, as_json: None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("train", unit="steps", total=10) as bar:
        bar.advance(4, "loss 2.5")
        time.sleep(2.5 * hasty)
    first, *_ = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["stage"], first["done"], first["total"], first["unit"]) == (
        "train",
        4,
        10,
        "steps",
    )
    assert first["rate"] > 0 and first["seconds_left"] > 0 and "loss 2.5" in first["message"]


def test_a_process_that_is_not_the_first_writes_nothing(
    hasty: float,
    as_json: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console.console, "quiet", True)
    notice("train", "head")
    with progress_bar("train", unit="steps", total=10):
        time.sleep(1.5 * hasty)
    assert capsys.readouterr().out == ""


def test_a_form_of_log_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE3_LOG", "yaml")
    with pytest.raises(ConfigError, match="EAGLE3_LOG"):
        notice("synth", "x")
    assert cli.main(["schema"]) == 2
    printed = capsys.readouterr()
    expected = (
        "environment: EAGLE3_LOG: 'yaml' is no form of log "
        "(fix: set it to text or json, or unset it for text)"
    )
    assert printed.out == "" and printed.err == f"error: {expected}\n"


def test_misuse_is_a_json_line_too(as_json: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["schema", "--frce"])
    assert ended.value.code == 2
    assert "--frce" in json.loads(capsys.readouterr().err)["message"]


@pytest.mark.slow
def test_synth_in_a_batch_job(tiny_target: Path, tmp_path: Path) -> None:
    """A real process whose output is a pipe, in both forms."""
    uri = count()
    prompts = tmp_path / "prompts.jsonl"
    turns = [{"turns": [question], "license": "MIT"} for question in QUESTIONS]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in turns), encoding="utf-8")
    program = (
        "import sys; from pipeline import cli, console; console.LINE_SECONDS = 0.05; "
        "sys.exit(cli.main(['synth', '-c', sys.argv[1]]))"
    )

    def synth(form: str, **broken: Any) -> subprocess.CompletedProcess[str]:
        config = tmp_path / "run.yaml"
        section = {"sources": [{"source": str(prompts)}], "pii": {"enabled": False}}
        lengths = {"max_new_tokens": 64, "max_prompt_tokens": 300}
        values = {
            "run": {"uri": str(tmp_path / f"run{next(uri)}"), "threads": 1},
            "target": {"source": str(tiny_target), "dtype": "float32", "device": "cpu"},
            "synth": {**section, **lengths, "batch_size": 2, **broken},
        }
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        return subprocess.run(
            [sys.executable, "-c", program, str(config)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "EAGLE3_LOG": form, "EAGLE3_CPU_KERNELS": "0"},
            check=False,
        )

    text, structured = synth("text"), synth("json")
    assert (text.returncode, structured.returncode) == (0, 0), text.stderr + structured.stderr
    lines = text.stdout.splitlines()
    assert any(" / 24 prompts (" in line for line in lines)
    assert any("tokens are supervised" in line for line in lines)
    assert "why would that be so" not in text.stdout + structured.stdout
    records = [json.loads(line) for line in structured.stdout.splitlines()]
    assert {record["stage"] for record in records} == {"synth"}
    done = [record["done"] for record in records if "done" in record]
    assert done == sorted(done) and any(0 < value < 24 for value in done), "as conversations end"
    assert records[-1]["message"].startswith("datasheet: ")
    failed = synth("json", min_prompt_chars="many")
    assert failed.returncode == 2 and failed.stdout == ""
    error = json.loads(failed.stderr)
    assert (error["level"], error["stage"]) == ("error", "synth") and "fix:" in error["message"]
