"""What `--plan` and `plan-decode` compute from shapes alone.

targets.py     a target's shape from its config.json, without its weights
heads.py       a head's parameters, and the memory of a training process by ZeRO stage
decode.py      which drafter pays at which batch size and context

No torch. docs/planning.md has every formula.
"""
