"""Which prompts go in, before any model is loaded.

select.py    prompts of a run, cut into shards and stored once
stream.py    those that pass all filters, one at a time
filters.py   licence gate, length, duplicates, decontamination
quality.py   language, repetition, near duplicates, refusals
seen.py      what came before, on the disk
estimate.py  how many there will be, for `--plan`
"""
