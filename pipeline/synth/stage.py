"""Prompts in, samples out.

    select   load, filter and draw prompts; cut them into shards
    screen   drop or redact personal data and secrets
    converse let the target answer
    screen   the answers
    audit    which tokens are supervised
    commit   the shard, with what it left out
    receipts audit.json and datasheet.md, from the shards

Shards are finished in any order. A shard's bytes depend on its own prompts alone, so a killed run
ends with the same ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline import __version__
from pipeline.config import RunConfig
from pipeline.console import notice, progress_bar
from pipeline.errors import StageConflict
from pipeline.records import Manifest, Prompt, Sample, TargetContract
from pipeline.store.samples import decode_notes, decode_samples, encode_samples
from pipeline.store.stage_run import StageRun, find_manifest, open_stage, read_shard
from pipeline.synth.audit import audit_mask, count_tokens, show_sample
from pipeline.synth.datasheet import write_datasheet
from pipeline.synth.generate.conversations import Generator, PromptBatch
from pipeline.synth.receipts import StageCounts, audit_record
from pipeline.synth.screen import Screen
from pipeline.synth.select import select_prompts, synth_section
from pipeline.target.open import open_target
from pipeline.target.template import ChatTemplate

if TYPE_CHECKING:
    from pipeline.synth.generate.local import LocalAnswer
    from pipeline.synth.generate.remote import RemoteAnswer

AUDIT, DATASHEET = "audit.json", "datasheet.md"


def run_stage(config: RunConfig) -> Manifest:
    """Do what is left of the stage. Raises Eagle3Error for whatever the user can fix."""
    torch.set_num_threads(config.run.threads)
    # Everything is found and loaded before the directory is touched: a mistake leaves no begun work behind.
    job = None if _is_finished(config) else Job(config)
    run = open_stage(config, "synth", None)
    if run.manifest:
        notice(
            "synth",
            f"complete: {run.manifest.rows:,} samples, {run.manifest.tokens:,} tokens at {run.location.uri}",
        )
        return run.manifest
    job = job or Job(config)  # finished, but discarded as damaged by --force
    _refuse_foreign(run, job.shards)
    job.announce(run)
    done = sum(len(prompts) for name, prompts in job.shards.items() if name in run.shards)
    with progress_bar("synth", unit="prompts", total=len(job.selection.prompts), done=done) as bar:
        for batch in job.work(run.shards):
            job.commit(run, batch)
            bar.advance(len(job.shards[batch.name]))
    return _finish(config, run, job)


class Job:
    """The prompts, and what turns them into samples."""

    def __init__(self, config: RunConfig) -> None:
        section = synth_section(config)
        target = open_target(config.target)
        self.contract = target.contract
        self.template = target.template(system_prompt=section.system_prompt)
        self.selection = select_prompts(config)
        if section.max_turns > 1 and any(
            len(prompt.turns) > 1 for prompt in self.selection.prompts
        ):
            self.template.check_turns()
        self.shards = self.selection.shards(section.shard_prompts)
        self._screen = Screen(section, seed=config.run.seed)
        answer = _open_answer(config, target.directory, self.contract, self.template)
        self._across = section.generator.across_shards == "always" or (
            section.generator.across_shards == "auto" and answer.ignores_neighbours
        )
        self._generator = Generator(
            section,
            self.template,
            answer,
            seed=config.run.seed,
            name=_generator_name(config, self.contract),
        )
        self._screened: dict[
            str, tuple[Counter[str], dict[str, Any]]
        ] = {}  # of shards under way: prompts dropped, what was found in prompts
        self._shown = False

    def announce(self, run: StageRun) -> None:
        """Say what there is to do."""
        counts = f"{self.selection.loaded:,} prompts, {len(self.selection.prompts):,} after the filters, in {len(self.shards)} shards"
        notice("synth", f"{counts}, {len(run.shards)} of them committed")

    def work(self, done: Container[str]) -> Iterator[PromptBatch]:
        """Answer the prompts of all shards that are not done; shards come as they are finished."""
        yield from self._generator.converse(self._screen_prompts(done), across=self._across)

    def commit(self, run: StageRun, batch: PromptBatch) -> None:
        """Check the answers and store the shard."""
        samples, leaking = self._screen.samples(batch.samples)
        dropped, findings = self._screened.pop(batch.name)
        rejected = dropped + batch.rejected + leaking
        assert len(self.shards[batch.name]) == len(samples) + rejected.total(), "a prompt was lost"
        audit_mask(samples, where=f"{run.location.uri}/shards/{batch.name}")
        self._show_once(samples)
        notes = {
            "ended": dict(batch.ended),
            "dropped_prompts": dict(dropped),
            "dropped_responses": dict(leaking),
            "findings": findings | self._screen.take_audit(),
        }
        run.commit(
            batch.name,
            encode_samples(samples, notes),
            rows=len(samples),
            tokens=count_tokens(samples)[1],
            rejected=rejected,
        )

    def _screen_prompts(self, done: Container[str]) -> Iterator[tuple[str, Sequence[Prompt]]]:
        for name, prompts in self.shards.items():
            if name not in done:
                clean, dropped = self._screen.prompts(prompts)
                self._screened[name] = dropped, self._screen.take_audit()
                yield name, clean

    def _show_once(self, samples: Sequence[Sample]) -> None:
        if samples and not self._shown:
            show_sample(samples[0], lambda ids: self.template.text(tuple(ids), special=True))
            self._shown = True


def _is_finished(config: RunConfig) -> bool:
    manifest = find_manifest(config.run.uri, "synth")
    return manifest is not None and manifest.config_hash == config.section_hash("synth")


def _open_answer(
    config: RunConfig, directory: Path, contract: TargetContract, template: ChatTemplate
) -> LocalAnswer | RemoteAnswer:
    """Who answers."""
    generator = synth_section(config).generator
    if generator.backend == "local":
        from pipeline.synth.generate.local import open_local

        return open_local(config, directory, contract)
    from pipeline.synth.generate.remote import open_remote

    return open_remote(generator, template, source=contract.source, vocabulary=contract.vocab_size)


def _generator_name(config: RunConfig, contract: TargetContract) -> str:
    """What the samples say produced them; without addresses, which are nobody's business."""
    generator = synth_section(config).generator
    served = (
        ""
        if generator.backend == "local"
        else f", {generator.backend} server of {generator.model or contract.source}"
    )
    return f"{contract.source}@{contract.revision}{served}, eagle3 {__version__}"


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
    """Receipts and manifest; everything they say is read back from the shards, so that it does not depend on interruptions."""
    selection = job.selection
    tally = _count(run)
    details = {
        "prompts": {
            "loaded": selection.loaded,
            "selected": len(selection.prompts),
            "samples": tally.samples,
        },
        "supervised_tokens": tally.supervised,
        "supervised_share": tally.supervised_share,
        "sampling": synth_section(config).model_dump(
            mode="json",
            include={
                "temperature",
                "top_p",
                "top_k",
                "max_new_tokens",
                "max_turns",
                "on_length",
                "system_prompt",
            },
        ),
        "template": {
            "kwargs": config.target.chat_template_kwargs,
            "stop_ids": list(job.template.stop_ids),
            "end_of_turn": job.template.end_of_turn,
        },
        "pii": _pii_policy(config),
    }
    rejected = Counter(selection.rejected)
    for shard in run.shards.values():
        rejected.update(shard.rejected)
    record = audit_record(tally, details, dict(rejected), job.contract)
    for name, text in ((AUDIT, record.as_json()), (DATASHEET, write_datasheet(record))):
        run.location.write(name, text.encode())
        details[f"{name}_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    manifest = run.finish(
        contract=job.contract,
        licenses=tally.licenses,
        sources=tally.by_source_samples,
        details=details,
        rejected_extra=selection.rejected,
    )
    assert selection.loaded == manifest.rows + sum(manifest.rejected.values()), (
        "prompts in = samples + rejected"
    )
    notice(
        "synth",
        f"{manifest.rows:,} samples, {manifest.tokens:,} tokens, {tally.supervised_share:.0%} supervised; rejected: {_listed(manifest.rejected)}",
    )
    notice("synth", f"datasheet: {run.location.where(DATASHEET)}")
    return manifest


def _count(run: StageRun) -> StageCounts:
    """One shard in memory at a time."""
    tally = StageCounts()
    for name in sorted(run.shards):
        data, where = (
            read_shard(run.location, run.shards[name]),
            run.location.where(f"shards/{name}"),
        )
        tally.add(decode_samples(data, where), decode_notes(data, where))
    return tally


def _pii_policy(config: RunConfig) -> dict[str, Any]:
    from pipeline.synth.privacy.secrets import SECRET_ENTITIES

    section = synth_section(config)
    pii = section.pii
    if not pii.enabled:
        return {"enabled": False}
    own = (recognizer.entity for recognizer in pii.recognizers)
    return {
        "enabled": True,
        "prompts": pii.action,
        "responses": "drop",
        "entities": sorted({*pii.entities, *own, *(SECRET_ENTITIES if pii.secrets else ())}),
        "score_threshold": pii.score_threshold,
        "thresholds": dict(sorted(pii.thresholds.items())),
        "dlp": section.dlp.backend,
        "spacy_model": pii.spacy_model,
    }


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"
