"""Which draft tree is fastest here: measured costs, traced acceptance, what the hardware allows.

cost.py      times forwards, drafts and rounds of this machine, and predicts a round's cost
trace.py     traces a head's ranks once, and replays every tree shape on them
tune.py      picks the fastest shape for each batch size
roofline.py  bandwidth and arithmetic floors
simulate.py  acceptance imposed on a random head, for benchmarks of the machinery
score.py     what the plain model makes of a decoder's text: near-ties, and draws off their seed
"""
