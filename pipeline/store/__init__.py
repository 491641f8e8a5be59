"""Run directories on any storage: shards with checksums, atomic commit, byte ranges, a local cache.

location.py    a directory on any fsspec filesystem: disk.py or remote.py behind one interface
backend.py     that interface, the stores' checksums, and the system's errors in one line
retry.py       which failures of a remote store pass, and for how long it is tried again
shards.py      one committed file and its entry
stage_run.py   a stage's directory: begin, commit, finish, resume
samples.py     samples ⇄ Parquet
states/        states ⇄ safetensors (the layout is drawn in docs/states-format.md)
cache.py       remote shards on the local disk
verify.py      `eagle3 verify`
gc.py          `eagle3 gc`
"""
