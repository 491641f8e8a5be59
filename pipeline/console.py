"""What a person sees: one console, one progress bar, one style of notice, error, size and time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter

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

#: Standard output; machine-readable lines are printed with `print`, never with this.
console = Console(highlight=False, soft_wrap=True)

#: Tokens shown of one part of a sample.
_SHOWN_TOKENS = 160


class ProgressBar:
    """Handle of one progress bar: `advance(tokens)` and a free-text `note`."""

    def __init__(self, progress: Progress, unit: str, total: float | None, done: float) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, unit=unit, note="")
        progress.update(self._task, completed=done)

    def advance(self, amount: float, note: str | None = None) -> None:
        """Move on by `amount` units; `note` replaces the text at the end of the bar."""
        self._progress.update(self._task, advance=amount)
        if note is not None:
            self._progress.update(self._task, note=note)


class _Rate(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task):  # type: ignore[no-untyped-def]
        speed = task.finished_speed or task.speed
        return Text("" if not speed else f"{speed:,.1f} {task.fields['unit']}/s", style="cyan")


@contextmanager
def progress_bar(
    title: str, *, unit: str, total: float | None, done: float = 0
) -> Iterator[ProgressBar]:
    """A bar with count, rate and time left. Quiet when standard output is no terminal.

    `done` is what an earlier, interrupted run has already committed.
    """
    columns = (
        TextColumn(f"[bold]{title}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress, unit, total, done)


def notice(stage: str, text: str) -> None:
    """One line about what a stage does or found."""
    console.print(f"[bold cyan]{stage:>8}[/] {text}")


def show_supervised(
    token_ids: Sequence[int], mask: Sequence[bool], decode: Callable[[Sequence[int]], str]
) -> None:
    """One sample as text: supervised tokens green, others dim, long parts without their middle."""
    text = Text()
    for supervised, pairs in groupby(zip(mask, token_ids, strict=True), key=itemgetter(0)):
        part = _shortened([token for _, token in pairs], decode)
        text.append(part, style="green" if supervised else "dim")
    count = f"{sum(mask)} of {len(token_ids)} tokens are supervised (green)"
    console.rule(f"a sample: {count}", style="dim")
    console.print(text)
    console.rule(style="dim")


def _shortened(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    if len(token_ids) <= _SHOWN_TOKENS:
        return decode(token_ids)
    half = _SHOWN_TOKENS // 2
    left_out = len(token_ids) - 2 * half
    return f"{decode(token_ids[:half])} … {left_out} tokens … {decode(token_ids[-half:])}"


def fail(message: str, code: int) -> int:
    """One line on standard error, whatever line breaks a quoted value may hold."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


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
