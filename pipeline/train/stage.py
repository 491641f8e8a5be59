"""Training as a paragraph: survey the states, choose the vocabulary, start the head, unroll it, export it.

    <run uri>/train/metrics.jsonl      a line every train.log_every steps
                    checkpoints/       what a killed run continues from
                    wandb/             Weights & Biases, offline unless asked
                    head/              the head, as SGLang loads it
                    shards/            the same three files, committed and checksummed
                    manifest.json

A remote run works in the user's cache and uploads the head and the metrics at the end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pipeline.config import RunConfig
from pipeline.console import console, notice
from pipeline.eagle3.checkpoint import HeadCard, save_head
from pipeline.eagle3.head import Eagle3Head
from pipeline.eagle3.vocab import DraftVocabulary, choose_vocabulary
from pipeline.records import Manifest, TargetContract, digest, match_contracts
from pipeline.store.location import cache_directory
from pipeline.store.shards import read_shard
from pipeline.store.stage import StageRun, find_manifest, open_stage, read_manifest, stage_location
from pipeline.target.contract import read_contract
from pipeline.target.load import pick_device
from pipeline.target.resolve import resolve
from pipeline.target.weights import TargetWeights
from pipeline.train.checkpoints import Checkpoints, Progress
from pipeline.train.corpus import StoredCorpus, Survey, audit_mask, survey
from pipeline.train.engine import Engine
from pipeline.train.loop import run_loop, total_steps
from pipeline.train.loss import TttModel
from pipeline.train.metrics import METRICS, Metrics
from pipeline.train.schedule import Schedule
from pipeline.train.start import check_share, head_shape, start_head

HEAD = "head"


def train(config: RunConfig) -> Manifest:
    """Train and export the head of `config`.

    Raises MissingStage, StageConflict, ContractMismatch, ConfigError (head above its share),
    DataError (mask, non-finite loss), CorruptShard and StoreError.
    """
    console.quiet = int(os.environ.get("RANK", "0")) > 0  # of several processes one speaks
    parent = read_manifest(config.run.uri, "features")
    work = open_stage(config, "train", parent)
    if work.manifest:
        place_head(work)
        notice("train", f"complete: head at {work.location.child(HEAD).uri}")
        return work.manifest
    torch.set_num_threads(config.run.threads or torch.get_num_threads())
    resolved = resolve(config.target)
    contract = read_contract(config.target, resolved)
    match_contracts(contract, parent.contract, where=f"{stage_location(config.run.uri, 'features').uri}/manifest.json")
    weights = TargetWeights(resolved.directory)
    shape = head_shape(config.train.head, resolved.directory, contract.vocab_size)
    parameters, share = check_share(shape, contract.parameters, config.train.head.max_share_of_target)
    notice("train", f"head: {parameters:,} parameters, {share:.2%} of the target's {contract.parameters:,}")
    corpus, found = open_corpus(config, parent, contract)
    vocabulary = choose_vocabulary(found.counts, shape.draft_vocab_size)
    notice("train", f"draft vocabulary: {vocabulary.size:,} tokens cover {vocabulary.coverage:.2%} of {found.supervised:,} supervised tokens")
    head = start_head(config.train.head, shape, vocabulary, weights, last_layer=contract.num_layers - 1, seed=config.run.seed)
    progress, engine = fit(config, parent, work, head, weights, corpus, found)
    if engine.rank == 0:
        facts = _facts(found, vocabulary, parameters, share, progress)
        export(config, parent, work, head, contract, facts, progress)
        work.finish(contract=contract, licenses=parent.licenses, sources=parent.sources, details=facts, rejected_extra=found.rejected)
        notice("train", f"head at {work.location.child(HEAD).uri}")
    engine.barrier()
    return read_manifest(config.run.uri, "train")


def open_corpus(config: RunConfig, parent: Manifest, contract: TargetContract) -> tuple[StoredCorpus, Survey]:
    """Verify, survey and audit the states."""
    location = stage_location(config.run.uri, "features")
    corpus = StoredCorpus(location, parent.shards)
    corpus.verify()
    found = survey(corpus, vocab_size=contract.vocab_size, budget=config.train.batch_tokens)
    audit_mask(found, where=location.uri)
    share = found.supervised / found.tokens
    notice("train", f"states: {found.samples:,} samples, {found.tokens:,} tokens, {share:.1%} supervised")
    if found.split:
        notice("train", f"{found.split:,} samples are longer than train.batch_tokens={config.train.batch_tokens} and were split; no token is lost")
    return corpus, found


def fit(
    config: RunConfig, parent: Manifest, work: StageRun, head: Eagle3Head, weights: TargetWeights, corpus: StoredCorpus, found: Survey
) -> tuple[Progress, Engine]:
    """Train `head` in place, from the newest checkpoint if there is one; returns what was done, and the engine that did it."""
    section = config.train
    schedule = Schedule(found.pieces, budget=section.batch_tokens, seed=config.run.seed, epochs=section.epochs)
    longest = max(piece.length for piece in found.pieces)
    dtype: torch.dtype = getattr(torch, section.dtype)
    model = TttModel(head, weights.embedding(), weights.lm_head(), steps=section.ttt_steps, decay=section.step_decay, max_length=longest, dtype=dtype)
    engine = Engine(model, section, pick_device(config.target.device))
    identity = digest([config.section_hash("train"), parent.content_hash])
    directory = workspace(work)
    checkpoints = Checkpoints(directory / "checkpoints", work=identity, keep=section.keep_checkpoints)
    progress = Progress()
    resumed = checkpoints.newest(engine.world)
    if resumed:
        path, marker = resumed
        engine.load(path)
        progress = marker.progress
        notice("train", f"continuing from checkpoint {path.name} (epoch {marker.epoch}, batch {marker.index})")
    steps = total_steps(section, len(schedule), engine.world)
    notice("train", f"{steps:,} steps of {section.batch_tokens * section.accumulate * engine.world:,} tokens, filled to {schedule.fill:.1%}, {section.dtype}")
    first = engine.rank == 0
    settings = config.model_dump(mode="json", include={"train", "target", "run"})
    metrics = Metrics(directory, section, step=progress.step, run_id=f"{identity[:12]}", config=settings) if first else None
    try:
        progress = run_loop(engine, corpus, schedule, section, progress=progress, metrics=metrics, checkpoints=checkpoints)
    finally:
        if metrics:
            metrics.close()
    return progress, engine


def workspace(work: StageRun) -> Path:
    """Where checkpoints and metrics are written: the stage's directory, or a place in the cache for a remote run."""
    if work.location.is_local:
        return work.location.local_path(METRICS).parent
    return cache_directory() / "train" / digest(work.location.uri)[:16]


def export(config: RunConfig, parent: Manifest, work: StageRun, head: Eagle3Head, contract: TargetContract, facts: dict[str, Any], progress: Progress) -> None:
    """Write the head's directory with its provenance and commit its files."""
    directory = workspace(work) / HEAD
    save_head(directory, head, HeadCard(contract, _provenance(config, parent), {**facts, **_measured(progress)}))
    for file in sorted(directory.iterdir()):
        work.commit(file.name, file.read_bytes(), rows=0, tokens=progress.tokens if file.suffix == ".safetensors" else 0)
    place_head(work)
    if not work.location.is_local:
        work.location.put_file(METRICS, workspace(work) / METRICS)


def place_head(work: StageRun) -> None:
    """Make `head/` hold the committed files; what is already there is left as it is."""
    location = work.location.child(HEAD)
    sizes = location.sizes()
    for name, shard in work.shards.items():
        if sizes.get(name) != shard.bytes or location.sha256(name) != shard.sha256:
            location.write(name, read_shard(work.location, shard))


def _facts(found: Survey, vocabulary: DraftVocabulary, parameters: int, share: float, progress: Progress) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "share_of_target": share,
        "draft_vocab_size": vocabulary.size,
        "coverage": vocabulary.coverage,
        "steps": progress.step,
        "tokens": progress.tokens,
        "labels": progress.labels,
        "supervised_tokens": found.supervised,
        "split_samples": found.split,
    }


def _measured(progress: Progress) -> dict[str, float]:
    """Loss and accuracies of the last line of metrics, without its speed, which differs from run to run."""
    return {name: value for name, value in progress.last.items() if name != "tokens_per_second"}


def _provenance(config: RunConfig, parent: Manifest) -> dict[str, Any]:
    """Which data, under which licences, with which settings made this head."""
    samples = find_manifest(config.run.uri, "synth")
    chain = {"features": parent, **({"synth": samples} if samples and samples.content_hash == parent.parent_hash else {})}
    settings = config.model_dump(mode="json", exclude={"run": {"uri", "force", "threads"}, "target": {"cache_dir"}, "eval": True})
    return {
        "manifests": {"features": parent.content_hash, "synth": parent.parent_hash},
        "licenses": parent.licenses,
        "sources": parent.sources,
        "rejected": {stage: manifest.rejected for stage, manifest in chain.items()},
        "config": settings,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }
