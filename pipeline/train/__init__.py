"""States in, draft head out.

stage.py        the stage as a paragraph
plan.py         what it would do, without torch
corpus.py       states of all shards: lengths and supervised tokens at once, states when asked for
schedule.py     which pieces make up batch n, for every n
audit.py        mask, one sample and coverage, looked at before the first step
batches.py      packed micro-batches without padding, read ahead of training
attention.py    which keys a query sees at step k
mixing.py       their softmax, in blocks that the backward pass computes again
flash.py        the same by CUDA's flash kernels
ttt.py          the head unrolled on its own outputs
loss.py         TttModel: unroll, teacher, labels, accuracy
divergence.py   output layer and loss in chunks: cross-entropy, KL, TV, LK
start.py        vocabulary, shape and starting weights of the head; or an earlier head
engine.py       DeepSpeed, the one way to train
checkpoints.py  checkpoints that are whole or not there
metrics.py      metrics.jsonl and Weights & Biases
acceptance.py   the current head decoded: τ and α in the loop
loop.py         optimiser steps
export.py       the chosen head, its card and its committed files
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
