"""Run directories on any storage: shards with checksums, atomic commit, byte ranges, a local cache.

location.py    a directory on any fsspec filesystem
backends/      what keeps its files: a local disk, or a remote store with repetition
shards.py      one committed file and its entry
begin.py       whose work a stage's directory holds
stage_run.py   a stage's directory: begin, commit, finish, resume
manifest.py    how a manifest is read
claims.py      which process makes which shard
prompts.py     the prompts that synth has selected
samples.py     samples ⇄ Parquet
states/        states ⇄ safetensors (the layout is drawn in docs/states-format.md)
cache.py       remote shards on the local disk
verify.py      `eagle3 verify`
gc.py          `eagle3 gc`
"""
