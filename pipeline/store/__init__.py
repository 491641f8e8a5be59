"""Run directories on any storage: shards with checksums, atomic commit, byte ranges, a local cache.

location.py    a directory on any fsspec filesystem
backend.py     what a Location needs from disk.py (a local disk) and remote.py (an object store)
hub.py         repositories on the Hugging Face Hub, read at one commit
output.py      a new directory, here, on an object store or as one commit on the Hub
shards.py      one committed file and its entry; remote shards in a cache on the local disk
manifest.py    begin.json, manifest.json, report.json
stage_run.py   a stage's directory: begin, claim, commit, finish, resume
parts.py       which samples share a shard of states
samples.py     samples and selected prompts ⇄ Parquet
states.py      states ⇄ safetensors (the layout is drawn in docs/states-format.md)
encodings.py   bf16, fp8 and int8 rows of states
verify.py      `eagle3 verify`
gc.py          `eagle3 gc`
"""
