"""What `--plan` reckons with: device data sheets, a target's shape, and what both cost.

devices.py     data sheets, and the device that a plan is for
targets.py     a target's shape from its config.json, wherever that is, without its weights
heads.py       parameters and FLOP of a head
generation.py  replies: key/value memory, tensor parallelism, seconds
training.py    memory of a training process by ZeRO stage

No torch. docs/planning.md has every formula.
"""
