"""A block drafter (DFlash): all tokens of a block in one forward.

head.py        DflashShape and DflashHead: the maths, with attention passed in
init.py        shape and first weights, taken from the target
checkpoint.py  its directory, in the layout of DFlashDraftModel
foreign.py     that layout as others write it
"""
