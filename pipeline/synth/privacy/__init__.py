"""Personal data and secrets: found, blocked or replaced, and counted.

filter.py      PiiFilter, the one door of this wing: texts to findings, by the run's policy
analyzer.py    presidio with spaCy's names
names.py, addresses.py, numbers.py   our own recognisers; finding.py is what they find
secrets.py     keys, tokens and passwords
dlp.py         Cloud DLP as a further inspector
replace.py     redaction and pseudonyms
ledger.py      what was found, as salted hashes
score.py       `eagle3 pii-score`
"""
