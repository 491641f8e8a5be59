"""Prompts in, samples out.

    select   load, filter and draw prompts; cut them into shards
    screen   drop or redact personal data and secrets
    converse let the target answer
    screen   the answers
    audit    which tokens are supervised
    commit   the shard, with what it left out

A shard depends on its own prompts alone, so a killed run ends with the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline import __version__
from pipeline.config import RunConfig
from pipeline.console import notice, progress_bar
from pipeline.decoder.drafters.eagle3 import Eagle3Drafter
from pipeline.decoder.engine import Engine
from pipeline.decoder.model import DecoderModel
from pipeline.eagle3.checkpoint import HEAD_FILES, load_head
from pipeline.errors import StageConflict
from pipeline.records import Manifest, Prompt, Sample, TargetContract
from pipeline.store.fetch import as_directory
from pipeline.store.location import Location
from pipeline.store.samples import encode_samples, read_samples
from pipeline.store.stage import StageRun, find_manifest, open_stage
from pipeline.synth.audit import audit_mask, count_tokens, show_sample
from pipeline.synth.generate import Generator
from pipeline.synth.screen import Screen
from pipeline.synth.select import select_prompts, synth_section
from pipeline.target.contract import read_contract
from pipeline.target.load import pick_device
from pipeline.target.resolve import resolve
from pipeline.target.template import load_template


def run_stage(config: RunConfig) -> Manifest:
    """Do what is left of the stage. Raises Eagle3Error for whatever the user can fix."""
    torch.set_num_threads(config.run.threads)
    # Everything is found and loaded before the directory is touched: a mistake leaves no begun work behind.
    job = None if _is_finished(config) else Job(config)
    run = open_stage(config, "synth", None)
    if run.manifest:
        notice("synth", f"complete: {run.manifest.rows:,} samples, {run.manifest.tokens:,} tokens at {run.location.uri}")
        return run.manifest
    job = job or Job(config)  # finished, but discarded as damaged by --force
    _refuse_foreign(run, job.shards)
    job.announce(run)
    done = sum(len(prompts) for name, prompts in job.shards.items() if name in run.shards)
    with progress_bar("synth", unit="prompts", total=len(job.selection.prompts), done=done) as bar:
        for name, prompts in job.shards.items():
            if name not in run.shards:
                job.make_shard(run, name, prompts)
                bar.advance(len(prompts))
    return _finish(config, run, job)


class Job:
    """The prompts, and what turns them into samples."""

    def __init__(self, config: RunConfig) -> None:
        section = synth_section(config)
        target = resolve(config.target)
        self.contract = read_contract(config.target, target)
        self._template = load_template(target.directory, source=config.target.source, system_prompt=section.system_prompt)
        self.selection = select_prompts(config)
        self.shards = self.selection.shards(section.shard_prompts)
        self._screen = Screen(section.pii)
        engine = _load_engine(config, target.directory, self.contract)
        name = f"{self.contract.source}@{self.contract.revision}, eagle3 {__version__}"
        self._generator = Generator(section, self._template, engine.generate, seed=config.run.seed, name=name)
        self._shown = False

    def announce(self, run: StageRun) -> None:
        """Say what there is to do."""
        counts = f"{self.selection.loaded:,} prompts, {len(self.selection.prompts):,} after the filters, in {len(self.shards)} shards"
        notice("synth", f"{counts}, {len(run.shards)} of them committed")

    def make_shard(self, run: StageRun, name: str, prompts: Sequence[Prompt]) -> None:
        """Answer the prompts and commit the samples."""
        clean, rejected = self._screen.prompts(prompts)
        samples, unanswered = self._generator.converse(clean)
        samples, leaking = self._screen.samples(samples)
        rejected = rejected + unanswered + leaking
        assert len(prompts) == len(samples) + rejected.total(), "a prompt was lost"
        audit_mask(samples, where=f"{run.location.uri}/shards/{name}")
        self._show_once(samples)
        run.commit(name, encode_samples(samples), rows=len(samples), tokens=count_tokens(samples)[1], rejected=rejected)

    def _show_once(self, samples: Sequence[Sample]) -> None:
        if samples and not self._shown:
            show_sample(samples[0], lambda ids: self._template.text(tuple(ids), special=True))
            self._shown = True


def _is_finished(config: RunConfig) -> bool:
    manifest = find_manifest(config.run.uri, "synth")
    return manifest is not None and manifest.config_hash == config.section_hash("synth")


def _load_engine(config: RunConfig, directory: Path, contract: TargetContract) -> Engine:
    """The target over the section's slots, drafting with an earlier head when there is one."""
    section = synth_section(config)
    model = DecoderModel.load(
        directory,
        contract.capture_layers,
        device=pick_device(config.target.device),
        dtype=getattr(torch, contract.dtype),
        max_length=section.max_prompt_tokens + section.max_new_tokens,
    )
    if section.head is None:
        return Engine(model, slots=section.batch_size)
    with as_directory(Location(section.head), HEAD_FILES) as folder:
        head, _ = load_head(folder, expected=contract)
    return Engine(model, drafter=Eagle3Drafter(head, model, section.tree), slots=section.batch_size)


def _refuse_foreign(run: StageRun, shards: Mapping[str, Any]) -> None:
    """Committed shards of other prompts mean that a source's content changed while its name did not."""
    foreign = sorted(set(run.shards) - set(shards))
    if foreign:
        raise StageConflict(
            "was made from prompts that the sources no longer give",
            where=f"{run.location.uri}/shards/{foreign[0]}",
            fix="restore the prompt files, or choose another run.uri=…",
        )


def _finish(config: RunConfig, run: StageRun, job: Job) -> Manifest:
    """Everything the manifest says is read back from the shards, so that it does not depend on interruptions."""
    section, selection = synth_section(config), job.selection
    licenses: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    supervised = total = 0
    for name in sorted(run.shards):
        samples = read_samples(run.location, run.shards[name])
        licenses.update(sample.license for sample in samples)
        sources.update(sample.source for sample in samples)
        supervised, total = (before + more for before, more in zip((supervised, total), count_tokens(samples), strict=True))
    details = {
        "prompts": {"loaded": selection.loaded, "selected": len(selection.prompts), "samples": licenses.total()},
        "supervised_tokens": supervised,
        "supervised_share": round(supervised / total, 6) if total else 0.0,
        "sampling": section.model_dump(mode="json", include={"temperature", "top_p", "top_k", "max_new_tokens", "max_turns", "system_prompt"}),
        "pii": _pii_policy(config),
    }
    manifest = run.finish(contract=job.contract, licenses=licenses, sources=sources, details=details, rejected_extra=selection.rejected)
    assert selection.loaded == manifest.rows + sum(manifest.rejected.values()), "prompts in = samples + rejected"
    share = f"{supervised / max(total, 1):.0%} supervised"
    notice("synth", f"{manifest.rows:,} samples, {manifest.tokens:,} tokens, {share}; rejected: {_listed(manifest.rejected)}")
    return manifest


def _pii_policy(config: RunConfig) -> dict[str, Any]:
    from pipeline.synth.secrets import SECRET_ENTITIES

    pii = synth_section(config).pii
    if not pii.enabled:
        return {"enabled": False}
    return {
        "enabled": True,
        "prompts": pii.action,
        "responses": "drop",
        "entities": sorted({*pii.entities, *SECRET_ENTITIES}),
        "score_threshold": pii.score_threshold,
        "spacy_model": pii.spacy_model,
    }


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"
