"""Before a refresh: whether the head of an earlier run can go on as one for the tuned target.

All of this would stop a later stage, when replies and states have been paid for.
"""

from __future__ import annotations

from pipeline.config import RunConfig, take_settings
from pipeline.console import notice
from pipeline.errors import ConfigError
from pipeline.heads.registry import algorithm_of
from pipeline.prompts.changes import notice_changes
from pipeline.records import match_contracts
from pipeline.serve_eval.compare import check_prompts
from pipeline.serve_eval.questions import load_evaluation_prompts
from pipeline.store.manifest import manifest_where, read_manifest, stage_location, vouched_head
from pipeline.store.samples import find_selection
from pipeline.synth.select import draws_from, synth_section
from pipeline.target.open import Target, open_target
from pipeline.train.prepare import choose_init


def check_refresh(config: RunConfig) -> None:
    """Raises MissingStage for an earlier run without a head, CorruptShard for a damaged one,
    TargetError and ContractMismatch for a target that is no fine-tune of the earlier one,
    ConfigError where there is nothing to refresh or the heads would differ in shape, and DataError
    with too few evaluation prompts for a verdict.
    """
    take_settings(config.run)
    assert config.refresh is not None, "the command has looked"
    run, section = config.refresh.run, synth_section(config)
    before, where = read_manifest(run, "train"), manifest_where(run, "train")
    vouched_head(run)
    target = open_target(config.target, decoded=True)
    match_contracts(target.contract, before.contract, where=where, tuned=True)
    if target.contract.has_weights_of(before.contract):
        raise ConfigError(
            f"has the weights that the head of {run} was made for: there is nothing to refresh",
            where=f"target.source={config.target.source}",
            fix="set target.source to the fine-tuned target, or keep that head",
        )
    _check_shapes(config, target)
    check_prompts(len(load_evaluation_prompts(config)[0]), where="eval.sources")
    selection = find_selection(stage_location(run, "synth"))
    if selection and not draws_from(config, selection):
        others = "sources, filters or shards of the synth section are others"
        notice("refresh", f"the prompts are not those of {run}: {others}")
    elif selection:
        notice_changes("refresh", (*section.sources, *section.excluded_sources), selection.files)
    notice("refresh", f"the head of {run} goes on; {section.share:.0%} of the prompts are answered")


def _check_shapes(config: RunConfig, target: Target) -> None:
    """Raises ConfigError where a head from scratch would be another one than the earlier head."""
    earlier, fresh = (
        choose_init(each.train, target.directory, target.contract, refresh=each.refresh)
        for each in (config, config.from_scratch)
    )
    assert earlier.earlier is not None, "it starts from a head"
    settings = algorithm_of(earlier.earlier).settings(config.train)
    for key, name in settings.fixed.items():
        ours, theirs = (getattr(each.shape, name, None) for each in (fresh, earlier))
        if ours != theirs:
            raise ConfigError(
                f"a head from scratch has {ours}, the one of {config.train.start_from} {theirs}",
                where=f"{settings.key}.{key}",
                fix=f"set it to {theirs}, as in the earlier run",
            )
