"""The target model: where it comes from, what it is, how it is prompted, what is captured.

resolve.py   hub id, directory, GGUF file or pip package → a directory of safetensors
contract.py  that directory → TargetContract
template.py  conversations → token ids, through the target's own chat template
load.py      the Hugging Face model, ready for packed forwards
capture.py   which states are captured, and how
"""
