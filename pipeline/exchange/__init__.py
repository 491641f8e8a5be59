"""Heads in and out: export for other systems, import from other trainers, and a look inside; and a
target in float8.

export.py       our head directory → SGLang's or speculators' dialect, chained heads → MTP layers
imports.py      a head of another trainer → our head directory, with a contract made from the target
inspect.py      contract, size, tensors, vocabulary, provenance and metrics of a head
float8.py       a target → a copy that is rounded to float8
model_card.py   README.md of an exported head, as the Hugging Face hub reads it

Not a stage: nothing here belongs to a run, and no manifest is written.
"""
