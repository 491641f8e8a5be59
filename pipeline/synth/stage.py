"""Synth as a paragraph: prompts in, samples out.

    select     load, filter and draw prompts; store them, cut into shards: once for all processes
    screen     drop or redact personal data and secrets in prompts
    generate   the target's replies, turn by turn
    screen     drop replies with personal data or secrets, or of poor quality
    audit      which tokens are supervised
    commit     the shard, with what it left out and its tallies
    finish     audit.json, datasheet.md and manifest, from the entries of all shards; the prompts,
               which were not screened, are removed

Shards are finished in any order, by any number of processes. A shard's bytes depend on its own
prompts alone, so a killed run ends with the same ones.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline import __version__
from pipeline.config import RunConfig, SynthSection, prepare_process
from pipeline.console import long_step, notice, progress_bar
from pipeline.errors import CorruptShard, DataError, EndpointError, StageConflict
from pipeline.prompts.changes import commits_in, notice_changes
from pipeline.prompts.sources import require_files
from pipeline.records import Arithmetic, Manifest, Prompt, Sample, TargetContract
from pipeline.store.location import Location
from pipeline.store.manifest import MANIFEST, find_manifest, read_begin, stage_location
from pipeline.store.samples import (
    PROMPTS,
    SELECTION,
    PromptShard,
    Selection,
    delete_prompts,
    encode_samples,
    load_prompt_shard,
)
from pipeline.store.shards import SHARDS, read_entries, reading_tallies
from pipeline.store.stage_run import Claims, StageRun, make_shards, open_stage
from pipeline.synth.audit import (
    AUDIT,
    MUCH_REPEATED,
    Tallies,
    add,
    audit_mask,
    audit_record,
    check_tallies,
    count_tokens,
    forecast,
    show_sample,
    tally,
)
from pipeline.synth.datasheet import DATASHEET, write_datasheet
from pipeline.synth.generate.backend import GeneratorBackend
from pipeline.synth.generate.conversations import (
    ConversationRunner,
    ConversationScheduler,
    PromptBatch,
)
from pipeline.synth.screening import Screen, ScreenedPrompts, Screening, pii_policy, screened_with
from pipeline.synth.select import CleanReasons, find_selection, select, synth_section
from pipeline.target.arithmetic import reason, server_arithmetic
from pipeline.target.open import Target, open_target
from pipeline.target.parallel import Group, joined
from pipeline.target.template import ChatTemplate

if TYPE_CHECKING:
    from pipeline.synth.generate.remote import Served

#: Facts of the target that decide the samples, beside its key in the configuration: a name may
#: stand for other weights today than when the stage was begun. Of a stage that an earlier version
#: has begun, `target.fingerprint` is the sampled one, and the whole one is not compared.
_OF_THE_TARGET = {
    "target.fingerprint": "sampled_fingerprint",
    "target.weights": "fingerprint",
    "target.tokenizer_hash": "tokenizer_hash",
    "target.chat_template_hash": "chat_template_hash",
}
_OTHER_STOP = (
    "; name the token that it writes after a reply as eos_token_id in generation_config.json"
)


def run(config: RunConfig) -> Manifest:
    """Do what is left of the stage, as far as no other process does.

    Raises StageIncomplete, and Eagle3Error for whatever the user can fix; LostProcess where several
    processes share the target.
    """
    if config.synth is None or config.synth.parallel == "none":
        return _run(config, Group())
    with joined(config.synth.parallel, config.target, stage="synth") as group:
        if group.rank == 0:
            return group.broadcast(_run(config, group))
        return _follow(config, group)


def _follow(config: RunConfig, group: Group) -> Manifest:
    """What all processes of a group do but rank 0: decode what it decodes, and store nothing.

    Rank 0 broadcasts the contract of the target to load, and at the end the stage's manifest.
    """
    while not isinstance(received := group.broadcast(None), Manifest):
        from pipeline.decoder.leading import FollowingEngine
        from pipeline.synth.generate.local import open_local

        prepare_process(config.run)
        target = open_target(config.target, expected=received, where="rank 0", decoded=True)
        engine = open_local(synth_section(config), target, group)
        assert isinstance(engine, FollowingEngine)
        engine.follow()
    return received


def _run(config: RunConfig, group: Group) -> Manifest:
    prepare_process(config.run)
    # Everything is loaded before the directory is touched: a mistake leaves no begun stage behind.
    pipeline = None if _is_finished(config) else _open_pipeline(config, group)
    if pipeline is None:
        stage_run = open_stage(config, "synth", None)
        if stage_run.manifest:
            return _complete(config, stage_run, stage_run.manifest)
        pipeline = _open_pipeline(config, group)  # finished, but discarded as damaged by --force
    stage_run, selection = _begin(config, pipeline)
    if stage_run.manifest:  # another process has finished it since this one looked
        pipeline.close()
        return _complete(config, stage_run, stage_run.manifest)
    pipeline.template.set_clock(stage_run.clock)
    _refuse_foreign(stage_run, selection)
    if selection.turns > 1 and synth_section(config).max_turns > 1:
        pipeline.notice_first_turns()
    counts = f"{selection.loaded:,} prompts, {selection.prompts:,} after the filters"
    committed = f"in {len(selection.shards)} shards, {len(stage_run.committed)} of them committed"
    notice("synth", f"{counts}, {committed}")
    _make(config, stage_run, selection, pipeline)
    pipeline.close()
    manifest = finish(config, stage_run, selection, pipeline.template, pipeline.contract)
    _remove_prompts(stage_run.location)
    return manifest


def _complete(config: RunConfig, stage_run: StageRun, manifest: Manifest) -> Manifest:
    counts = f"{manifest.rows:,} samples, {manifest.tokens:,} tokens"
    notice("synth", f"complete: {counts} at {stage_run.location.uri}")
    if selection := find_selection(stage_run.location):
        section = synth_section(config)
        notice_changes("synth", (*section.sources, *section.excluded_sources), selection.files)
    _remove_prompts(stage_run.location)
    return manifest


def _begin(config: RunConfig, pipeline: SynthPipeline) -> tuple[StageRun, Selection]:
    """The open stage and its prompts. One process selects them, and the others wait for it.

    Whose directory it is decides whoever begins first, which is after the prompts were read: one
    that cannot be read leaves no begun stage behind.
    """
    location, made_with = stage_location(config.run.uri, "synth"), pipeline.made_with
    clock = datetime.now(UTC) if pipeline.template.reads_clock else None

    def open_begun() -> StageRun:
        return open_stage(config, "synth", None, made_with=made_with, clock=clock)

    stage_run = open_begun() if read_begin(location) else None
    if config.run.force and stage_run is None and location.exists(SELECTION):
        notice(
            "synth", f"--force: deletes {location.where(SELECTION)}, nobody's without begin.json"
        )
        location.delete(SELECTION)
    selection = _selection(config, location, pipeline.clean_reasons)
    return stage_run or open_begun(), selection


def _selection(config: RunConfig, location: Location, clean_reasons: CleanReasons) -> Selection:
    with (
        Claims(location, config.run.claim_seconds) as claims,
        long_step("synth", "selecting the prompts"),
    ):
        claims.wait_for("prompts", lambda: find_selection(location) is not None)
        return select(config, location, clean_reasons)


def _make(
    config: RunConfig, stage_run: StageRun, selection: Selection, pipeline: SynthPipeline
) -> None:
    """Generate and commit this process's shards."""
    names = selection.names
    own = {
        shard.name: shard.prompts
        for index, shard in enumerate(selection.shards)
        if config.run.owns(index)
    }
    done = sum(own[name] for name in stage_run.committed if name in own)
    with progress_bar("synth", unit="prompts", total=sum(own.values()), done=done) as bar:
        shards = {shard.name: shard for shard in selection.shards}

        def make(taken: Iterator[str]) -> None:
            pipeline.make(stage_run, (shards[name] for name in taken), bar.advance)

        def others(committed: set[str]) -> None:
            bar.advance(sum(own.get(name, 0) for name in committed))

        make_shards(stage_run, names, config.run, make, others)


class SynthPipeline:
    """What turns prompts into samples."""

    def __init__(self, config: RunConfig, group: Group) -> None:
        section, seed, self._group = synth_section(config), config.run.seed, group
        target = open_target(
            config.target,
            decoded=section.generator.backend == "local",
            packed=config.features.backend == "local",
        )
        self.contract: TargetContract = target.contract
        self.template: ChatTemplate = target.template(system_prompt=section.system_prompt)
        screen = Screen(section, seed=seed)
        self.clean_reasons = screen.metadata.clean_reasons
        self._screening = partial(Screening, screen, section, seed=seed)
        facts = {name: getattr(self.contract, fact) for name, fact in _OF_THE_TARGET.items()}
        self._backend, self._arithmetic, served = _open_backend(
            section, target, self.template, group
        )
        self.made_with = facts | screened_with(section) | (served.made_with() if served else {})
        self._why = reason(self._arithmetic, config.target.dtype)
        name = _generator_name(self.contract, served)
        self._runner = ConversationRunner(section, self.template, seed=seed, name=name)
        self._limit = RejectionLimit(section)
        # Of shards in flight: prompts dropped by reason, findings in prompts.
        self._screened: dict[str, tuple[Counter[str], dict[str, Any]]] = {}
        self._is_begun = False
        self._shown = False

    def close(self) -> None:
        """Nothing more is made: let the other processes of the decoder go."""
        if self._group.size > 1:
            from pipeline.synth.generate.local import LocalBackend

            assert isinstance(self._backend, LocalBackend), "servers are asked by one process"
            self._backend.close()

    def notice_first_turns(self) -> None:
        """Say so where the template continues no conversation beyond its first reply."""
        for name in self._runner.stops_after_reply():
            ends = f"most conversations end with their first reply, counted under {name}"
            fix = _OTHER_STOP if name == "other_stop_token" else ""
            notice("synth", f"by the chat template {ends} (docs/synth.md){fix}")

    def make(
        self, stage_run: StageRun, shards: Iterable[PromptShard], advance: Callable[[int], None]
    ) -> None:
        """Generate the samples of `shards` and commit them as they finish.

        `advance` is given every prompt once, when it is dropped or its conversation ends.
        """
        with self._screening() as screening:
            screened = screening.prompts(self._prompt_shards(stage_run, shards))
            scheduler = ConversationScheduler(
                self._runner,
                self._note_dropped(screened, advance),
                across_shards=self._backend.batch_invariant,
                advance=advance,
            )
            for batch in scheduler.run(self._backend):
                screening.commit(partial(self._commit, stage_run, batch, screening))

    def _commit(self, stage_run: StageRun, batch: PromptBatch, screening: Screening) -> None:
        """Screen and audit a batch's samples, and store them as a shard."""
        samples, leaking, leaked = screening.samples(batch.samples)
        dropped, findings = self._screened.pop(batch.name)
        rejected = dropped + batch.rejected + leaking
        self._limit.add(rejected, prompts=len(samples) + rejected.total())
        audit_mask(samples, where=stage_run.location.child(SHARDS).where(batch.name))
        self._show_once(samples)
        notes = {
            "ended": dict(batch.ended),
            "dropped_prompts": dict(dropped),
            "dropped_replies": dict(leaking),
            "findings": findings | leaked,
            "spelt_control_tokens": self._spelling(samples),
        }
        stage_run.commit(
            batch.name,
            encode_samples(samples, notes),
            rows=len(samples),
            tokens=count_tokens(samples)[1],
            rejected=rejected,
            tallies=tally(samples, notes),
        )

    def _spelling(self, samples: Sequence[Sample]) -> Counter[str]:
        """Messages by role whose text spells a control token."""
        spells = self.template.spells_control_token
        return Counter(
            message.role
            for sample in samples
            for message in sample.messages
            if spells(message.content)
        )

    def _prompt_shards(
        self, stage_run: StageRun, shards: Iterable[PromptShard]
    ) -> Iterator[tuple[str, Sequence[Prompt]]]:
        for shard in shards:
            if not self._is_begun:
                self._limit.add_committed(stage_run)
                stage_run.compute_with(self._arithmetic, why=self._why)
                self._is_begun = True
            try:
                yield shard.name, load_prompt_shard(stage_run.location, shard)
            except CorruptShard:
                if not stage_run.location.exists(MANIFEST):
                    raise
                return  # another process has finished the stage, and removed its prompts

    def _note_dropped(
        self, screened: Iterable[tuple[str, ScreenedPrompts]], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, Sequence[Prompt]]]:
        for name, (clean, dropped, findings) in screened:
            self._screened[name] = dropped, findings
            advance(dropped.total())
            yield name, clean

    def _show_once(self, samples: Sequence[Sample]) -> None:
        if samples and not self._shown:
            show_sample(samples[0], lambda ids: self.template.text(tuple(ids), special=True))
            self._shown = True


def _open_pipeline(config: RunConfig, group: Group) -> SynthPipeline:
    if not stage_location(config.run.uri, "synth").exists(SELECTION):
        section = synth_section(config)
        require_files((*section.sources, *section.excluded_sources))
    with long_step("synth", "reading the target"):
        return SynthPipeline(config, group)


def _is_finished(config: RunConfig) -> bool:
    manifest = find_manifest(config.run.uri, "synth")
    return manifest is not None and manifest.config_hash == config.section_hash("synth")


def _open_backend(
    section: SynthSection, target: Target, template: ChatTemplate, group: Group
) -> tuple[GeneratorBackend, Arithmetic, Served | None]:
    """What generates the replies, what it computes with, and the servers if it is any."""
    generator, contract = section.generator, target.contract
    if generator.backend == "local":
        from pipeline.synth.generate.local import LocalBackend, open_local

        group.broadcast(contract)
        local = LocalBackend(open_local(section, target, group))
        return local, local.arithmetic, None
    from pipeline.synth.generate.remote import open_remote

    source, vocabulary = contract.source, contract.vocab_size
    remote, served = open_remote(generator, template, source=source, vocabulary=vocabulary)
    return remote, server_arithmetic(generator.backend), served


def _generator_name(contract: TargetContract, served: Served | None) -> str:
    """What the samples say produced them; without addresses, which are nobody's business."""
    by = f", {served}" if served else ""
    return f"{contract.source}@{contract.revision}{by}, eagle3 {__version__}"


def _refuse_foreign(stage_run: StageRun, selection: Selection) -> None:
    """Committed shards of other prompts: somebody has selected them anew."""
    foreign = sorted(stage_run.committed - set(selection.names))
    if foreign:
        raise StageConflict(
            "was made from prompts that the sources no longer give",
            where=stage_run.location.child(SHARDS).where(foreign[0]),
            fix="restore the prompt files, or choose another run.uri=…",
        )


def _remove_prompts(location: Location) -> None:
    """They are as their sources gave them, with personal data; a finished stage needs none."""
    delete_prompts(location, location.child(PROMPTS).names())


#: Fewer rejections say nothing about the servers.
_LEAST = 20
#: Shards committed earlier of which the counts are looked up, evenly spread.
_LOOKED_AT = 1000


class RejectionLimit:
    """The section's share of the prompts so far, over all threads of this process."""

    def __init__(self, section: SynthSection) -> None:
        self._most, self._is_local = section.max_rejected, section.generator.backend == "local"
        self._lock = threading.Lock()
        self._rejected: Counter[str] = Counter()
        self._prompts = 0

    def add_committed(self, stage_run: StageRun) -> None:
        """Count the shards that are committed. Raises EndpointError beyond the limit."""
        names = [] if self._is_local else sorted(stage_run.committed)
        names = names[:: -(-len(names) // _LOOKED_AT) or 1]
        for entry in read_entries(stage_run.location.child(SHARDS), names):
            shard = entry.shard
            self.add(shard.rejected, prompts=shard.rows + sum(shard.rejected.values()))

    def add(self, rejected: Mapping[str, int], *, prompts: int) -> None:
        """Count further prompts. Raises EndpointError beyond the limit."""
        with self._lock:
            self._prompts += prompts
            for reason, count in rejected.items():
                if reason.startswith("remote:"):
                    self._rejected[reason] += count
            lost = self._rejected.total()
            if lost < _LEAST or lost <= self._most * self._prompts:
                return
            reasons = ", ".join(f"{name} {count:,}" for name, count in self._rejected.most_common())
            counts = f"{lost:,} of {self._prompts:,} prompts ({lost / self._prompts:.1%})"
            raise EndpointError(
                f"the servers cost {counts}, at most {self._most:.1%} may get lost: {reasons}",
                where="synth.max_rejected",
                fix="docs/synth.md says what the reasons mean; mend the servers and run the same "
                "command again, committed shards are kept; or raise synth.max_rejected",
            )


#: What the manifest and the audit repeat of the section.
_SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "max_turns",
    "on_length",
    "system_prompt",
    "mix",
}


def finish(
    config: RunConfig,
    stage_run: StageRun,
    selection: Selection,
    template: ChatTemplate,
    contract: TargetContract,
) -> Manifest:
    """Commit the stage. Raises StageIncomplete while shards are missing, DataError without samples,
    EndpointError where servers cost too many prompts.
    """
    tallies: Tallies = {"samples": 0, "tokens": 0, "supervised": 0, "system_prompts": 0}
    rejected = Counter(selection.rejected)
    shards = []
    for entry in stage_run.collect(selection.names):
        shards.append(entry.shard)
        with reading_tallies(stage_run.location, entry) as of_shard:
            check_tallies(of_shard)
            add(tallies, of_shard)
        rejected.update(entry.shard.rejected)
    if selection.loaded != tallies["samples"] + rejected.total():
        problem = f"count {tallies['samples']:,} samples and {rejected.total():,} rejected prompts"
        where = stage_run.location.child(SHARDS).uri
        fix = "restore them, or run `eagle3 synth --force`"
        problem = f"entries {problem}, {selection.loaded:,} were loaded"
        raise CorruptShard(problem, where=where, fix=fix)
    RejectionLimit(synth_section(config)).add(rejected, prompts=selection.prompts)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(rejected.items()))
    if not tallies["samples"]:
        problem = f"none of {selection.loaded:,} prompts became a sample ({reasons})"
        fix = "widen synth's filters or raise its limits, then run again with --force"
        raise DataError(problem, where=stage_run.location.uri, fix=fix)
    details = _details(config, selection, template, tallies)
    section = synth_section(config)
    if commits := commits_in((*section.sources, *section.excluded_sources), selection.files):
        details["commits"] = commits
    if stage_run.clock:
        details["template"]["clock"] = stage_run.clock.isoformat()
    details["forecast"] = forecast(
        contract, stage_run.location, shards, supervised=tallies["supervised"]
    )
    audit = audit_record(tallies, details, rejected, contract)
    for name, text in ((AUDIT, audit.as_json()), (DATASHEET, write_datasheet(audit))):
        stage_run.write_once(name, text.encode())
        details[f"{name}_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    manifest = stage_run.finish(
        contract=contract,
        licenses=tallies["licenses"],
        sources={name: counts["samples"] for name, counts in tallies["sources"].items()},
        details=details,
        rejected_extra=selection.rejected,
        files=(SELECTION, AUDIT, DATASHEET),
    )
    made = f"{manifest.rows:,} samples, {manifest.tokens:,} tokens"
    supervised = f"{details['supervised_share']:.0%} supervised"
    notice("synth", f"{made}, {supervised}; rejected: {reasons or 'none'}")
    if (repeated := details["forecast"]["repeated_share"]) > MUCH_REPEATED:
        teach = "repeat what their sample has said, and teach a head little"
        where = "docs/synth.md#greedy-or-drawn"
        notice("synth", f"{repeated:.0%} of the generated tokens {teach} ({where})")
    notice("synth", f"datasheet: {stage_run.location.where(DATASHEET)}")
    return manifest


def _details(
    config: RunConfig, selection: Selection, template: ChatTemplate, tallies: Mapping[str, Any]
) -> dict[str, Any]:
    """What the manifest says of this stage alone."""
    section = synth_section(config)
    return {
        "prompts": {
            "loaded": selection.loaded,
            "selected": selection.prompts,
            "samples": tallies["samples"],
        },
        "supervised_tokens": tallies["supervised"],
        "supervised_share": round(tallies["supervised"] / tallies["tokens"], 6),
        "sampling": section.model_dump(mode="json", include=_SAMPLING),
        "template": {
            "kwargs": config.target.chat_template_kwargs,
            "stop_ids": list(template.stop_ids),
            "end_of_turn": template.end_of_turn,
        },
        "pii": pii_policy(section),
    }
