"""States in, draft head out.

stage.py         the stage as a paragraph; the head's card and its committed files
plan.py          what it would do, without torch
group.py         the processes that train together
prepare.py       before the first step: states opened, verified and surveyed, the initial head
follow.py        states that are made while they are trained on, and deleted after
loop.py          setting up, optimiser steps, SIGTERM; the current head decoded: τ and α
trainer.py       one optimiser step through DeepSpeed; AdamW or Muon and their state
progress.py      how far training is and what it has measured
checkpoints.py   checkpoints that are whole or not there
metrics.py       metrics.jsonl and Weights & Biases
"""
