"""`report.json`: what rounds did for every request, and all that is derived from it. No torch.

acceptance.py    counters of a request, and acceptance of a group of requests
load.py          requests at one concurrency, through our engine or a server
metric_names.py  the same acceptance under vLLM's, SGLang's and SPEED-Bench's names
report.py        the whole report, with the target, the head and the machine
"""

from pipeline.reports.acceptance import (
    AcceptanceFigures,
    Estimate,
    PromptResult,
    RoundCounters,
    ShapeAcceptance,
)
from pipeline.reports.load import (
    LoadCurve,
    LoadPoint,
    Percentiles,
    ServerExpectation,
    ServerFinding,
    ServerResult,
    ServerWorkload,
)
from pipeline.reports.metric_names import OtherNames, SglangNames, SpeedBenchNames, VllmNames
from pipeline.reports.report import (
    REPORT,
    CategoryFigures,
    DrafterSettings,
    EvalReport,
    GoldenFigure,
    GoldenPrompt,
    HeadFigures,
    LosslessChecks,
    PairedComparison,
    ReferenceCheck,
    ReportSettings,
    TreeChoice,
    TreeFigures,
    Verdict,
    report_schema,
)

__all__ = [
    "REPORT",
    "AcceptanceFigures",
    "CategoryFigures",
    "DrafterSettings",
    "Estimate",
    "EvalReport",
    "GoldenFigure",
    "GoldenPrompt",
    "HeadFigures",
    "LoadCurve",
    "LoadPoint",
    "LosslessChecks",
    "OtherNames",
    "PairedComparison",
    "Percentiles",
    "PromptResult",
    "ReferenceCheck",
    "ReportSettings",
    "RoundCounters",
    "ServerExpectation",
    "ServerFinding",
    "ServerResult",
    "ServerWorkload",
    "SglangNames",
    "ShapeAcceptance",
    "SpeedBenchNames",
    "TreeChoice",
    "TreeFigures",
    "Verdict",
    "VllmNames",
    "report_schema",
]
