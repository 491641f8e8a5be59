"""The bundled decoder: one engine for plain and speculative decoding, on a CPU and on CUDA.

engine.py     requests over slots: admit, prefill, rounds, emit, retire
request.py    what goes in and what comes out
round.py      draft → verify → accept → compact → extend, without a decision on the host
graphs.py     how rounds are launched: eagerly, or one CUDA graph per batch size
batch.py      the static buffers that rounds work in
model.py      dense Llama-family targets
kv.py         one pool of key/value pages, shared by target and drafter
tree.py       the draft tree and what is accepted of it
drafters/     what proposes trees: a protocol and its implementations
ops/          every operation in torch, in C++ for CPUs, in Triton for CUDA
cost.py       what the pieces of a round cost, and what speedup that allows
tune.py       which tree is fastest for a batch size
simulate.py   imposed acceptance, for speed measurements without a trained head
"""
