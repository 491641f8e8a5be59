"""States to batches.

corpus.py    which pieces of which samples are trained on
schedule.py  their order, resumable at any step
stored.py    reading them: local shards, cached remote ones, byte ranges
batches.py   packing pieces into one batch, its tensors, and reading batches ahead
"""
