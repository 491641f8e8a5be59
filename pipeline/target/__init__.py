"""The target model: where it comes from, what it is, how it is prompted, what is captured.

open.py          the way in: resolved, understood, contract matched, the parts below on demand
files.py         which safetensors files of a directory transformers would load
gguf.py          a GGUF file → the converted model, with all that the file says, or a refusal
architecture.py  its config.json → whether it can be trained for, and where it departs from Llama
arithmetic.py    which device and type this machine computes with, and what it promises of results
template.py      conversations → token ids, through the target's own chat template; end ids
rendering.py     those templates in a process of their own, with little time and memory
weights.py       single tensors of that directory, without building the model
rotary.py        rotary positions from transformers' own initialisers
forward.py       the Hugging Face model, and one packed forward that captures its states
parallel.py      one target over several processes
referee.py       whether reply tokens are the target's, token by token
agreement.py     the sums of that, and what they prove
"""
