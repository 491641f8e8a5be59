"""Survey the states, choose the draft vocabulary, initialise the head, unroll it, export it.

    <run uri>/train/metrics.jsonl      a line every train.log_every steps
                    checkpoints/       what a killed run continues from
                    wandb/             Weights & Biases, offline by default
                    head/              the head, as SGLang loads it
                    shards/            the same three files, committed and checksummed
                    manifest.json

A remote run keeps a copy of what it writes in the user's cache. Of several processes rank 0 reads
and writes all of this, and broadcasts to the others.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch

from pipeline.config import RunConfig, prepare_process, rank, world_size
from pipeline.console import console, long_step, notice
from pipeline.errors import StageConflict, TakenOver, memory_explained
from pipeline.heads.base import DraftingHead
from pipeline.heads.checkpoint import HeadCard, without_places
from pipeline.heads.init import DraftVocabulary
from pipeline.heads.registry import algorithm, empty_head, encode_head
from pipeline.records import Manifest
from pipeline.store.manifest import Awaited, find_manifest, manifest_where, read_manifest
from pipeline.store.shards import read_shard
from pipeline.store.stage_run import StageRun, open_stage
from pipeline.target.arithmetic import pick_device
from pipeline.target.open import Target, open_target
from pipeline.train.checkpoints import stored_checkpoints
from pipeline.train.follow import FollowedCorpus, await_begin, await_manifest, require_states
from pipeline.train.group import broadcast_from_rank0, join_group, rank0_first, rank0_only
from pipeline.train.loop import TrainingLoop, set_up
from pipeline.train.metrics import METRICS, VOLATILE
from pipeline.train.prepare import (
    Data,
    HeadInit,
    choose_init,
    coverage_by_source,
    draft_vocabulary,
    initial_head,
    log_coverage,
    log_vocabulary_sizes,
    open_corpus,
    open_data,
)
from pipeline.train.progress import Progress

HEAD = "head"
_CLAIM = "training"


def run(config: RunConfig) -> Manifest:
    """Train and export the head of `config`.

    Raises MissingStage, StageConflict, ContractMismatch, ConfigError (head above its share, too few
    samples to hold out), HeadError (train.start_from), DataError (mask, non-finite loss),
    CorruptShard and StoreError.
    """
    console.quiet = rank() > 0  # of several processes one writes
    prepare_process(config.run)
    follow = config.train.follow
    parent = read_manifest(config.states_uri, "synth" if follow else "features")
    device = pick_device(config.target.device)
    if world_size() > 1:
        join_group(device, minutes=config.train.timeout_minutes)
    inputs = await_begin(config, parent) if follow else parent
    stage_run = rank0_first(lambda: _open_stage(config, inputs))
    if stage_run.manifest is None:
        try:
            rank0_only(lambda: stage_run.claim(_CLAIM, config.run.claim_seconds))
            if not broadcast_from_rank0(stage_run.is_finished):
                return _train(config, parent, stage_run, device)
        except TakenOver as error:
            rank0_only(partial(stage_run.outlast, error))
        finally:
            stage_run.release()
        stage_run = rank0_first(lambda: _open_stage(config, inputs))
    assert stage_run.manifest is not None, "another process has finished it"
    notice("train", f"complete: head at {stage_run.location.child(HEAD).uri}")
    return stage_run.manifest


def _train(
    config: RunConfig, parent: Manifest, stage_run: StageRun, device: torch.device
) -> Manifest:
    """Train and export as the only attempt. Raises TakenOver where it no longer is.

    `parent` is the manifest of the states, or of the samples where training follows features.
    """
    head_uri = stage_run.location.child(HEAD).uri
    where = manifest_where(config.states_uri, parent.stage)
    decoded = config.train.evaluate_every is not None
    target = open_target(config.target, expected=parent.contract, where=where, decoded=decoded)
    init = choose_init(config.train, target.directory, target.contract, refresh=config.refresh)
    with long_step("train", "reading the states"):
        follow = config.train.follow
        corpus = FollowedCorpus(config, parent) if follow else open_corpus(config, parent)
        data = open_data(config, corpus, target, init.shape)
    vocabulary = draft_vocabulary(init, data.survey.counts)
    log_coverage(data.survey, vocabulary)
    if algorithm(config.train).is_unrolled:
        log_vocabulary_sizes(init, data.survey, target)
    head = initial_head(init, config.train, vocabulary, target, seed=config.run.seed)
    loop = set_up(config, stage_run, head, target, data)
    with memory_explained("train"):
        loop.run()
    if follow:
        parent = await_manifest(config)
    with long_step("train", "writing the head"):
        broadcast_from_rank0(
            lambda: _finish(config, parent, stage_run, init, data, vocabulary, target, loop)
        )
    notice("train", f"head at {head_uri}")
    return read_manifest(config.run.uri, "train")


def _open_stage(config: RunConfig, parent: Manifest | Awaited) -> StageRun:
    if config.train.follow:
        require_states(config, parent)
    stage_run = open_stage(config, "train", parent)
    if stage_run.manifest and rank() == 0:
        _place_head(stage_run)
    return stage_run


def _finish(
    config: RunConfig,
    parent: Manifest,
    stage_run: StageRun,
    init: HeadInit,
    data: Data,
    vocabulary: DraftVocabulary,
    target: Target,
    loop: TrainingLoop,
) -> None:
    """Export the head and write the manifest."""
    progress = loop.progress
    facts = _facts(init, data, vocabulary, progress)
    measured = {name: value for name, value in progress.last.items() if name not in VOLATILE}
    if progress.best:
        measured = progress.best.measured
    made_from = _provenance(config, parent, init, progress)
    card = HeadCard(target.contract, made_from, {**facts, **measured})
    _export(stage_run, _chosen_head(init, loop), card, tokens=progress.tokens)
    stage_run.finish(
        contract=target.contract,
        licenses=parent.licenses,
        sources=parent.sources,
        details=facts,
        rejected_extra=data.survey.rejected,
        files=(METRICS,),
        parent_hash=parent.content_hash,
        known=stored_checkpoints(stage_run.location).files
        | {f"{HEAD}/{name}": (each.bytes, each.sha256) for name, each in stage_run.shards.items()},
    )


def _chosen_head(init: HeadInit, loop: TrainingLoop) -> DraftingHead:
    """The head to export: that of the chosen evaluation, or the last one without any."""
    weights, progress = loop.trainer.weights(), loop.progress
    best, reported = progress.best, progress.reported
    if best and reported:
        which = f"after step {best.step:,} of {progress.step:,}"
        notice("train", f"best of {progress.evaluations} evaluations: {which}")
        tau = f"τ {reported.tau:.3f} ± {reported.tau_error:.3f} (standard error)"
        notice("train", f"{tau} on {len(reported.rounds)} samples that did not choose it")
        weights = loop.checkpoints.read_best(best)
    dtype = next(each.dtype for each in weights.values() if each.is_floating_point())
    head = empty_head(init.shape).to(dtype)
    head.load_state_dict(weights)
    return head


def _export(stage_run: StageRun, head: DraftingHead, card: HeadCard, *, tokens: int) -> None:
    """Commit the head's files, and place them; `tokens` are those it was trained on."""
    for name, data in encode_head(head, card).items():
        own = tokens if name.endswith(".safetensors") else 0
        shard = stage_run.commit(name, data, rows=0, tokens=own)
        if shard.sha256 != hashlib.sha256(data).hexdigest():
            # Files of two attempts would make a head that was never trained.
            problem = f"an earlier attempt has committed another {name}, and was killed there"
            fix = "pass --force to train again, or choose another run.uri=…"
            raise StageConflict(problem, where=stage_run.location.uri, fix=fix)
    _place_head(stage_run)


def _place_head(stage_run: StageRun) -> None:
    """Make `head/` hold the committed files; what is already there is left as it is."""
    location = stage_run.location.child(HEAD)
    sizes = location.sizes()
    for name, shard in stage_run.shards.items():
        if sizes.get(name) != shard.bytes or location.sha256(name) != shard.sha256:
            location.write(name, read_shard(stage_run.location, shard))


def _facts(
    init: HeadInit, data: Data, vocabulary: DraftVocabulary, progress: Progress
) -> dict[str, Any]:
    """What card and manifest say of the head and its training.

    Of its quality only τ, when it was measured, by samples that had no part in choosing it.
    """
    survey, best, reported = data.survey, progress.best, progress.reported
    facts = {
        "parameters": init.parameters,
        "share_of_target": init.share,
        "draft_vocab_size": vocabulary.size,
        "coverage": vocabulary.coverage,
        "coverage_by_source": coverage_by_source(survey.counts, vocabulary.target_ids),
        "steps": progress.step,
        "exported_step": best.step if best else progress.step,
        "tokens": progress.tokens,
        "labels": progress.labels,
        "data_tokens": survey.tokens,
        "supervised_tokens": survey.supervised,
        "split_samples": survey.split,
        "held_out": survey.rejected.get("held_out", 0),
    }
    if reported:
        facts |= {
            "tau": reported.tau,
            "tau_se": reported.tau_error,
            "tau_prompts": len(reported.rounds),
            "alpha": list(reported.alpha),
            "evaluations": progress.evaluations,
        }
    return facts


def _provenance(
    config: RunConfig, parent: Manifest, init: HeadInit, progress: Progress
) -> dict[str, Any]:
    """Which data, licences, settings, arithmetic and earlier head made this one."""
    manifests = {"features": parent}
    samples = find_manifest(config.states_uri, "synth")
    if samples and samples.content_hash == parent.parent_hash:
        manifests["synth"] = samples
    # Only what shapes the output: an attempt on another machine makes the same card.
    shaping = {**config.shaping("synth"), **config.shaping("features"), **config.shaping("train")}
    facts = {
        "manifests": {"features": parent.content_hash, "synth": parent.parent_hash},
        "licenses": parent.licenses,
        "sources": parent.sources,
        "rejected": {stage: manifest.rejected for stage, manifest in manifests.items()},
        "config": without_places(shaping),
        "arithmetic": [str(arithmetic) for arithmetic in progress.arithmetic],
        "world_size": world_size(),
        # How far the replies agree with the teacher; {} in states of an older version.
        "replies": parent.details.get("replies", {}),
    }
    if "synth" in manifests and "imported from" in manifests["synth"].details:
        facts["samples"] = manifests["synth"].details["imported from"]  # and not config's sources
    return facts | ({"start_from": without_places(dict(init.origin))} if init.origin else {})
