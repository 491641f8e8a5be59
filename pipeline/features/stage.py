"""Features as a paragraph: read the samples of a shard, capture, commit; finish.

What the shards are follows from the manifest of synth alone (store/parts.py), so any number of
processes share them, and a restart reads no sample of a committed one. Shards are written in the
background (writer.py): the states of at most four are in memory. audit.json, from the shards'
entries, says how far replies agree with the teacher.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import RunConfig, take_settings
from pipeline.console import notice, progress_bar
from pipeline.errors import DataError
from pipeline.features.plan import require_space
from pipeline.records import STATES_FORMAT, Manifest
from pipeline.store.manifest import read_manifest, stage_location
from pipeline.store.parts import Part, parts_of
from pipeline.store.shards import reading_tallies
from pipeline.store.stage_run import StageRun, make_shards, open_stage
from pipeline.target.agreement import CAUSES, Agreement, problem_of
from pipeline.target.parallel import Group, joined


def run(config: RunConfig) -> Manifest:
    """Compute and store the states of the run's samples, as far as no other process does.

    Raises MissingStage, StageConflict, StageIncomplete, ContractMismatch, DataError, StoreError,
    and LostProcess where several processes share the target.
    """
    take_settings(config.run)
    with joined(config.features.parallel, config.target, stage="features") as group:
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
    mine = {
        name: part for index, (name, part) in enumerate(parts.items()) if config.run.owns(index)
    }
    total = sum(part.tokens for part in mine.values())
    done = sum(parts[name].tokens for name in stage_run.committed if name in mine)
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
            bar.advance(sum(parts[name].tokens for name in names if name in mine))

        failed = True
        try:
            keep = config.features.keep_shards
            make_shards(stage_run, list(parts), config.run, make, others, keep=keep)
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
        rejected.update(entry.shard.rejected)
        with reading_tallies(stage_run.location, entry) as tallies:
            counts.update(samples=entry.shard.rows, supervised=int(tallies["supervised"]))
            audit.add(tallies)
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
        files=(AUDIT,),
    )


def _summary(manifest: Manifest, stage_run: StageRun, size: str = "") -> str:
    shards, uri = len(manifest.shards), stage_run.location.uri
    return f"{manifest.tokens:,} tokens in {shards} shards{size} at {uri}"


AUDIT = "audit.json"
_SCHEMA_VERSION = 1
#: Samples that are listed.
_FARTHEST = 10


class RepliesAudit:
    """Pools what each shard says of its replies."""

    def __init__(self) -> None:
        self._pooled, self._farthest = Agreement(), list[dict[str, Any]]()
        self._rendered, self._most_beyond, self._gap_steps = 0, 0.0, 0.0

    def add(self, tallies: Mapping[str, Any]) -> None:
        """Of one shard; those of older versions say nothing."""
        self._pooled += Agreement.read(tallies.get("agreement", {}))
        self._most_beyond = max(self._most_beyond, tallies.get("most_beyond", 0.0))
        self._gap_steps = max(self._gap_steps, tallies.get("gap_steps", 0.0))
        self._rendered += tallies.get("rendered", 0)
        self._farthest += tallies.get("farthest", [])
        self._farthest.sort(
            key=lambda each: (-Agreement.read(each).distance, each["source"], each["sample_id"])
        )
        del self._farthest[_FARTHEST:]

    def check(self, where: str) -> None:
        """Raise DataError where all shards together show what none showed alone."""
        if problem := problem_of(self._pooled, self._most_beyond):
            worst = self._farthest[0]
            named = f"{where}: sample {worst['sample_id']} of {worst['source']}, the farthest"
            raise DataError(problem, where=named, fix=CAUSES)

    @property
    def figures(self) -> dict[str, Any]:
        """What the manifest carries; empty where no reply was scored."""
        figures = self._pooled.figures()
        figures |= {"gap_steps": self._gap_steps} if figures else {}
        return figures | ({"rendered_samples": self._rendered} if self._rendered else {})

    def as_json(self) -> str:
        """The file. It quotes no prompt and no reply."""
        body = {
            "schema_version": _SCHEMA_VERSION,
            "replies": self.figures,
            "farthest": [
                {
                    "sample_id": each["sample_id"],
                    "source": each["source"],
                    **Agreement.read(each).figures(),
                }
                for each in self._farthest
            ],
        }
        return json.dumps(body, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
