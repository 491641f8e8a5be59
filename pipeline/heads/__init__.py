"""Draft heads: one algorithm a package, reached through the registry alone (docs/heads.md).

algorithm.py    what an algorithm must provide
registry.py     algorithms by name, the packages of third parties too; `open_head`, `save_head`
base.py         shape, layers and vocabulary of any head
init.py         how a head of any algorithm begins
trained.py      a head with its teacher, as the trainer steps it; unrolled.py for those that unroll
checkpoint.py   a head's directory and its card; fields.py and rope.py read config.json

eagle3/         shape, init, ttt, drafter, checkpoint; sglang.py and speculators.py are its dialects
mtp/            the same for a chain of heads, one a step; mimo.py is the dialect that servers read
dflash/         the same for a block drafter; blocks.py is its objective
"""
