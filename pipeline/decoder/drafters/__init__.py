"""What proposes draft trees.

base.py      the protocol that the engine talks to
registry.py  drafters by name
eagle3.py    the EAGLE-3 head
ngram.py     prompt lookup and suffix matching
chains.py    several continuations as one tree
corpus.py    a text that all requests look up
"""
