"""The Triton kernels, one file a subject. `pipeline.decoder.ops.triton.ops` launches them.

language.py     names for the types of a kernel's arguments
order.py        floats and indices as integers that sort the same way
norm.py         residual addition and RMS norm
activation.py   SiLU times gate
rope.py         rotary embedding, and keys and values into their cache slots
attention.py    attention over a paged cache, split over the keys, and the merge
argmax.py       the largest logit
proposal.py     the most likely tokens and their log-probabilities
tree.py         growing the draft tree, walking it
random.py       Philox
sampling.py     drawing tokens along the walk through a tree
compact.py      accepted entries to their final slots
"""
