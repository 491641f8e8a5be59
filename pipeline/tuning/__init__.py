"""Which draft tree is fastest here: measured costs, traced acceptance, what the hardware allows.

cost.py          times forwards, drafts and rounds of this machine, and predicts a round's cost
trace.py         traces a head's ranks once, and replays every tree shape on them
tune.py          picks the fastest shape for each batch size; plans drafters over batch and context
roofline.py      bandwidth and arithmetic of this machine, and the floors that follow
verification.py  checks a decoder's text with the plain model; imposes acceptance for benchmarks
"""
