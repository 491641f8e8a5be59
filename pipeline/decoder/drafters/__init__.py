"""What proposes draft trees.

base.py    the protocol that the engine talks to
eagle3.py  the EAGLE-3 head
"""
