"""The decoder: one engine for plain and speculative decoding, on a CPU and on CUDA.

engine.py     the scheduler: waiting queue, admission, prefill, rounds in flight, retirement
leading.py    the scheduler of several processes that share a target: rank 0 decides, others follow
request.py    what goes in and what comes out
round.py      draft → verify → accept → compact → extend, without a decision on the host
graphs.py     how rounds are launched, eagerly or as one CUDA graph per batch size; pending tokens
batch.py      the static buffers that rounds work in
model.py      dense Llama-family targets; layers, and operations, as the device wants them
kv.py         one pool of key/value pages and its allocator, shared by target and drafter; its size
drafter.py    the interface of what proposes trees
ops/          every operation in torch, in C++ for CPUs, in Triton for CUDA
"""
