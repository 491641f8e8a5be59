"""Which draft tree is fastest here: measured costs, traced acceptance, and what the hardware allows.

cost.py      times forwards, drafts and rounds of this machine, and predicts a round's cost
tune.py      traces a head's ranks once, replays every tree shape on them, picks the fastest
roofline.py  bandwidth and arithmetic floors
simulate.py  acceptance imposed on a random head, for benchmarks of the machinery
score.py     τ and α of a head on given replies, without decoding
"""
