"""Personal data and secrets: detected, dropped or replaced, and counted.

filter.py       PiiFilter, what the stage calls: texts to findings, by the run's policy
finding.py      Finding, thresholds, and how overlapping findings become one
analyzer.py     presidio with spaCy's names
recognisers.py  our own recognisers of numbers, names and addresses
secrets.py      keys, tokens and passwords
dlp.py          Cloud DLP as a further inspector
reserved.py     values that belong to nobody, and replacing findings by them
"""
