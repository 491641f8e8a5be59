"""Drafters that need no training, and the registry that makes any drafter by its name.

registry.py     `load_drafter`: by configuration; entry points add others
ngram.py        copies from the context and from a corpus
lookup.py       does so beside another drafter, in one tree with it
standalone.py   a smaller model with the same tokenizer; whole_model.py is what it shares with
self_spec.py    the target itself on a small part of its cache (StreamingLLM, SnapKV)
"""
