"""`report.json`: what rounds did for every request, and all that is derived from it. No torch.

acceptance.py  counters of a request, and acceptance of a group of requests
load.py        requests at one concurrency, through our engine or a server
report.py      all of it, with the target, the head and the machine
"""

from pipeline.reports.acceptance import (
    AcceptanceFigures,
    Estimate,
    PromptResult,
    RoundCounters,
    ShapeAcceptance,
)
from pipeline.reports.load import LoadCurve, LoadPoint, Percentiles, ServerFinding, ServerResult
from pipeline.reports.report import (
    REPORT,
    EvalReport,
    GoldenFigure,
    GoldenPrompt,
    PairedComparison,
    Verdict,
    report_schema,
)

__all__ = [
    "REPORT",
    "AcceptanceFigures",
    "Estimate",
    "EvalReport",
    "GoldenFigure",
    "GoldenPrompt",
    "LoadCurve",
    "LoadPoint",
    "PairedComparison",
    "Percentiles",
    "PromptResult",
    "RoundCounters",
    "ServerFinding",
    "ServerResult",
    "ShapeAcceptance",
    "Verdict",
    "report_schema",
]
