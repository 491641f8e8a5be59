"""States in, draft head out.

stage.py        the stage as a paragraph
plan.py         what it would do, without torch
corpus.py       states of all shards: lengths and supervised tokens at once, states when asked for
schedule.py     which pieces make up batch n, for every n
batches.py      packed micro-batches without padding
attention.py    which keys a query sees at step k
ttt.py          the head unrolled on its own outputs
loss.py         teacher, labels, soft cross-entropy, accuracy
start.py        vocabulary, shape and starting weights of the head
engine.py       DeepSpeed, the one way to train
checkpoints.py  checkpoints that are whole or not there
metrics.py      metrics.jsonl and Weights & Biases
loop.py         optimiser steps
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.records import Manifest

__all__ = ["run"]


def run(config: RunConfig) -> Manifest:
    """Train the head of `config` from its states, or return at once when that is done."""
    from pipeline.train.stage import train

    return train(config)
