"""The head leaves training: directory, card, committed files, manifest's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config import RunConfig
from pipeline.console import notice
from pipeline.eagle3.checkpoint import HeadCard, save_head
from pipeline.eagle3.head import Eagle3Head, HeadShape
from pipeline.eagle3.vocabulary import DraftVocabulary
from pipeline.records import Manifest, TargetContract
from pipeline.store.shards import read_shard
from pipeline.store.stage_run import StageRun, find_manifest
from pipeline.train.audit import coverage_by_source
from pipeline.train.checkpoints import Checkpoints, Progress, workspace
from pipeline.train.data.corpus import Survey
from pipeline.train.metrics import METRICS, VOLATILE
from pipeline.train.trainer import Trainer, world

HEAD = "head"


def chosen_head(
    shape: HeadShape, engine: Trainer, checkpoints: Checkpoints, progress: Progress
) -> Eagle3Head:
    """The head to export: the best by τ, or as it is after the last step when nothing was evaluated. Every process takes part."""
    weights = engine.weights()
    if progress.best and engine.rank == 0:  # it alone wrote the file, and it alone exports
        notice(
            "train",
            f"best of {progress.evaluations} evaluations: τ {progress.best.tau:.3f} after step {progress.best.step:,} of {progress.step:,}",
        )
        weights = checkpoints.read_best(progress.best)
    head = Eagle3Head(shape).to(weights["fc.weight"].dtype)
    head.load_state_dict(weights)
    return head


def export(
    config: RunConfig,
    parent: Manifest,
    work: StageRun,
    head: Eagle3Head,
    contract: TargetContract,
    facts: Mapping[str, Any],
    progress: Progress,
    start: Mapping[str, Any] | None,
) -> None:
    """Write the head's directory with its provenance and commit its files. `start` says which head was fine-tuned."""
    directory = workspace(work) / HEAD
    provenance = _provenance(config, parent) | ({"start_from": dict(start)} if start else {})
    save_head(directory, head, HeadCard(contract, provenance, {**facts, **_measured(progress)}))
    for file in sorted(directory.iterdir()):
        work.commit(
            file.name,
            file.read_bytes(),
            rows=0,
            tokens=progress.tokens if file.suffix == ".safetensors" else 0,
        )
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


def facts_of(
    found: Survey, vocabulary: DraftVocabulary, parameters: int, share: float, progress: Progress
) -> dict[str, Any]:
    """What card and manifest say of the head and its training; of its quality only τ, when it was measured."""
    best = progress.best
    return {
        "parameters": parameters,
        "share_of_target": share,
        "draft_vocab_size": vocabulary.size,
        "coverage": vocabulary.coverage,
        "coverage_by_source": coverage_by_source(found.counts, vocabulary.target_ids),
        "steps": progress.step,
        "exported_step": best.step if best else progress.step,
        "tokens": progress.tokens,
        "labels": progress.labels,
        "supervised_tokens": found.supervised,
        "split_samples": found.split,
        "held_out": found.rejected.get("held_out", 0),
        **(
            {"tau": best.tau, "alpha": list(best.alpha), "evaluations": progress.evaluations}
            if best
            else {}
        ),
    }


def _measured(progress: Progress) -> dict[str, float]:
    """Loss and accuracies of the exported step's line of metrics, without what differs from run to run."""
    if progress.best:
        return progress.best.measured
    return {name: value for name, value in progress.last.items() if name not in VOLATILE}


def _provenance(config: RunConfig, parent: Manifest) -> dict[str, Any]:
    """Which data, under which licences, with which settings made this head."""
    samples = find_manifest(config.run.uri, "synth")
    chain = {
        "features": parent,
        **({"synth": samples} if samples and samples.content_hash == parent.parent_hash else {}),
    }
    settings = config.model_dump(
        mode="json",
        exclude={
            "run": {"uri", "force", "threads"},
            "target": {"cache_dir"},
            "eval": True,
            "synth": {"generator": {"endpoints", "api_key_env"}},
        },
    )
    return {
        "manifests": {"features": parent.content_hash, "synth": parent.parent_hash},
        "licenses": parent.licenses,
        "sources": parent.sources,
        "rejected": {stage: manifest.rejected for stage, manifest in chain.items()},
        "config": settings,
        "world_size": world(),
    }
