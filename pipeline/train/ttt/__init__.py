"""Training-time test: the head unrolled on its own outputs.

unroll.py      K steps over one packed batch (drawn there)
attention.py   causal over step 0, own position over the later steps; picks one of the next two
blocked.py     in blocks of rows, with a backward pass that recomputes
flex.py        by FlexAttention, on CUDA
model.py       the unrolled head and its loss, as the module that DeepSpeed trains
divergence.py  the losses over the draft vocabulary, in chunks
divergence_kernel.py  a chunk's on CUDA
"""
