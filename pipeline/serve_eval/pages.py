"""report.html and report.md of a run, from report.json and what running servers did beside it."""

from __future__ import annotations

from pipeline.config import RunConfig
from pipeline.console import notice
from pipeline.reports import EvalReport
from pipeline.serve_eval.live.stage import read_results, report_of
from pipeline.serve_eval.page.markdown import write_markdown
from pipeline.serve_eval.page.report import write_html
from pipeline.store.location import Location
from pipeline.store.manifest import stage_location

PAGE, MARKDOWN = "report.html", "report.md"


def write_pages(location: Location, report: EvalReport, run_uri: str) -> None:
    """Anew, with all servers that were asked until now; `report` is that of stage eval, there."""
    shown = report.model_copy(update={"servers": read_results(run_uri)})
    location.write(PAGE, write_html(shown).encode())
    location.write(MARKDOWN, write_markdown(shown).encode())


def renew_pages(config: RunConfig) -> None:
    """After a server was asked; nothing where the stage has no report yet."""
    if report := report_of(config):
        location = stage_location(config.run.uri, "eval")
        write_pages(location, report, config.run.uri)
        notice("eval", f"report: {location.where(PAGE)}")
