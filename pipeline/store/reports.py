"""Where reports of evaluation are, and how they are read."""

from __future__ import annotations

from pipeline.reports import REPORT, EvalReport
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location


def read_report(source: str) -> EvalReport:
    """Of a report's own path or URI (….json), or of the run at a URI.

    Raises StoreError without one, CorruptShard for a file that is none.
    """
    if source.endswith(".json"):
        above, separator, name = source.rpartition("/")
        location = Location(above if separator else ".")
    else:
        location, name = stage_location(source, "eval"), REPORT
    where = location.where(name)
    return EvalReport.parse(location.read(name), where=where, fix="run `eagle3 eval` there")
