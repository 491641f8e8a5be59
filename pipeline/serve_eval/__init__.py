"""Head + decoder → acceptance, speed, losslessness, and the report people read.

stage.py        the stage: load, decode, check, report
plan.py         what the stage would do, for `--plan`
questions.py    evaluation prompts → one question for each turn
measure.py      plain, speculative, rivals and Hugging Face in turns; both legs of losslessness
shapes.py       acceptance with other trees, replayed
load.py         closed loops at several concurrencies, and `eagle3 simulate`
intervals.py    acceptance of requests with intervals
compare.py      two drafters on the same requests
summary.py      measurements → the report
pages.py        report.html, report.md, the terminal's table, the page of a decode plan
charts.py       their charts
wording.py      how figures are written
decode_plan.py  `eagle3 plan-decode`
servers/        running servers
"""
