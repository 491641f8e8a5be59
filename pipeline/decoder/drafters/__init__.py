"""What proposes draft trees.

base.py         the protocol that the engine talks to
registry.py     drafters by name
eagle3.py       the EAGLE-3 head
chained.py      a head for each step
dflash.py       the block drafter
ngram.py        prompt lookup and suffix matching
chains.py       several continuations as one tree
corpus.py       a text that all requests look up
standalone.py   a smaller model
self_spec.py    the target over a part of its cache: sinks and recent pages
snapkv.py       the same over what the end of the prompt attends to
whole_model.py  what drafters that run a whole model share
window.py       reading fewer pages
"""
