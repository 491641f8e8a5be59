"""The EAGLE-3 draft head: module, vocabulary map, initialisation, and its directory on disk.

layers.py      RMSNorm and rotary embedding, shared with the decoder
frugal.py      norm and SwiGLU that keep only their inputs for the backward pass
head.py        Eagle3Head: the maths, without an opinion on attention
vocab.py       draft vocabulary ↔ target vocabulary
init.py        starting weights taken from the target
checkpoint.py  head directory: SGLang's config.json and model.safetensors, plus eagle3.json
formats/       the dialects of SGLang and of speculators, written and read
"""
