"""Draft heads: one algorithm a package, reached through the registry alone (docs/heads.md).

algorithm.py    what an algorithm must provide
base.py         shape, layers and vocabulary of any head
registry.py     algorithms by name, the packages of third parties too; `open_head`, `save_head`
checkpoint.py   a head's directory and its card; fields.py, known.py, rope.py, tensors.py check it
init.py         how a head of any algorithm begins
trained.py      a head with its teacher, as the trainer steps it; unrolled.py for those that unroll
fits.py         whether a head fits a loaded target

eagle3/         shape, init, ttt, drafter, checkpoint; dialects of SGLang and of speculators
mtp/            the same for a chain of heads, one a step; mimo.py is the dialect that servers read
dflash/         the same for a block drafter; blocks.py is its objective
"""
