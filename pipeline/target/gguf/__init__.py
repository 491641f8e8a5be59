"""What a GGUF file says of its model, applied to the converted one or refused by name.

metadata.py   its keys and tensors → is all of it in the converted config.json and tokenizer?
rope.py       `rope.scaling.*` and `rope_freqs.weight` → transformers' rope_parameters
"""
