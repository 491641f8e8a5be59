"""Features as a paragraph: read the samples of a shard, capture, commit; finish.

What the shards are follows from the manifest of synth alone (packing.py), so that any number of
processes share them, and a restart reads no sample of a committed one. Shards are written in the
background (writer.py): the states of at most four are in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

from pipeline.config import RunConfig, take_settings
from pipeline.console import notice, progress_bar
from pipeline.errors import DataError
from pipeline.features.audit import AUDIT, RepliesAudit
from pipeline.features.packing import Part, parts_of
from pipeline.features.plan import require_space
from pipeline.records import STATES_FORMAT, Manifest
from pipeline.store.claims import make_shards
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.stage_run import StageRun, open_stage
from pipeline.target.parallel import Group, joined


def run(config: RunConfig) -> Manifest:
    """Compute and store the states of the run's samples, as far as no other process does.

    Raises MissingStage, StageConflict, StageIncomplete, ContractMismatch, DataError, StoreError,
    and LostProcess where several processes share the target.
    """
    take_settings(config.run)
    with joined(config.features, config.target) as group:
        if group.rank == 0:
            return group.broadcast(_run(config, group))
        from pipeline.features.writer import take_part

        return take_part(config, group)


def _run(config: RunConfig, group: Group) -> Manifest:
    parent = read_manifest(config.run.uri, "synth")
    stage_run = open_stage(config, "features", parent)
    if stage_run.manifest:
        notice("features", f"complete: {_summary(stage_run.manifest, stage_run)}")
        return stage_run.manifest
    parts = parts_of(parent.shards, config.features.shard_tokens)
    if stage_run.committed:
        notice("features", f"{len(stage_run.committed)} of {len(parts)} shards are committed")
    _make(config, parent, stage_run, parts, group)
    manifest = _finish(config, parent, stage_run, parts)
    stored = sum(shard.bytes for shard in manifest.shards)
    size = f"{stored / 1e6:,.1f} MB, {stored / manifest.tokens:,.0f} bytes a token"
    notice("features", f"{manifest.rows:,} samples, {_summary(manifest, stage_run, f' ({size})')}")
    return manifest


def _make(
    config: RunConfig,
    parent: Manifest,
    stage_run: StageRun,
    parts: Mapping[str, Part],
    group: Group,
) -> None:
    """Compute and commit this process's shards; without any, torch is not loaded."""
    own = {name: part for index, (name, part) in enumerate(parts.items()) if config.run.owns(index)}
    total = sum(part.tokens for part in own.values())
    done = sum(parts[name].tokens for name in stage_run.committed if name in own)
    with progress_bar("features", unit="tokens", total=total, done=done) as bar:
        capture = None

        def make(names: Iterator[str]) -> None:
            nonlocal capture
            for name in names:
                if capture is None:
                    require_space(config)
                    from pipeline.features.writer import ShardCapture

                    capture = ShardCapture(config, parent, stage_run, bar.advance, group)
                capture.make(name, parts[name])
            if capture:
                capture.wait()

        def others(names: set[str]) -> None:
            bar.advance(sum(parts[name].tokens for name in names if name in own))

        failed = True
        try:
            make_shards(stage_run, list(parts), config.run, make, others)
            failed = False
        finally:
            if capture:
                capture.close(failed=failed)


def _finish(
    config: RunConfig, parent: Manifest, stage_run: StageRun, parts: Mapping[str, Part]
) -> Manifest:
    """The manifest, from the entries of all shards."""
    counts: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    audit = RepliesAudit()
    for entry in stage_run.collect(list(parts)):
        counts.update(samples=entry.shard.rows, supervised=entry.tallies["supervised"])
        rejected.update(entry.shard.rejected)
        audit.add(entry.tallies)
    if not counts["samples"]:
        problem = f"no sample with supervised tokens ({dict(rejected) or 'no samples at all'})"
        where = stage_location(config.run.uri, "synth").uri
        fix = "see the rejected counts in its manifest.json and widen synth's sources or filters"
        raise DataError(problem, where=where, fix=fix)
    audit.check(stage_run.location.uri)
    text = audit.as_json()
    stage_run.location.write(AUDIT, text.encode())  # it follows from the shards alone
    return stage_run.finish(
        contract=parent.contract,
        licenses=parent.licenses,
        sources=parent.sources,
        details={
            "encoding": config.features.encoding,
            "format": STATES_FORMAT,
            "supervised_tokens": counts["supervised"],
            "samples": counts["samples"],
            "replies": audit.figures,
            f"{AUDIT}_sha256": hashlib.sha256(text.encode()).hexdigest(),
        },
    )


def _summary(manifest: Manifest, stage_run: StageRun, size: str = "") -> str:
    shards, uri = len(manifest.shards), stage_run.location.uri
    return f"{manifest.tokens:,} tokens in {shards} shards{size} at {uri}"
