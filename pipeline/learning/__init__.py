"""What every trained head shares, whatever its algorithm.

corpus.py           which pieces of which samples are trained on
batches.py          which pieces make up batch n, packed into tensors and read ahead
attention.py        attention of an unroll; blocked.py and flex.py are its two backends
window.py           which positions a draft window hides
losses.py           distances from the teacher; losses_kernel.py is their Triton kernel
least_squares.py    ridge regression on the first batches
"""
