"""The decoder: one engine for plain and speculative decoding, on a CPU and on CUDA.

engine.py     the scheduler: waiting queue, admission, rounds in flight, retirement
prefill.py    the prefill batch: prompts packed into forwards, and their way to the device
request.py    what goes in and what comes out
round.py      draft → verify → accept → compact → extend, without a decision on the host
graphs.py     how rounds are launched, eagerly or as one CUDA graph per batch size; pending tokens
batch.py      the static buffers that rounds work in
model.py      dense Llama-family targets; layers as the operations want them
kv.py         one pool of key/value pages and its allocator, shared by target and drafter; its size
drafter.py    the interface of what proposes trees
backends.py   which operations a device gets
ops/          every operation in torch, in C++ for CPUs, in Triton for CUDA
"""
