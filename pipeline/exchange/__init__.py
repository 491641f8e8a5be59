"""Heads travel: export to other systems, import from other trainers, and a look inside.

export.py    our head directory → SGLang's or speculators' dialect
imports.py   a foreign directory → our head directory, with a contract made from the target
publish.py   an empty place to write a head to, local or remote
inspect.py   contract, size, tensors, vocabulary, provenance and metrics of a head

Not a stage: nothing here belongs to a run, and no manifest is written.
"""
