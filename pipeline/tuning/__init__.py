"""Which draft tree is fastest here: measured costs, traced acceptance, what the hardware allows.

cost.py          times forwards, drafts and rounds of this machine, predicts a round's cost and
                 its floor
trace.py         traces a head's ranks once, and replays every tree shape on them
tune.py          picks the fastest shape for each batch size; plans drafters over batch and context
verification.py  checks a decoder's text with the plain model; imposes acceptance for benchmarks
"""
