"""Prompts to samples.

stage.py      all of it, shard by shard; plan.py says what it would do
select.py     prompts after all filters that need no model, cut into shards
filters.py    the filters: licences, lengths, duplicates, evaluation sets, quality
screening.py  the policy: prompts and samples dropped or changed, in processes beside generation
privacy/      detects personal data and secrets, and replaces them
generate/     the target replies, turn by turn, through the bundled decoder or servers
audit.py      each shard's mask checked; audit.json, counted from the shards' tallies
datasheet.py  datasheet.md, rendered from audit.json through datasheet.md.j2
dataset.py    a run's samples as a data set, and such a data set as the stage of a run
"""
