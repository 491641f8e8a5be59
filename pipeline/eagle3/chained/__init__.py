"""Chained heads (multi-token prediction): a layer for every step, each with keys of its own.

head.py        ChainedShape and ChainedHead: the maths, with attention passed in
init.py        shape and first weights, taken from the target
checkpoint.py  its directory
mtp.py         the same in the layout that MTP classes of SGLang and vLLM read
"""
