"""Train a head as another trainer does: its model, loss, optimiser, schedule and interpreter.

    python -m bench.peers.train specforge SAMPLES OUT '{"rate": 1e-4, "passes": 5, …}'

SAMPLES is a file of samples.py; the head in OUT is what the trainer's own class saves. The loop is
the one thing of ours: one order of the samples, drawn with the seed, for each pass.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import track

from bench.peers.samples import Sample, Samples


class PeerTrainer(Protocol):
    """A trainer with its head, made from samples, settings and the number of steps to come."""

    def step(self, batch: list[Sample]) -> None: ...
    def save(self, folder: Path) -> None: ...


def main() -> None:
    """Train and save."""
    options = _options()
    settings: dict[str, Any] = json.loads(options.settings)
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    samples = Samples(options.samples)
    batches = [
        batch
        for number in range(settings["passes"])
        for batch in samples.batches(settings["batch_tokens"], seed=settings["seed"] + number)
    ]
    module = import_module(f"bench.peers.{options.trainer}_step")
    trainer: PeerTrainer = module.HeadTrainer(samples, settings, len(batches))
    for batch in track(batches, options.trainer):
        trainer.step([samples[index] for index in batch])
    trainer.save(options.out)


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="train", description=__doc__, formatter_class=raw)
    parser.add_argument("trainer", choices=("specforge", "speculators"))
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path, help="folder of the head")
    parser.add_argument("settings", help="JSON: what experiments/*.yaml have as `peer`, and a seed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
