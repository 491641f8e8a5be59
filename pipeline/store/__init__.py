"""Object storage: run layout, shards with checksums, atomic commit, byte-range reads, local cache.

location.py  a directory on any fsspec filesystem
shards.py    one committed file and its entry
stage.py     a stage's directory: begin, commit, finish, resume
samples.py   samples ⇄ Parquet
states.py    states ⇄ safetensors (the layout is drawn in docs/states-format.md)
"""
