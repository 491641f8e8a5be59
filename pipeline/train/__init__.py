"""States in, draft head out.

stage.py         the stage as a paragraph
plan.py          what it would do, without torch
group.py         the processes that train together
prepare.py       the states verified, surveyed and scheduled, and the start measured on them
stored.py        the states on storage, as training reads them
audit.py         mask, one sample and coverage, looked at before the first step
init.py          how the head begins: from the target, by least squares, or from an earlier head
trainer.py       DeepSpeed, the one way to train
optimizer.py     AdamW or Muon, what they hold of each parameter, averages of weights
loop.py          optimiser steps
grace.py         SIGTERM: a checkpoint, then the end
acceptance.py    the current head decoded: τ and α in the loop
progress.py      how far training is and what it has measured
checkpoints.py   checkpoints that are whole or not there
metrics.py       metrics.jsonl and Weights & Biases
export.py        the chosen head, its card and its committed files
"""
