"""Personal data and secrets: detected, dropped or replaced, and counted.

filter.py       PiiFilter, what the stage calls: texts to findings, by the run's policy
analyzer.py     presidio with spaCy's names
recognisers.py  our own recognisers of numbers and names
addresses.py    the same for postal addresses
view.py         a text as its reader understands it, searched beside the text
cards.py        payment cards
ids.py          dates of birth and national numbers, where they are wanted
reserved.py     values that are nobody's
finding.py      Finding, thresholds, and how overlapping findings become one
secrets.py      keys, tokens and passwords
dlp.py          Cloud DLP as a further inspector
replace.py      redaction and pseudonyms
ledger.py       counts of findings, and salted hashes of their values
"""
