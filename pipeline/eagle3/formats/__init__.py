"""The two dialects in which heads travel; docs/head-format.md has both field by field.

fields.py       what both read alike: shape, rotary parameters, switches that this head does not have
sglang.py       LlamaForCausalLMEagle3: our own directory, SGLang, SpecForge, SafeAILab
speculators.py  Eagle3Speculator: speculators and, through it, vLLM
foreign.py      a directory in either dialect → a head under our names, checked
"""
