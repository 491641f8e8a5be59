"""What a GGUF file says of its model, applied to the converted one or refused by name.

metadata.py   its keys and tensors → is all of it in the converted config.json and tokenizer?
tokenizer.py  `tokenizer.ggml.*` → tokenizer.json, where transformers makes another one
rope.py       `rope.scaling.*` and `rope_freqs.weight` → transformers' rope_parameters
"""
