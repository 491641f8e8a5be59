"""The head leaves training: directory, card, committed files, manifest's facts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeline.config import RunConfig, world_size
from pipeline.console import notice
from pipeline.errors import StageConflict
from pipeline.heads.base import DraftingHead, DraftShape
from pipeline.heads.checkpoint import HeadCard, without_places
from pipeline.heads.init import DraftVocabulary
from pipeline.heads.registry import empty_head, save_head
from pipeline.learning.corpus import Survey
from pipeline.records import Manifest
from pipeline.store.manifest import find_manifest
from pipeline.store.shards import read_shard
from pipeline.store.stage_run import StageRun
from pipeline.train.audit import coverage_by_source
from pipeline.train.checkpoints import Checkpoints, workspace
from pipeline.train.init import HeadInit
from pipeline.train.metrics import VOLATILE
from pipeline.train.progress import Progress

HEAD = "head"


def chosen_head(
    shape: DraftShape, last: Mapping[str, Tensor], checkpoints: Checkpoints, progress: Progress
) -> DraftingHead:
    """The head to export: that of the evaluation that was chosen, or the `last` one without any."""
    weights, best, reported = dict(last), progress.best, progress.reported
    if best and reported:
        which = f"after step {best.step:,} of {progress.step:,}"
        notice("train", f"best of {progress.evaluations} evaluations: {which}")
        tau = f"τ {reported.tau:.3f} ± {reported.tau_error:.3f} (standard error)"
        notice("train", f"{tau} on {len(reported.rounds)} samples that did not choose it")
        weights = checkpoints.read_best(best)
    dtype = next(each.dtype for each in weights.values() if each.is_floating_point())
    head = empty_head(shape).to(dtype)
    head.load_state_dict(weights)
    return head


def export(stage_run: StageRun, head: DraftingHead, card: HeadCard, *, tokens: int) -> None:
    """Write the head's directory and commit its files; `tokens` are those it was trained on."""
    directory = workspace(stage_run.location) / HEAD
    save_head(directory, head, card)
    for file in sorted(directory.iterdir()):
        own, data = tokens if file.suffix == ".safetensors" else 0, file.read_bytes()
        shard = stage_run.commit(file.name, data, rows=0, tokens=own)
        if shard.sha256 != hashlib.sha256(data).hexdigest():
            # Files of two heads would make a head that nobody trained.
            problem = f"an earlier attempt has committed another {file.name}, and was killed there"
            fix = "pass --force to train again, or choose another run.uri=…"
            raise StageConflict(problem, where=stage_run.location.uri, fix=fix)
    place_head(stage_run)


def place_head(stage_run: StageRun) -> None:
    """Make `head/` hold the committed files; what is already there is left as it is."""
    location = stage_run.location.child(HEAD)
    sizes = location.sizes()
    for name, shard in stage_run.shards.items():
        if sizes.get(name) != shard.bytes or location.sha256(name) != shard.sha256:
            location.write(name, read_shard(stage_run.location, shard))


def training_facts(
    start: HeadInit, survey: Survey, vocabulary: DraftVocabulary, progress: Progress
) -> dict[str, Any]:
    """What card and manifest say of the head and its training.

    Of its quality only τ, when it was measured, by samples that had no part in choosing it.
    """
    best, reported = progress.best, progress.reported
    facts = {
        "parameters": start.parameters,
        "share_of_target": start.share,
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


def measured(progress: Progress) -> dict[str, float]:
    """Loss and accuracies of the exported step's line of metrics, without what varies."""
    if progress.best:
        return progress.best.measured
    return {name: value for name, value in progress.last.items() if name not in VOLATILE}


def provenance(
    config: RunConfig,
    parent: Manifest,
    origin: Mapping[str, Any] | None,
    progress: Progress,
) -> dict[str, Any]:
    """Which data, under which licences, with which settings and arithmetic made this head.

    `origin` is the head it was fine-tuned from.
    """
    manifests = {"features": parent}
    samples = find_manifest(config.run.uri, "synth")
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
    return facts | ({"start_from": without_places(dict(origin))} if origin else {})
