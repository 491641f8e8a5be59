"""Training-time test: the head unrolled on its own outputs.

unroll.py      K steps over one packed batch (drawn there)
attention.py   causal over step 0, own position over the later steps; flash.py and mixing.py compute it
model.py       the unrolled head and its loss, as the module that DeepSpeed trains
divergence.py  the losses over the draft vocabulary, in chunks
"""
