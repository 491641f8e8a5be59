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

from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.config import RunConfig
from pipeline.console import console, notice
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.eagle3.vocabulary import DraftVocabulary
from pipeline.records import Manifest, digest
from pipeline.store.stage_run import StageRun, open_stage, read_manifest, stage_location
from pipeline.target.load import pick_device
from pipeline.target.open import Target, open_target
from pipeline.train.acceptance import Evaluator, check_settings
from pipeline.train.audit import audit_mask, coverage_by_source, show_sample
from pipeline.train.checkpoints import Checkpoints, Marker, Progress, workspace
from pipeline.train.data.corpus import HeldOut, Survey, hold_out, survey
from pipeline.train.data.schedule import Schedule
from pipeline.train.data.stored import StoredCorpus, open_corpus
from pipeline.train.export import HEAD, chosen_head, export, facts_of, place_head
from pipeline.train.loop import run_loop, total_steps
from pipeline.train.metrics import Metrics
from pipeline.train.start.least_squares import (
    SCALE_BATCHES,
    FirstBatches,
    fc_scale,
    start_by_least_squares,
)
from pipeline.train.start.start import begin, choose_start, draft_vocabulary
from pipeline.train.trainer import Trainer, in_turn, rank, world
from pipeline.train.ttt.model import TttModel


class Data(NamedTuple):
    """The states, and what is trained and decoded of them."""

    corpus: StoredCorpus
    found: Survey
    held_out: tuple[HeldOut, ...]  # empty without train.evaluate_every


def train(config: RunConfig) -> Manifest:
    """Train and export the head of `config`.

    Raises MissingStage, StageConflict, ContractMismatch, ConfigError (settings that contradict each other, head
    above its share), HeadError (train.start_from), DataError (mask, non-finite loss), CorruptShard and StoreError.
    """
    console.quiet = rank() > 0  # of several processes one speaks
    check_settings(config.train)
    parent = read_manifest(config.run.uri, "features")
    work = in_turn(lambda: _open(config, parent), pick_device(config.target.device))
    if work.manifest:
        notice("train", f"complete: head at {work.location.child(HEAD).uri}")
        return work.manifest
    torch.set_num_threads(config.run.threads or torch.get_num_threads())
    where = f"{stage_location(config.run.uri, 'features').uri}/manifest.json"
    target = open_target(config.target, expected=parent.contract, where=where)
    start = choose_start(config.train, target.directory, target.contract)
    data = open_data(config, parent, target, start.shape)
    vocabulary = draft_vocabulary(start, data.found.counts)
    _tell_coverage(data.found, vocabulary)
    head = begin(
        start,
        config.train.head,
        vocabulary,
        target.weights,
        last_layer=target.contract.num_layers - 1,
        seed=config.run.seed,
    )
    progress, trained, engine = fit(config, parent, work, head, target, data)
    if engine.rank == 0:
        facts = facts_of(data.found, vocabulary, start.parameters, start.share, progress)
        export(config, parent, work, trained, target.contract, facts, progress, start.origin)
        work.finish(
            contract=target.contract,
            licenses=parent.licenses,
            sources=parent.sources,
            details=facts,
            rejected_extra=data.found.rejected,
        )
        notice("train", f"head at {work.location.child(HEAD).uri}")
    engine.barrier()
    return read_manifest(config.run.uri, "train")


def open_data(config: RunConfig, parent: Manifest, target: Target, shape: HeadShape) -> Data:
    """Verify the states, hold some out, survey and audit the rest."""
    section, location = config.train, stage_location(config.run.uri, "features")
    corpus = open_corpus(config, parent)
    if rank() == 0:
        corpus.verify()
    longest = shape.max_position_embeddings - section.evaluate_tokens
    held_out = (
        hold_out(corpus, section.evaluate_prompts, seed=config.run.seed, longest=longest)
        if section.evaluate_every
        else ()
    )
    found = survey(
        corpus,
        vocab_size=target.contract.vocab_size,
        budget=section.batch_tokens,
        long_samples=section.long_samples,
        held_out=held_out,
    )
    audit_mask(found, where=location.uri)
    template = target.template()
    show_sample(corpus, found, lambda ids: template.text(tuple(ids), special=True))
    notice(
        "train",
        f"states: {found.samples:,} samples, {found.tokens:,} tokens, {found.supervised / found.tokens:.1%} supervised",
    )
    if found.split:
        notice(
            "train",
            f"{found.split:,} samples are longer than train.batch_tokens={section.batch_tokens} and were split; no token is lost",
        )
    if found.rejected:
        notice(
            "train",
            f"not trained on: {', '.join(f'{reason} {count:,}' for reason, count in found.rejected.items())}",
        )
    return Data(corpus, found, held_out)


def fit(
    config: RunConfig,
    parent: Manifest,
    work: StageRun,
    head: Eagle3Head,
    target: Target,
    data: Data,
) -> tuple[Progress, Eagle3Head, Trainer]:
    """Train `head` from the newest checkpoint if there is one; returns what was done, the head to export, and the engine."""
    section, shape = config.train, head.shape
    schedule = Schedule(
        data.found.pieces, budget=section.batch_tokens, seed=config.run.seed, epochs=section.epochs
    )
    identity = digest([config.section_hash("train"), parent.content_hash])
    directory = workspace(work)
    checkpoints = Checkpoints(
        directory / "checkpoints", work=identity, keep=section.keep_checkpoints
    )
    device = pick_device(config.target.device)
    resumed = checkpoints.newest(world(), sharded=section.zero_stage > 0)
    if section.head.init_layer == "least_squares" and not section.start_from and resumed is None:
        _solve(config, head, target, data, schedule, device)
    scale = fc_scale(
        head, FirstBatches(data.corpus, schedule, section.batch_tokens * SCALE_BATCHES)
    )
    engine = Trainer(_model(config, head, target, data.found), section, device, fc_scale=scale)
    progress = _resume(engine, resumed)
    steps = total_steps(section, len(schedule), engine.world, before=progress)
    notice(
        "train",
        f"{steps:,} steps of {section.batch_tokens * section.accumulate * engine.world:,} tokens, filled to {schedule.fill:.1%}, {section.dtype}",
    )
    first = engine.rank == 0
    evaluator = (
        _evaluator(config, target, shape, data.held_out, engine)
        if first and data.held_out
        else None
    )
    settings = config.model_dump(mode="json", include={"train", "target", "run"})
    metrics = (
        Metrics(directory, section, step=progress.step, run_id=f"{identity[:12]}", config=settings)
        if first
        else None
    )
    try:
        progress = run_loop(
            engine,
            data.corpus,
            schedule,
            section,
            progress=progress,
            metrics=metrics,
            checkpoints=checkpoints,
            evaluator=evaluator,
        )
    finally:
        if metrics:
            metrics.close()
    if progress.step < steps:
        notice(
            "train",
            f"stopped after step {progress.step:,}: {progress.stale} evaluations in a row brought no better τ",
        )
    return progress, chosen_head(shape, engine, checkpoints, progress), engine


def _open(config: RunConfig, parent: Manifest) -> StageRun:
    work = open_stage(config, "train", parent)
    if work.manifest and rank() == 0:
        place_head(work)
    return work


def _model(config: RunConfig, head: Eagle3Head, target: Target, found: Survey) -> TttModel:
    section = config.train
    head.lm_head.weight.requires_grad_(section.train_lm_head)
    return TttModel(
        head,
        target.weights.embedding(),
        target.weights.lm_head(),
        steps=section.ttt_steps,
        decay=section.step_decay,
        max_length=max(piece.length for piece in found.pieces),
        dtype=getattr(torch, section.dtype),
        loss=section.loss,
        normalise=section.normalise,
        checkpointing=section.activation_checkpointing,
        compiled=section.compile,
    )


def _solve(
    config: RunConfig,
    head: Eagle3Head,
    target: Target,
    data: Data,
    schedule: Schedule,
    device: torch.device,
) -> None:
    """Start `head` by least squares; it stays on the CPU."""
    batches = FirstBatches(data.corpus, schedule, config.train.head.init_tokens)
    solved = start_by_least_squares(head.to(device), target.weights.embedding().to(device), batches)
    head.cpu()
    explained = f"{solved.explained:.0%} of the target's states explained linearly, {solved.explained_by_mlp:.0%} of the rest by the MLP"
    notice("train", f"head solved by least squares on {solved.rows:,} labels: {explained}")


def _resume(engine: Trainer, resumed: tuple[Path, Marker] | None) -> Progress:
    """Take the newest checkpoint's state, if there is one."""
    if resumed is None:
        return Progress()
    path, marker = resumed
    engine.load(path)
    notice(
        "train",
        f"continuing from checkpoint {path.name} (epoch {marker.epoch}, batch {marker.index})",
    )
    return marker.progress


def _evaluator(
    config: RunConfig,
    target: Target,
    shape: HeadShape,
    held_out: tuple[HeldOut, ...],
    engine: Trainer,
) -> Evaluator:
    notice(
        "train",
        f"every {config.train.evaluate_every:,} steps {len(held_out)} held-out samples are decoded",
    )
    return Evaluator(
        target.directory,
        target.contract,
        shape,
        config.train,
        held_out,
        stop_ids=target.template().stop_ids,
        device=engine.device,
    )


def _tell_coverage(found: Survey, vocabulary: DraftVocabulary) -> None:
    notice(
        "train",
        f"draft vocabulary: {vocabulary.size:,} tokens cover {vocabulary.coverage:.2%} of {found.supervised:,} supervised tokens",
    )
    by_source = coverage_by_source(found.counts, vocabulary.target_ids)
    if len(by_source) > 1:
        notice(
            "train",
            f"by source: {', '.join(f'{source} {share:.2%}' for source, share in by_source.items())}",
        )
