"""Survey the states, choose the draft vocabulary, start the head, unroll it, export it.

    <run uri>/train/metrics.jsonl      a line every train.log_every steps
                    checkpoints/       what a killed run continues from
                    wandb/             Weights & Biases, offline unless asked
                    head/              the head, as SGLang loads it
                    shards/            the same three files, committed and checksummed
                    manifest.json

A remote run keeps a copy of what it writes in the user's cache. Of several processes the first one
writes and reads all of this; the others are told.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config import RunConfig, prepare_process, rank, world_size
from pipeline.console import console, long_step, notice
from pipeline.heads.base import BorrowedRows, DraftingHead, DraftShape
from pipeline.heads.checkpoint import HeadCard
from pipeline.heads.init import DraftVocabulary
from pipeline.heads.registry import algorithm_of, solves_least_squares
from pipeline.learning.corpus import HeldOut
from pipeline.learning.schedule import Schedule
from pipeline.records import Manifest, digest
from pipeline.store.location import Location
from pipeline.store.manifest import manifest_where, read_begin, read_manifest
from pipeline.store.stage_run import StageRun, open_stage
from pipeline.target.arithmetic import NOT_NATIVE, pick_device, resolve_dtype, torch_arithmetic
from pipeline.target.open import Target, open_target
from pipeline.train.acceptance import Evaluator, check_settings
from pipeline.train.audit import log_coverage
from pipeline.train.checkpoints import Checkpoint, Checkpoints, workspace
from pipeline.train.export import (
    HEAD,
    chosen_head,
    export,
    measured,
    place_head,
    provenance,
    training_facts,
)
from pipeline.train.group import broadcast_from_rank0, join_group, rank0_first, rank0_only
from pipeline.train.init import HeadInit, choose_init, draft_vocabulary, initial_head
from pipeline.train.loop import TrainingLoop, total_steps
from pipeline.train.metrics import Metrics
from pipeline.train.prepare import Data, measure_scale, open_data, solve_least_squares
from pipeline.train.progress import Progress
from pipeline.train.trainer import Trainer


class Trained(NamedTuple):
    """What training ends with."""

    weights: dict[str, Tensor]  # of the last step
    progress: Progress
    checkpoints: Checkpoints


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
    if world_size() > 1:
        join_group(device, minutes=config.train.timeout_minutes)
    stage_run = rank0_first(lambda: _open_stage(config, parent))
    head_uri = stage_run.location.child(HEAD).uri
    if stage_run.manifest:
        notice("train", f"complete: head at {head_uri}")
        return stage_run.manifest
    where = manifest_where(config.run.uri, "features")
    decoded = config.train.evaluate_every is not None
    target = open_target(config.target, expected=parent.contract, where=where, decoded=decoded)
    start = choose_init(config.train, target.directory, target.contract)
    with long_step("train", "reading the states"):
        data = open_data(config, parent, target, start.shape)
    vocabulary = draft_vocabulary(start, data.survey.counts)
    log_coverage(data.survey, vocabulary)
    head = initial_head(start, config.train, vocabulary, target, seed=config.run.seed)
    trained = fit(config, stage_run, head, target, data)
    with long_step("train", "writing the head"):
        broadcast_from_rank0(
            lambda: _finish(config, parent, stage_run, start, data, vocabulary, target, trained)
        )
    notice("train", f"head at {head_uri}")
    return read_manifest(config.run.uri, "train")


def fit(
    config: RunConfig, stage_run: StageRun, head: DraftingHead, target: Target, data: Data
) -> Trained:
    """Train `head`, from the newest checkpoint if there is one."""
    section, identity = config.train, _identity(stage_run, data.held_out)
    location, keep = stage_run.location, section.keep_checkpoints
    checkpoints = Checkpoints(location, identity=identity, keep=keep)
    resumed = broadcast_from_rank0(checkpoints.newest)
    if solves_least_squares(section) and resumed is None:
        solve_least_squares(config, head, target, data)
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
    with _metrics(config, location, identity, resumed) as metrics:
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
    return Trained(trainer.weights(), progress, checkpoints)


def _finish(
    config: RunConfig,
    parent: Manifest,
    stage_run: StageRun,
    start: HeadInit,
    data: Data,
    vocabulary: DraftVocabulary,
    target: Target,
    trained: Trained,
) -> None:
    """Export the head and write the manifest."""
    head = chosen_head(start.shape, trained.weights, trained.checkpoints, trained.progress)
    facts = training_facts(start, data.survey, vocabulary, trained.progress)
    made_from = provenance(config, parent, start.origin, trained.progress)
    card = HeadCard(target.contract, made_from, {**facts, **measured(trained.progress)})
    export(stage_run, head, card, tokens=trained.progress.tokens)
    stage_run.finish(
        contract=target.contract,
        licenses=parent.licenses,
        sources=parent.sources,
        details=facts,
        rejected_extra=data.survey.rejected,
    )


def _identity(stage_run: StageRun, held_out: tuple[HeldOut, ...]) -> str:
    """Of the work that was begun: a key that came later and has its default does not count.

    Held-out samples do: who holds out others makes other batches.
    """
    begun = read_begin(stage_run.location)
    assert begun is not None, "an open stage has begun"
    others = [[[item.shard, item.sample] for item in held_out]] if held_out else []
    return digest([begun.config_hash, begun.parent_hash, *others])


def _open_stage(config: RunConfig, parent: Manifest) -> StageRun:
    stage_run = open_stage(config, "train", parent)
    if stage_run.manifest and rank() == 0:
        place_head(stage_run)
    return stage_run


def _choose_dtype(
    config: RunConfig, resumed: Checkpoint | None, device: torch.device
) -> tuple[RunConfig, str]:
    """`config` with the type that training computes in, and why in that.

    A checkpoint's optimiser state is that of its type, so it is what training goes on with.
    """
    wanted, begun = config.train.dtype, resumed and resumed.marker.progress.arithmetic
    dtype = begun[-1].dtype if begun else str(resolve_dtype(wanted, device)).split(".")[-1]
    why = ""
    if begun and wanted not in ("auto", dtype):
        why = f", which the checkpoint was begun in (train.dtype={wanted}: begin with --force)"
    elif wanted == "auto" and dtype == "float32":
        why = NOT_NATIVE if not begun else ""
    section = config.train.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"train": section}), why


def _trainer(config: RunConfig, head: DraftingHead, target: Target, data: Data) -> Trainer:
    """The head with its loss, ready for its first step."""
    section = config.train
    scale = measure_scale(config, head, data)
    if not isinstance(head.lm_head, BorrowedRows):
        head.lm_head.weight.requires_grad_(section.train_lm_head)
    model = algorithm_of(head).training.trained_model(
        section,
        head,
        target.weights.embedding(),
        target.weights.lm_head(),
        max_length=max(piece.stop for piece in data.survey.pieces),
        dtype=getattr(torch, section.dtype),
        seed=config.run.seed,
    )
    return Trainer(model, section, target.device, fc_scale=scale)


def _resume(trainer: Trainer, resumed: Checkpoint | None) -> Progress:
    """Take the checkpoint's state, if there is one; the first process alone reads its files."""
    if resumed is None:
        return Progress()
    trainer.restore(resumed.state, where=resumed.name)
    marker = resumed.marker
    computed = "; ".join(map(str, marker.progress.arithmetic))
    where = f"epoch {marker.epoch}, batch {marker.index}; {computed}"
    notice("train", f"continuing from checkpoint {resumed.name} ({where})")
    return marker.progress


def _evaluator(
    config: RunConfig,
    target: Target,
    shape: DraftShape,
    held_out: tuple[HeldOut, ...],
    trainer: Trainer,
) -> Evaluator | None:
    """On the first process, when samples are held out; its error stops all."""
    if not held_out:
        return None
    count, every = config.train.evaluate_prompts, f"every {config.train.evaluate_every:,} steps"
    notice("train", f"{every} {count} held-out samples are decoded, {count} others at the end")
    given = target, shape, config.train, held_out, trainer.device
    made = rank0_only(lambda: Evaluator(*given))
    return made[0] if made else None


def _metrics(
    config: RunConfig, stage: Location, identity: str, resumed: Checkpoint | None
) -> AbstractContextManager[Metrics | None]:
    """On the first process, whose error stops all; the others write none."""

    def begin() -> Metrics:
        before, run_id = resumed.metrics() if resumed else b"", identity[:12]
        return Metrics(workspace(stage), stage, config, before=before, run_id=run_id)

    made = rank0_only(begin)
    return closing(made[0]) if made else nullcontext()


def _log_steps(config: RunConfig, trainer: Trainer, schedule: Schedule, steps: int) -> None:
    section = config.train
    tokens = section.batch_tokens * section.accumulate * trainer.world
    filled = f"filled to {schedule.fill:.1%}, {section.dtype}"
    notice("train", f"{steps:,} steps of {tokens:,} tokens, {filled}")
