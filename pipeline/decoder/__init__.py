"""The bundled decoder: one engine for plain and speculative decoding.

model.py      dense Llama-family target over a static KV cache
kv.py         the cache
tree.py       the draft tree: nodes, ancestors, and the attention mask they imply
verify.py     which nodes the target agrees with; sampling of plain decoding
drafters/     what proposes trees: a protocol and its implementations
round.py      draft → verify → accept → compact → extend
engine.py     requests over slots, stop conditions, statistics
"""
