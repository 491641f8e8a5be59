"""The target model: where it comes from, what it is, how it is prompted, what is captured.

open.py          the way in: resolved, understood, contract matched, the parts below on demand
resolve.py       hub id, directory, GGUF file or pip package → a directory of safetensors
files.py         which safetensors files of a directory transformers would load
gguf/            what a GGUF file says of its model, applied to the converted one or refused
architecture.py  its config.json → whether it can be trained for, and where it departs from Llama
contract.py      that directory → TargetContract
arithmetic.py    which type this machine computes with, and what may be promised of the results
template.py      conversations → token ids, through the target's own chat template
weights.py       single tensors of that directory, without building the model
load.py          the Hugging Face model, ready for packed forwards
forward.py       which states are captured, and one packed forward that captures them
parallel.py      one target over several processes
"""
