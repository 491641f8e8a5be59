"""Object storage: run layout, shards with checksums, atomic commit, byte-range reads, local cache.

location.py      a directory on any fsspec filesystem: disk.py or remote.py behind one interface, backend.py
retry.py         which failures of a remote store pass, and how long to wait
failures.py      the others, said in one line
shards.py        one committed file and its entry
stage.py         a stage's directory: begin, commit, finish, resume
cache.py         remote shards on the local disk
verify.py        `eagle3 verify`
housekeeping.py  `eagle3 gc`
samples.py       samples ⇄ Parquet
states.py        states ⇄ safetensors (the layout is drawn in docs/states-format.md)
"""
