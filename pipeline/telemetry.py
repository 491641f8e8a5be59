"""Numbers for operators: what a process does, in a file that Prometheus reads.

    with metrics_of(config.run, "synth"):       # off unless run.metrics_dir is set
        count("retries", of="store")            # adds up
        observe("endpoints_healthy", 3)         # the latest value

    <run.metrics_dir>/eagle3-<stage>-<host>-<pid>.prom

The file is replaced every PERIOD_SECONDS and at the end, in the form that node_exporter's textfile
collector takes. It holds counts and names of our own: no prompt, no reply, no address. A file that
cannot be written is said once and stops nothing.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.config import RunSection
from pipeline.console import notice, paces, worker_name
from pipeline.errors import MissingPackage, StageIncomplete
from pipeline.records import Shard

if TYPE_CHECKING:
    from prometheus_client import Metric

PERIOD_SECONDS = 15.0


class _Kind(NamedTuple):
    text: str
    label: str | None = None  # beside stage, run and worker


#: `eagle3_<name>_total`
COUNTERS = {
    "shards": _Kind("Shards that this process has committed"),
    "shards_lost": _Kind("Shards that this process has made and another one had committed before"),
    "records": _Kind("Samples in committed shards"),
    "tokens": _Kind("Tokens in committed shards"),
    "written_bytes": _Kind("Bytes of committed shards"),
    "rejected": _Kind("Prompts and samples left out of committed shards", "reason"),
    "retries": _Kind("Requests that were repeated", "of"),
    "errors": _Kind("Errors that have ended the stage in this process", "kind"),
}
#: `eagle3_<name>`
GAUGES = {
    "running": _Kind("1 while the stage runs, 0 once it has ended"),
    "records_per_second": _Kind("Committed samples over the seconds of this process"),
    "tokens_per_second": _Kind("Committed tokens over the seconds of this process"),
    "progress_done": _Kind("What is done of the stage, in units", "unit"),
    "progress_total": _Kind("What there is to do, in units", "unit"),
    "progress_per_second": _Kind("Units a second since this process began", "unit"),
    "progress_seconds_left": _Kind("Seconds left at that rate", "unit"),
    "endpoints_healthy": _Kind("Servers of the target that answer"),
}
_LABELS = ("stage", "run", "worker")


def count(name: str, amount: float = 1, **label: str) -> None:
    """Add to one of COUNTERS; its label, if it has one, by name."""
    if _meter is not None:
        _meter.add(name, amount, label)


def observe(name: str, value: float) -> None:
    """The value that one of GAUGES has now."""
    if _meter is not None:
        _meter.gauges[name] = value


def count_shard(shard: Shard, *, lost: bool) -> None:
    """What a commit adds; `lost`: another process had committed the shard before."""
    if lost:
        count("shards_lost")
        return
    count("shards")
    count("records", shard.rows)
    count("tokens", shard.tokens)
    count("written_bytes", shard.bytes)
    for reason, samples in shard.rejected.items():
        count("rejected", samples, reason=reason)


@contextmanager
def metrics_of(run: RunSection, stage: str) -> Iterator[None]:
    """A block of work on `stage` whose numbers are written. Raises MissingPackage."""
    global _meter
    if run.metrics_dir is None:
        yield
        return
    _require_library()
    _meter = meter = _Meter(run, stage)
    try:
        with meter.writing():
            yield
    finally:
        _meter = None


class _Meter:
    """The numbers of one stage in this process."""

    def __init__(self, run: RunSection, stage: str) -> None:
        worker = worker_name()
        self._labels = (stage, run.uri.rstrip("/").rsplit("/", 1)[-1], worker)
        name = re.sub(r"[^\w.-]", "_", f"eagle3-{stage}-{worker}")
        assert run.metrics_dir is not None
        self._path = Path(run.metrics_dir).expanduser() / f"{name}.prom"
        self._stage, self._warned = stage, False
        self._begun, self._lock = time.monotonic(), threading.Lock()
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(float)  # by name and label
        self.gauges: dict[str, float] = {"running": 1}
        paces.pop(stage, None)

    def add(self, name: str, amount: float, label: dict[str, str]) -> None:
        expected = COUNTERS[name].label
        assert set(label) == ({expected} if expected else set()), f"labels of {name}: {label}"
        with self._lock:
            self._counts[name, "".join(label.values())] += amount

    @contextmanager
    def writing(self) -> Iterator[None]:
        over = threading.Event()

        def keep_writing() -> None:
            while not over.wait(PERIOD_SECONDS):
                self._write()

        thread = threading.Thread(target=keep_writing, name="metrics", daemon=True)
        self._write()
        thread.start()
        try:
            yield
        except Exception as error:
            if not isinstance(error, StageIncomplete):  # this process has done its part
                self.add("errors", 1, {"kind": type(error).__name__})
            raise
        finally:
            over.set()
            thread.join()
            self.gauges["running"] = 0
            self._write()

    def _write(self) -> None:
        from prometheus_client import CollectorRegistry, write_to_textfile

        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(os.fspath(self._path), registry)
        except OSError as error:
            if not self._warned:
                self._warned = True
                notice(self._stage, f"metrics cannot be written, the work goes on: {error}")

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            counts = dict(self._counts)
        for name, kind in COUNTERS.items():
            counter = CounterMetricFamily(f"eagle3_{name}", kind.text, labels=_labels(kind))
            for (counted, label), value in counts.items():
                if counted == name:
                    counter.add_metric([*self._labels, label][: len(_labels(kind))], value)
            yield counter
        gauges = {(name, ""): value for name, value in dict(self.gauges).items()}
        for (name, label), value in {**gauges, **self._rates(counts), **self._progress()}.items():
            measured = GAUGES[name]
            gauge = GaugeMetricFamily(f"eagle3_{name}", measured.text, labels=_labels(measured))
            gauge.add_metric([*self._labels, label][: len(_labels(measured))], value)
            yield gauge

    def _rates(self, counts: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        names = ("records", "tokens")
        return {(f"{name}_per_second", ""): counts.get((name, ""), 0) / seconds for name in names}

    def _progress(self) -> dict[tuple[str, str], float]:
        pace = paces.get(self._stage)
        if pace is None:
            return {}
        values = {
            "progress_done": pace.done,
            "progress_total": pace.total,
            "progress_per_second": pace.rate,
            "progress_seconds_left": pace.seconds_left,
        }
        return {(name, pace.unit): value for name, value in values.items() if value is not None}


def _labels(kind: _Kind) -> list[str]:
    return [*_LABELS, kind.label] if kind.label else [*_LABELS]


def _require_library() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        problem, fix = "needs the pip package prometheus_client", "pip install prometheus_client"
        raise MissingPackage(problem, where="run.metrics_dir", fix=fix) from None


_meter: _Meter | None = None  # of the stage that this process is at
