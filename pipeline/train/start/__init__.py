"""How a head begins.

initial_head.py    shape and size limit, draft vocabulary, first weights; or an earlier head
block_drafter.py   the same of a block drafter
chained_heads.py   the same of chained heads, and what is solved of them
least_squares.py   the head's linear parts solved on the first batches
block_least_squares.py  what a block drafter's first layer attends to, and the parts behind it
"""
