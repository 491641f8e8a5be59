"""A block drafter in training.

blocks.py      where blocks are trained, what they read and predict; attention of context and block
model.py       teacher, loss and accuracy of the blocks
"""
