"""The EAGLE-3 draft head: module, draft vocabulary, initialisation, and its directory on disk.

layers.py      RMSNorm, SwiGLU (both with a backward pass that keeps inputs only), rotary positions
head.py        HeadShape and Eagle3Head: the maths, with attention passed in
init.py        a new head's shape, draft vocabulary, and weights taken from the target
checkpoint.py  head directory: SGLang's config.json and model.safetensors, plus eagle3.json
published.py   the card of a head that leaves its run: no paths
formats/       the dialects of SGLang and of speculators, written and read
"""
