"""What a person or a log reader sees: notices, progress, errors, readable sizes and times.

    EAGLE3_LOG     standard output   notices                     long work
    unset, text    a terminal        "   synth text"             a bar
                   anything else     "   synth text"             a line every LINE_SECONDS
    json           either            one JSON object a line      one every LINE_SECONDS

Work that is shorter than that prints no progress line. The text of a sample is shown on a terminal
alone: it is the users' own, and a batch log is read by others.

Standard output never stops the work: its reader may have gone (`eagle3 synth … | head`), a log's
disk may be full, a launcher may have closed it. What a stage prints is then dropped; its files and
its exit code are what they would be.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import IO, Any, Literal, Protocol, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pipeline.errors import ConfigError


class LastingOutput:
    """Whatever `sys.stdout` is at the moment; failures to write to it are not raised."""

    def __init__(self) -> None:
        self._lost = False  # something could not be written, and may be in a buffer still

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)

    def write(self, text: str) -> int:
        with self._going_on():
            self._stream().write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_on():
            self._stream().flush()

    def isatty(self) -> bool:
        stream = self._stream()
        return not stream.closed and stream.isatty()

    def drop_unwritten(self) -> None:
        """At its exit Python writes what is buffered, and a failure changes the exit code."""
        try:
            if self._lost:
                self._stream().flush()
        except (OSError, ValueError):
            discard_output()

    def _stream(self) -> IO[str]:
        open_streams()
        # While a bar is drawn, rich's stand-in for it would write to us again.
        stream: IO[str] = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        return stream

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            discard_output()  # for good: no reader comes back
        except (OSError, ValueError):  # ValueError: closed by somebody
            self._lost = True


def open_streams() -> None:
    """Take /dev/null for standard streams that are closed.

    Their numbers would otherwise go to the next files, and what is printed into those.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def discard_output() -> None:
    """Send standard output nowhere, and what it still holds."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


#: Standard output; machine-readable lines are printed with `print`, never with this.
#: What cannot be written to it is dropped.
output = LastingOutput()
#: Text is shown as it stands: categories, licences and ids are data, whatever brackets they have.
console = Console(
    file=cast(IO[str], output), highlight=False, soft_wrap=True, markup=False, emoji=False
)
#: Characters of an error; values that it quotes may be of any length.
_LONGEST_ERROR = 4000
#: Between two progress lines where there is no bar.
LINE_SECONDS = 30.0
LOG_VARIABLE = "EAGLE3_LOG"
#: What a terminal obeys instead of showing it: sequences that begin with ESC or its 8-bit form.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, cursor; then titles, links
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?"
)
#: Other characters that are no text: controls, halves of surrogate pairs, and marks that make
#: characters stand in another order than they are written.
#: What Markdown, and the HTML and formulas in it, would take for something else than text.
_MARKUP = re.compile(r"[\\|`*\[\]<>&~$@#!]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
#: Tokens shown of one part of a sample.
_SHOWN_TOKENS = 160


def logs_json() -> bool:
    """Whether notices are JSON objects. Raises ConfigError for a value that means nothing."""
    value = os.environ.get(LOG_VARIABLE) or "text"
    if value not in ("text", "json"):
        raise ConfigError(
            f"{value!r} is no form of log",
            where=f"environment: {LOG_VARIABLE}",
            fix="set it to text or json, or unset it for text",
        )
    return value == "json"


def worker_name() -> str:
    """This process among those of a fleet, in logs and metrics."""
    return f"{socket.gethostname()}-{os.getpid()}"


def on_terminal() -> bool:
    """Whether a person watches: standard output is a terminal and notices are text.

    FORCE_COLOR, which build servers set, colours lines but makes no terminal of a log.
    """
    return console.file.isatty() and not console.is_dumb_terminal and not logs_json()


def printable(text: str) -> str:
    """Data as a terminal may show it: nothing in it moves the cursor, colours or reorders text."""
    return _INVISIBLE.sub("", _SEQUENCE.sub("", text))


def visible(text: str) -> str:
    """A name on one line, of which every character shows: ESC as \\x1b, a line break as \\n."""
    hidden = re.sub(r"[\t\n]", lambda mark: repr(mark[0])[1:-1], text)
    return _INVISIBLE.sub(lambda mark: mark[0].encode("unicode_escape").decode(), hidden)


def markdown_text(text: str, most: int = 1000) -> str:
    """Data as Markdown that shows it letter by letter, as `one_line` has it: no markup, no HTML, no
    link, and no cell's end."""
    return _MARKUP.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), one_line(text, most))


def one_line(text: str, most: int = 1000) -> str:
    """As `printable`, without line breaks, and of a text longer than `most` only the beginning."""
    line = " ".join(printable(" ".join(text.split())).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def notice(stage: str, text: str, **fields: Any) -> None:
    """One line about what a stage does or has seen; `fields` are in its JSON object alone."""
    if not logs_json():
        line = printable(" ".join(text.splitlines()))
        console.print(Text.assemble((f"{stage:>8}", "bold cyan"), " ", line))
    elif not console.quiet:
        _write_json(console.file, "info", stage, text, **fields)


def fail(message: str, code: int, *, stage: str | None = None) -> int:
    """One line on standard error, whatever line breaks a quoted value may hold."""
    line = one_line(message, _LONGEST_ERROR)
    if os.environ.get(LOG_VARIABLE) == "json":
        with suppress(OSError):
            _write_json(sys.stderr, "error", stage, line, exit_code=code)
    else:
        with suppress(OSError):  # the exit code says it, too
            # In one piece: processes of one launcher write to the same place, unbuffered.
            sys.stderr.write(f"error: {line}\n")
            sys.stderr.flush()
    return code


def _write_json(
    file: IO[str], level: Literal["info", "error"], stage: str | None, message: str, **fields: Any
) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    record = {"time": now, "level": level, "stage": stage, "message": message, **fields}
    record["worker"] = worker_name()
    if (rank := os.environ.get("RANK", "")).isdigit():  # one process of several that train together
        record["rank"] = int(rank)
    # In one piece: a thread's line may not end up inside another's.
    line = json.dumps(record, ensure_ascii=False)
    file.write(_INVISIBLE.sub(lambda mark: f"\\u{ord(mark[0]):04x}", line) + "\n")
    file.flush()


@dataclass
class Pace:
    """How far some work is, how fast it goes, and how long the rest takes at that rate."""

    unit: str
    total: float | None
    done: float = 0  # also by an earlier run
    clock: Callable[[], float] = time.monotonic
    note: str = ""
    begun: float = field(init=False)
    first: float = field(init=False)  # done at the beginning
    ended: float | None = None

    def __post_init__(self) -> None:
        self.begun, self.first = self.clock(), self.done

    @property
    def rate(self) -> float | None:
        """Units per second since the beginning, None before the first."""
        return (self.done - self.first) / self._seconds if self.done > self.first else None

    @property
    def seconds_left(self) -> float | None:
        """None while the total is unknown, or the rate rests on too little to go on."""
        if self.rate is None or self.total is None or self.done - self.first < self.total / 50:
            return None
        return max(0.0, self.total - self.done) / self.rate

    @property
    def _seconds(self) -> float:
        return max((self.clock() if self.ended is None else self.ended) - self.begun, 1e-9)

    def end(self) -> None:
        """Let the rate stay what it is."""
        self.ended = self.clock()

    def text(self) -> str:
        """120 / 408 samples (29 %), 2.1 samples/s, 2 min left."""
        parts = [self._count()]
        if self.rate is None:
            parts.append(f"{readable_duration(self._seconds)} so far")
        else:
            parts.append(f"{self._amount(self.rate)}/s")
        if self.seconds_left is not None:
            parts.append(f"{readable_duration(self.seconds_left)} left")
        return ", ".join(parts) + (f"; {self.note}" if self.note else "")

    def fields(self) -> dict[str, Any]:
        """The same for a JSON object; rate in units per second."""
        rate, left = self.rate, self.seconds_left
        return {
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "rate": None if rate is None else round(rate, 4),
            "seconds_left": None if left is None else round(left, 1),
        }

    def _count(self) -> str:
        if self.total is None:
            return self._amount(self.done)
        share = f" ({100 * self.done / self.total:.0f} %)" if self.total else ""
        if self.unit == "bytes":
            return f"{readable_bytes(self.done)} / {readable_bytes(self.total)}{share}"
        return f"{self.done:,.0f} / {self.total:,.0f} {self.unit}{share}"

    def _amount(self, value: float) -> str:
        if self.unit == "bytes":
            return readable_bytes(value)
        if value < 10 and value != int(value):
            return f"{value:.2g} {self.unit}"
        return f"{value:,.0f} {self.unit}"


class ProgressBar(Protocol):
    """Handle of one piece of work: a bar on a terminal, a line now and then elsewhere."""

    def advance(self, amount: float, note: str | None = None) -> None:
        """Move on by `amount` units; `note` replaces the text at the end."""


class _LogBar:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def advance(self, amount: float, note: str | None = None) -> None:
        self._pace.done += amount
        if note is not None:
            self._pace.note = note


class _TerminalBar(_LogBar):
    def __init__(self, progress: Progress, pace: Pace) -> None:
        super().__init__(pace)
        self._progress = progress
        self._task = progress.add_task("", total=pace.total, unit=pace.unit, note=pace.note)
        progress.update(self._task, completed=pace.done)

    def advance(self, amount: float, note: str | None = None) -> None:
        super().advance(amount, note)
        self._progress.update(self._task, advance=amount)
        if note is not None:
            self._progress.update(self._task, note=note)


class _Rate(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task):  # type: ignore[no-untyped-def]
        speed = task.finished_speed or task.speed
        return Text("" if not speed else f"{speed:,.1f} {task.fields['unit']}/s", style="cyan")


#: Stage → its latest progress.
paces: dict[str, Pace] = {}


@contextmanager
def progress_bar(
    stage: str, *, unit: str, total: float | None, done: float = 0, note: str = ""
) -> Iterator[ProgressBar]:
    """Count, rate and time left of a block: a bar, or a line every LINE_SECONDS.

    `done` is what an earlier, interrupted run has already committed.
    """
    pace = paces[stage] = Pace(unit, total, done, note=note)
    with _show(stage, pace) as bar:
        try:
            yield bar
        finally:
            pace.end()


@contextmanager
def _show(stage: str, pace: Pace) -> Iterator[ProgressBar]:
    if not on_terminal():
        with _every_line_seconds(lambda: notice(stage, pace.text(), **pace.fields())):
            yield _LogBar(pace)
        return
    columns = (
        TextColumn(f"[bold]{stage}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        yield _TerminalBar(progress, pace)


@contextmanager
def long_step(stage: str, what: str) -> Iterator[None]:
    """A block that cannot be counted; where there is no terminal, a line now and then names it."""
    begun = time.monotonic()

    def report() -> None:
        seconds = time.monotonic() - begun
        notice(stage, f"{what}, {readable_duration(seconds)} so far", seconds=round(seconds, 1))

    with nullcontext() if on_terminal() else _every_line_seconds(report):
        yield


_open_blocks: list[threading.Event] = []


@contextmanager
def _every_line_seconds(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` now and then in the background, whatever the block is waiting for.

    Of blocks within blocks the innermost reports.
    """
    over = threading.Event()
    _open_blocks.append(over)

    def keep_reporting() -> None:
        while not over.wait(LINE_SECONDS):
            if _open_blocks[-1] is over:
                report()

    thread = threading.Thread(target=keep_reporting, name="progress-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _open_blocks.remove(over)


def show_supervised(
    stage: str,
    token_ids: Sequence[int],
    mask: Sequence[bool],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """One sample: on a terminal as text, supervised tokens green and others dim; else its counts.

    Of long parts the middle is left out.
    """
    count = f"{sum(mask)} of {len(token_ids)} tokens are supervised"
    if not on_terminal():
        notice(stage, f"a sample: {count}", supervised=sum(mask), tokens=len(token_ids))
        return
    text = Text()
    for supervised, pairs in groupby(zip(mask, token_ids, strict=True), key=itemgetter(0)):
        part = printable(_shortened([token for _, token in pairs], decode))
        text.append(part, style="green" if supervised else "dim")
    console.rule(f"a sample: {count} (green)", style="dim")
    console.print(text)
    console.rule(style="dim")


def _shortened(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    if len(token_ids) <= _SHOWN_TOKENS:
        return decode(token_ids)
    half = _SHOWN_TOKENS // 2
    left_out = len(token_ids) - 2 * half
    return f"{decode(token_ids[:half])} … {left_out} tokens … {decode(token_ids[-half:])}"


def readable_bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def readable_duration(seconds: float) -> str:
    """3700 → "1 h 2 min"; exactness beyond two units would pretend to knowledge."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
