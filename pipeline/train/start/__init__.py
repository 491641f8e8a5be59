"""How a head begins.

initial_head.py    shape and size limit, draft vocabulary, first weights; or an earlier head
least_squares.py   the head's linear parts solved on the first batches
"""
