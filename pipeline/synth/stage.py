"""Synth as a paragraph: prompts in, samples out.

    select     load, filter and draw prompts; cut them into shards
    screen     drop or redact personal data and secrets in prompts
    generate   the target's replies, turn by turn
    screen     drop replies with personal data or secrets, or of poor quality
    audit      which tokens are supervised
    commit     the shard, with what it left out
    finish     audit.json, datasheet.md and manifest, from the shards

Shards are finished in any order. A shard's bytes depend on its own prompts alone, so a killed run
ends with the same ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from pipeline import __version__
from pipeline.config import RunConfig, SynthSection, prepare_process
from pipeline.console import long_step, notice, progress_bar
from pipeline.errors import StageConflict
from pipeline.records import Arithmetic, Manifest, Prompt, Sample, TargetContract
from pipeline.store.samples import decode_notes, decode_samples, encode_samples
from pipeline.store.shards import SHARDS, read_shard
from pipeline.store.stage_run import StageRun, find_manifest, open_stage
from pipeline.synth.audit import StageCounts, audit_mask, audit_record, count_tokens, show_sample
from pipeline.synth.datasheet import write_datasheet
from pipeline.synth.generate.backend import GeneratorBackend
from pipeline.synth.generate.conversations import ConversationRunner
from pipeline.synth.generate.scheduler import ConversationScheduler, PromptBatch
from pipeline.synth.screen import Screen, pii_policy
from pipeline.synth.select import Selection, select_prompts, synth_section
from pipeline.target.arithmetic import reason, server_arithmetic
from pipeline.target.open import Target, open_target
from pipeline.target.template import ChatTemplate

AUDIT, DATASHEET = "audit.json", "datasheet.md"

#: What the manifest and the audit repeat of the section.
_SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "max_turns",
    "on_length",
    "system_prompt",
}


def run(config: RunConfig) -> Manifest:
    """Do what is left of the stage. Raises Eagle3Error for whatever the user can fix."""
    prepare_process(config.run)
    # Everything is loaded before the directory is touched: a mistake leaves no begun stage behind.
    pipeline = None if _is_finished(config) else _open_pipeline(config)
    stage_run = open_stage(config, "synth", None)
    if manifest := stage_run.manifest:
        counts = f"{manifest.rows:,} samples, {manifest.tokens:,} tokens"
        notice("synth", f"complete: {counts} at {stage_run.location.uri}")
        return manifest
    pipeline = pipeline or _open_pipeline(config)  # finished, but discarded as damaged by --force
    _refuse_foreign(stage_run, pipeline.shards)
    if len(stage_run.shards) < len(pipeline.shards):
        arithmetic = pipeline.arithmetic
        stage_run.compute_with(arithmetic, why=reason(arithmetic, config.target.dtype))
    selection, shards = pipeline.selection, pipeline.shards
    counts = f"{selection.loaded:,} prompts, {len(selection.prompts):,} after the filters"
    committed = f"in {len(shards)} shards, {len(stage_run.shards)} of them committed"
    notice("synth", f"{counts}, {committed}")
    done = sum(len(prompts) for name, prompts in shards.items() if name in stage_run.shards)
    with progress_bar("synth", unit="prompts", total=len(selection.prompts), done=done) as bar:
        for batch in pipeline.generate(stage_run.shards, bar.advance):
            pipeline.commit(stage_run, batch)
    return _finish(config, stage_run, pipeline)


class SynthPipeline:
    """The prompts, and what turns them into samples."""

    def __init__(self, config: RunConfig) -> None:
        section, seed = synth_section(config), config.run.seed
        target = open_target(config.target)
        self.contract: TargetContract = target.contract
        self.template: ChatTemplate = target.template(system_prompt=section.system_prompt)
        self.selection: Selection = select_prompts(config)
        several_turns = any(len(prompt.turns) > 1 for prompt in self.selection.prompts)
        if section.max_turns > 1 and several_turns:
            self.template.check_turns()
        self.shards = self.selection.shards(section.shard_prompts)
        self._screen = Screen(section, seed=seed)
        self._backend, self.arithmetic = _open_backend(section, target, self.template)
        across = section.generator.across_shards
        safe = across == "auto" and self._backend.batch_invariant
        self._across_shards = across == "always" or safe
        name = _generator_name(section, self.contract)
        self._runner = ConversationRunner(section, self.template, seed=seed, name=name)
        # Of shards in flight: prompts dropped by reason, findings in prompts.
        self._screened: dict[str, tuple[Counter[str], dict[str, Any]]] = {}
        self._shown = False

    def generate(
        self, done: Container[str], advance: Callable[[int], None]
    ) -> Iterator[PromptBatch]:
        """Samples of the prompts of all shards that are not done; shards come as they finish.

        `advance` is given every prompt once, when it is dropped or its conversation ends.
        """
        batches, across = self._screen_prompts(done, advance), self._across_shards
        scheduler = ConversationScheduler(
            self._runner, batches, across_shards=across, advance=advance
        )
        return scheduler.run(self._backend)

    def commit(self, stage_run: StageRun, batch: PromptBatch) -> None:
        """Screen and audit a batch's samples, and store them as a shard."""
        samples, leaking = self._screen.samples(batch.samples)
        dropped, findings = self._screened.pop(batch.name)
        rejected = dropped + batch.rejected + leaking
        assert len(self.shards[batch.name]) == len(samples) + rejected.total(), "a prompt was lost"
        audit_mask(samples, where=stage_run.location.child(SHARDS).where(batch.name))
        self._show_once(samples)
        notes = {
            "ended": dict(batch.ended),
            "dropped_prompts": dict(dropped),
            "dropped_replies": dict(leaking),
            "findings": findings | self._screen.take_audit(),
        }
        data, tokens = encode_samples(samples, notes), count_tokens(samples)[1]
        stage_run.commit(batch.name, data, rows=len(samples), tokens=tokens, rejected=rejected)

    def _screen_prompts(
        self, done: Container[str], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, Sequence[Prompt]]]:
        for name, prompts in self.shards.items():
            if name not in done:
                clean, dropped = self._screen.prompts(prompts)
                self._screened[name] = dropped, self._screen.take_audit()
                advance(dropped.total())
                yield name, clean

    def _show_once(self, samples: Sequence[Sample]) -> None:
        if samples and not self._shown:
            show_sample(samples[0], lambda ids: self.template.text(tuple(ids), special=True))
            self._shown = True


def _open_pipeline(config: RunConfig) -> SynthPipeline:
    with long_step("synth", "reading the target and the prompts"):
        return SynthPipeline(config)


def _is_finished(config: RunConfig) -> bool:
    manifest = find_manifest(config.run.uri, "synth")
    return manifest is not None and manifest.config_hash == config.section_hash("synth")


def _open_backend(
    section: SynthSection, target: Target, template: ChatTemplate
) -> tuple[GeneratorBackend, Arithmetic]:
    """What generates the replies, and what it computes with."""
    generator, contract = section.generator, target.contract
    if generator.backend == "local":
        from pipeline.synth.generate.local import open_local

        local = open_local(section, target)
        return local, local.arithmetic
    from pipeline.synth.generate.remote import open_remote

    source, vocabulary = contract.source, contract.vocab_size
    remote = open_remote(generator, template, source=source, vocabulary=vocabulary)
    return remote, server_arithmetic(generator.backend)


def _generator_name(section: SynthSection, contract: TargetContract) -> str:
    """What the samples say produced them; without addresses, which are nobody's business."""
    generator, served = section.generator, ""
    if generator.backend != "local":
        served = f", {generator.backend} server of {generator.model or contract.source}"
    return f"{contract.source}@{contract.revision}{served}, eagle3 {__version__}"


def _refuse_foreign(stage_run: StageRun, shards: Mapping[str, Any]) -> None:
    """Committed shards of other prompts: a source's content changed while its name did not."""
    foreign = sorted(set(stage_run.shards) - set(shards))
    if foreign:
        raise StageConflict(
            "was made from prompts that the sources no longer give",
            where=stage_run.location.child(SHARDS).where(foreign[0]),
            fix="restore the prompt files, or choose another run.uri=…",
        )


def _finish(config: RunConfig, stage_run: StageRun, pipeline: SynthPipeline) -> Manifest:
    """Audit, datasheet and manifest, read back from the shards: interruptions leave no trace."""
    selection, counts = pipeline.selection, _count(stage_run)
    details = _details(config, pipeline, counts)
    rejected = Counter(selection.rejected)
    for shard in stage_run.shards.values():
        rejected.update(shard.rejected)
    audit = audit_record(counts, details, dict(rejected), pipeline.contract)
    for name, text in ((AUDIT, audit.as_json()), (DATASHEET, write_datasheet(audit))):
        stage_run.location.write(name, text.encode())
        details[f"{name}_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    manifest = stage_run.finish(
        contract=pipeline.contract,
        licenses=counts.licenses,
        sources=counts.samples_by_source,
        details=details,
        rejected_extra=selection.rejected,
    )
    left_out = sum(manifest.rejected.values())
    assert selection.loaded == manifest.rows + left_out, "prompts in = samples + rejected"
    made = f"{manifest.rows:,} samples, {manifest.tokens:,} tokens"
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in manifest.rejected.items())
    supervised = f"{counts.supervised_share:.0%} supervised"
    notice("synth", f"{made}, {supervised}; rejected: {reasons or 'none'}")
    notice("synth", f"datasheet: {stage_run.location.where(DATASHEET)}")
    return manifest


def _count(stage_run: StageRun) -> StageCounts:
    """One shard in memory at a time."""
    counts, location = StageCounts(), stage_run.location
    for name, shard in sorted(stage_run.shards.items()):
        data, where = read_shard(location, shard), location.child(SHARDS).where(name)
        counts.add(decode_samples(data, where), decode_notes(data, where))
    return counts


def _details(config: RunConfig, pipeline: SynthPipeline, counts: StageCounts) -> dict[str, Any]:
    """What the manifest says of this stage alone."""
    selection, template, section = pipeline.selection, pipeline.template, synth_section(config)
    return {
        "prompts": {
            "loaded": selection.loaded,
            "selected": len(selection.prompts),
            "samples": counts.samples,
        },
        "supervised_tokens": counts.supervised,
        "supervised_share": counts.supervised_share,
        "sampling": section.model_dump(mode="json", include=_SAMPLING),
        "template": {
            "kwargs": config.target.chat_template_kwargs,
            "stop_ids": list(template.stop_ids),
            "end_of_turn": template.end_of_turn,
        },
        "pii": pii_policy(section),
    }
