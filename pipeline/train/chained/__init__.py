"""Chained heads in training: one a step, then the last one unrolled.

unroll.py   outputs of every step
model.py    the heads with what they are trained against
"""
