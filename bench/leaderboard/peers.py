"""A cell of another trainer: it learns from the same samples, and its head is imported.

    <cell>/synth, features ─► samples.safetensors ─► SpecForge or speculators ─► peer/ ─► head/

The interpreter is that of `make bench-peers`. The file of samples is removed with the head made.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.leaderboard.experiment import Experiment
from bench.leaderboard.usage import Trained, run_measured
from bench.report import ROOT
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.exchange.imports import import_head
from pipeline.heads.fields import layer_config
from pipeline.heads.registry import load_head
from pipeline.store.manifest import read_manifest
from pipeline.target.open import Target, open_target
from pipeline.train.prepare import choose_init, draft_vocabulary, open_corpus, open_data

#: Longer than any sample, so that each is one piece.
_WHOLE = 1 << 20


def train_peer(config: RunConfig, experiment: Experiment, python: Path | None) -> Trained:
    """Leave the head of `experiment.peer` in the cell; an interrupted one is begun again."""
    peer, cell = experiment.peer, Path(config.run.uri)
    assert peer is not None
    if python is None or not python.is_file():
        problem = f"{experiment.name} is trained by {peer.trainer}: {python} is no interpreter"
        fix = "install bench/peers/requirements.txt, and pass its interpreter with --peer-python"
        raise ConfigError(problem, where="--rows", fix=fix)
    target = open_target(config.target)
    samples, foreign, head = (cell / name for name in ("samples.safetensors", "peer", "head"))
    for part in (foreign, head):
        shutil.rmtree(part, ignore_errors=True)
    tokens = write_samples(config, target, samples)
    threads = config.run.threads or len(os.sched_getaffinity(0))
    settings = peer.model_dump() | {"seed": config.run.seed, "threads": threads}
    command = [str(python), "-m", "bench.peers.train", peer.trainer]
    command += [str(samples.resolve()), str(foreign.resolve()), json.dumps(settings)]
    own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    usage = run_measured(command, {**os.environ, **own})
    samples.unlink()
    import_head(str(foreign), target=config.target.source, out=str(head))
    parameters = load_head(head)[0].count_parameters()
    return Trained(usage, tokens, peer.passes * tokens, parameters)


def write_samples(config: RunConfig, target: Target, path: Path) -> int:
    """The samples that a head of ours would learn from; → their tokens."""
    section = config.train.model_copy(update={"batch_tokens": _WHOLE})
    config = config.model_copy(update={"train": section})
    init = choose_init(section, target.directory, target.contract)
    corpus = open_corpus(config, read_manifest(config.states_uri, "features"))
    survey = open_data(config, corpus, target, init.shape).survey
    samples = [corpus.reader(piece.shard).sample(piece.sample) for piece in survey.pieces]
    lengths = torch.tensor([0, *(len(sample.token_ids) for sample in samples)])
    finals = []
    for sample in samples:
        rows = torch.zeros(len(sample.token_ids), target.contract.hidden_size, dtype=torch.bfloat16)
        rows[sample.final_positions.long()] = sample.final_states
        finals.append(rows)
    tensors: dict[str, Tensor] = {
        "token_ids": torch.cat([sample.token_ids for sample in samples]).long(),
        "supervised": torch.cat([sample.supervised_mask for sample in samples]).long(),
        "offsets": lengths.cumsum(0),
        "aux_states": torch.cat([sample.aux_states for sample in samples]),
        "final_states": torch.cat(finals),
        "embedding": target.weights.embedding().bfloat16().clone(),
        "lm_head": target.weights.lm_head().bfloat16().clone(),
        "draft_ids": draft_vocabulary(init, survey.counts).target_ids.long(),
    }
    save_file(tensors, path, metadata={"layer": json.dumps(layer_config(init.shape))})
    return survey.tokens
