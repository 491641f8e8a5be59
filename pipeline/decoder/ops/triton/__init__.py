"""The operations as Triton kernels, for CUDA; on a CPU under TRITON_INTERPRET=1, for tests.

ops.py         TritonOps: outputs, block sizes and grids of each launch
language.py    names for the types of a kernel's arguments
rows.py        residual addition and RMS norm; SiLU times gate
kv.py          rotary embedding, keys and values into their cache slots; accepted entries compacted
attention.py   tree attention over a paged cache, split over the keys, and the merge of the splits
top_k.py       the largest logit, the k most likely tokens; floats as integers of the same order
tree.py        growing the draft tree, verifying it
sampling.py    drawing tokens along the walk through a tree; Philox
"""
