"""The operations as Triton kernels, for CUDA; on a CPU under TRITON_INTERPRET=1, for tests.

ops.py         TritonOps: outputs, block sizes and grids of each launch
choices.py     the same of what chooses tokens: from logits, among beams, along a tree
launch.py      where every kernel starts
language.py    the types of a kernel's arguments, and what is compiled for each
rows.py        residual addition and RMS norm; SiLU times gate; a draft head's input
kv.py          rotary embedding, keys and values into their cache slots; accepted entries compacted
attention.py   tree attention over a paged cache, split over the keys, and the merge of the chunks
top_k.py       the largest logit, the k most likely tokens; floats as integers of the same order
tree.py        selecting beams, growing the draft tree, verifying it
sampling.py    drawing tokens at every node: threshold, noise, largest
"""
