"""Survey the states, choose the draft vocabulary, start the head, unroll it, export it.

    <run uri>/train/metrics.jsonl      a line every train.log_every steps
                    checkpoints/       what a killed run continues from
                    wandb/             Weights & Biases, offline unless asked
                    head/              the head, as SGLang loads it
                    shards/            the same three files, committed and checksummed
                    manifest.json

A remote run works in the user's cache and uploads the head and the metrics at the end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.config import RunConfig, prepare_process
from pipeline.console import console, long_step, notice
from pipeline.eagle3.checkpoint import HeadCard
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.eagle3.init import DraftVocabulary
from pipeline.records import Manifest, digest
from pipeline.store.manifest import manifest_where, read_manifest, stage_location
from pipeline.store.stage_run import StageRun, open_stage
from pipeline.target.arithmetic import NOT_NATIVE, resolve_dtype, torch_arithmetic
from pipeline.target.load import pick_device
from pipeline.target.open import Target, open_target
from pipeline.train.acceptance import Evaluator, check_settings
from pipeline.train.audit import audit_mask, coverage_by_source, show_sample
from pipeline.train.checkpoints import Checkpoints, Marker, workspace
from pipeline.train.data.corpus import HeldOut, Survey, hold_out, survey
from pipeline.train.data.schedule import Schedule
from pipeline.train.data.stored import StoredCorpus, open_corpus
from pipeline.train.export import (
    HEAD,
    chosen_head,
    export,
    measured,
    place_head,
    provenance,
    training_facts,
)
from pipeline.train.loop import TrainingLoop, total_steps
from pipeline.train.metrics import Metrics
from pipeline.train.progress import Progress
from pipeline.train.start.initial_head import choose_start, draft_vocabulary, initial_head
from pipeline.train.start.least_squares import (
    SCALE_BATCHES,
    FirstBatches,
    fc_scale,
    start_by_least_squares,
)
from pipeline.train.trainer import Trainer, rank, rank_zero_first, world
from pipeline.train.ttt.model import Objective, TttModel


class Data(NamedTuple):
    """The states, and what is trained and decoded of them."""

    corpus: StoredCorpus
    survey: Survey
    schedule: Schedule
    held_out: tuple[HeldOut, ...]  # empty without train.evaluate_every


class Trained(NamedTuple):
    """What training ends with."""

    head: Eagle3Head  # the one to export
    progress: Progress
    trainer: Trainer


def run(config: RunConfig) -> Manifest:
    """Train and export the head of `config`.

    Raises MissingStage, StageConflict, ContractMismatch, ConfigError (settings that contradict each
    other, head above its share), HeadError (train.start_from), DataError (mask, non-finite loss),
    CorruptShard and StoreError.
    """
    console.quiet = rank() > 0  # of several processes one writes
    prepare_process(config.run)
    check_settings(config.train)
    parent = read_manifest(config.run.uri, "features")
    device = pick_device(config.target.device)
    stage_run = rank_zero_first(lambda: _open_stage(config, parent), device)
    head_uri = stage_run.location.child(HEAD).uri
    if stage_run.manifest:
        notice("train", f"complete: head at {head_uri}")
        return stage_run.manifest
    where = manifest_where(config.run.uri, "features")
    target = open_target(config.target, expected=parent.contract, where=where)
    start = choose_start(config.train, target.directory, target.contract)
    with long_step("train", "reading the states"):
        data = open_data(config, parent, target, start.shape)
    vocabulary = draft_vocabulary(start, data.survey.counts)
    _log_coverage(data.survey, vocabulary)
    head = initial_head(start, config.train.head_config, vocabulary, target, seed=config.run.seed)
    trained = fit(config, parent, stage_run, head, target, data)
    if trained.trainer.rank == 0:
        facts = training_facts(start, data.survey, vocabulary, trained.progress)
        made_from = provenance(config, parent, start.origin, trained.progress)
        card = HeadCard(target.contract, made_from, {**facts, **measured(trained.progress)})
        with long_step("train", "writing the head"):
            export(stage_run, trained.head, card, tokens=trained.progress.tokens)
        stage_run.finish(
            contract=target.contract,
            licenses=parent.licenses,
            sources=parent.sources,
            details=facts,
            rejected_extra=data.survey.rejected,
        )
        notice("train", f"head at {head_uri}")
    trained.trainer.barrier()
    return read_manifest(config.run.uri, "train")


def open_data(config: RunConfig, parent: Manifest, target: Target, shape: HeadShape) -> Data:
    """Verify the states, hold some out, survey, audit and schedule the rest."""
    section, seed = config.train, config.run.seed
    corpus = open_corpus(config, parent)
    if rank() == 0:
        corpus.verify()
    held_out: tuple[HeldOut, ...] = ()
    if section.evaluate_every:
        longest = shape.max_position_embeddings - section.evaluate_tokens
        held_out = hold_out(corpus, section.evaluate_prompts, seed=seed, longest=longest)
    surveyed = survey(
        corpus,
        vocab_size=target.contract.vocab_size,
        budget=section.batch_tokens,
        long_samples=section.long_samples,
        held_out=held_out,
    )
    audit_mask(surveyed, where=stage_location(config.run.uri, "features").uri)
    template = target.template()
    show_sample(corpus, surveyed, lambda ids: template.text(tuple(ids), special=True))
    _log_survey(surveyed, section.batch_tokens)
    schedule = Schedule(
        surveyed.pieces, budget=section.batch_tokens, seed=seed, epochs=section.epochs
    )
    return Data(corpus, surveyed, schedule, held_out)


def fit(
    config: RunConfig,
    parent: Manifest,
    stage_run: StageRun,
    head: Eagle3Head,
    target: Target,
    data: Data,
) -> Trained:
    """Train `head`, from the newest checkpoint if there is one."""
    section, directory = config.train, workspace(stage_run)
    identity = digest([config.section_hash("train"), parent.content_hash])
    checkpoints = Checkpoints(
        directory / "checkpoints", identity=identity, keep=section.keep_checkpoints
    )
    resumed = checkpoints.newest(world(), sharded=section.zero_stage > 0)
    least_squares = section.head_config.init_layer == "least_squares" and not section.start_from
    if least_squares and resumed is None:
        _solve(config, head, target, data)
    config, why = _choose_dtype(config, resumed, target.device)
    section = config.train
    with long_step("train", "setting up the trainer"):
        trainer = _trainer(config, head, target, data)
    before = _resume(trainer, resumed)
    arithmetic = torch_arithmetic(trainer.dtype, trainer.device)
    stage_run.compute_with(arithmetic, why=why, earlier=before.arithmetic)
    progress = before.computed_with(arithmetic)
    steps = total_steps(section, len(data.schedule), trainer.world, before=progress)
    _log_steps(config, trainer, data.schedule, steps)
    evaluator = _evaluator(config, target, head.shape, data.held_out, trainer)
    with _metrics(config, trainer, directory, identity, progress) as metrics:
        loop = TrainingLoop(
            trainer=trainer,
            corpus=data.corpus,
            schedule=data.schedule,
            section=section,
            checkpoints=checkpoints,
            metrics=metrics,
            evaluator=evaluator,
            steps=steps,
            progress=progress,
        )
        progress = loop.run()
    if progress.step < steps:
        stale = f"{progress.stale} evaluations in a row brought no better τ"
        notice("train", f"stopped after step {progress.step:,}: {stale}")
    return Trained(chosen_head(head.shape, trainer, checkpoints, progress), progress, trainer)


def _open_stage(config: RunConfig, parent: Manifest) -> StageRun:
    stage_run = open_stage(config, "train", parent)
    if stage_run.manifest and rank() == 0:
        place_head(stage_run)
    return stage_run


def _solve(config: RunConfig, head: Eagle3Head, target: Target, data: Data) -> None:
    """Start `head` by least squares; it stays on the CPU."""
    device = target.device
    batches = FirstBatches(data.corpus, data.schedule, config.train.head_config.init_tokens)
    embedding = target.weights.embedding().to(device)
    with long_step("train", "solving the head by least squares"):
        solved = start_by_least_squares(head.to(device), embedding, batches)
    head.cpu()
    linear = f"{solved.explained:.0%} of the target's states explained linearly"
    rest = f"{solved.explained_by_mlp:.0%} of the rest by the MLP"
    notice("train", f"head solved by least squares on {solved.rows:,} labels: {linear}, {rest}")


def _choose_dtype(
    config: RunConfig, resumed: tuple[Path, Marker] | None, device: torch.device
) -> tuple[RunConfig, str]:
    """`config` with the type that training computes in, and why in that.

    A checkpoint's optimiser state is that of its type, so it is what training goes on with.
    """
    wanted, begun = config.train.dtype, resumed and resumed[1].progress.arithmetic
    dtype = begun[-1].dtype if begun else str(resolve_dtype(wanted, device)).split(".")[-1]
    why = ""
    if begun and wanted not in ("auto", dtype):
        why = f", which the checkpoint was begun in (train.dtype={wanted}: begin with --force)"
    elif wanted == "auto" and dtype == "float32":
        why = NOT_NATIVE if not begun else ""
    section = config.train.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"train": section}), why


def _trainer(config: RunConfig, head: Eagle3Head, target: Target, data: Data) -> Trainer:
    """The unrolled head, ready for its first step."""
    section = config.train
    first = FirstBatches(data.corpus, data.schedule, section.batch_tokens * SCALE_BATCHES)
    scale = fc_scale(head, first)
    head.lm_head.weight.requires_grad_(section.train_lm_head)
    model = TttModel(
        head,
        target.weights.embedding(),
        target.weights.lm_head(),
        Objective(section.ttt_steps, section.step_decay, section.loss, section.normalise),
        max_length=max(piece.length for piece in data.survey.pieces),
        dtype=getattr(torch, section.dtype),
        checkpointing=section.activation_checkpointing,
        compiled=section.compile,
    )
    return Trainer(model, section, target.device, fc_scale=scale)


def _resume(trainer: Trainer, resumed: tuple[Path, Marker] | None) -> Progress:
    """Take the newest checkpoint's state, if there is one."""
    if resumed is None:
        return Progress()
    path, marker = resumed
    trainer.load(path)
    computed = "; ".join(map(str, marker.progress.arithmetic))
    where = f"epoch {marker.epoch}, batch {marker.index}; {computed}"
    notice("train", f"continuing from checkpoint {path.name} ({where})")
    return marker.progress


def _evaluator(
    config: RunConfig,
    target: Target,
    shape: HeadShape,
    held_out: tuple[HeldOut, ...],
    trainer: Trainer,
) -> Evaluator | None:
    """On the first process, when samples are held out."""
    if trainer.rank > 0 or not held_out:
        return None
    every = f"every {config.train.evaluate_every:,} steps"
    notice("train", f"{every} {len(held_out)} held-out samples are decoded")
    return Evaluator(target, shape, config.train, held_out, trainer.device)


def _metrics(
    config: RunConfig, trainer: Trainer, directory: Path, identity: str, progress: Progress
) -> AbstractContextManager[Metrics | None]:
    """On the first process; the others write none."""
    if trainer.rank > 0:
        return nullcontext()
    return closing(Metrics(directory, config, step=progress.step, run_id=identity[:12]))


def _log_survey(survey: Survey, batch_tokens: int) -> None:
    share = f"{survey.supervised / survey.tokens:.1%} supervised"
    notice("train", f"states: {survey.samples:,} samples, {survey.tokens:,} tokens, {share}")
    if survey.split:
        longer = f"{survey.split:,} samples are longer than train.batch_tokens={batch_tokens}"
        notice("train", f"{longer} and were split; no token is lost")
    if survey.rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in survey.rejected.items())
        notice("train", f"not trained on: {reasons}")


def _log_coverage(survey: Survey, vocabulary: DraftVocabulary) -> None:
    covered = f"{vocabulary.coverage:.2%} of {survey.supervised:,} supervised tokens"
    notice("train", f"draft vocabulary: {vocabulary.size:,} tokens cover {covered}")
    by_source = coverage_by_source(survey.counts, vocabulary.target_ids)
    if len(by_source) > 1:
        shares = ", ".join(f"{source} {share:.2%}" for source, share in by_source.items())
        notice("train", f"by source: {shares}")


def _log_steps(config: RunConfig, trainer: Trainer, schedule: Schedule, steps: int) -> None:
    section = config.train
    tokens = section.batch_tokens * section.accumulate * trainer.world
    filled = f"filled to {schedule.fill:.1%}, {section.dtype}"
    notice("train", f"{steps:,} steps of {tokens:,} tokens, {filled}")
