"""The operations as Triton kernels, for CUDA; on a CPU under TRITON_INTERPRET=1, for tests.

ops.py         TritonOps: outputs, block sizes and grids of each launch
launch.py      where every kernel starts; the types of its arguments, and what is compiled for each
layers.py      norms, SiLU times gate, rotary embedding, cache writes; accepted entries compacted
products.py    a layer's matrix products of up to 64 tokens, with what stands before and after them
attention.py   tree attention over a paged cache, split over the keys
logits.py      the largest logit, the k most likely tokens, a draw at every node
tree.py        selecting beams, growing the draft tree, verifying it
lookup.py      what followed the last tokens before: matches, a tree of them, two trees in one
"""
