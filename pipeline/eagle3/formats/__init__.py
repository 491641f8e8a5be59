"""The two dialects of a head on disk; docs/head-format.md has both field by field.

fields.py       what both read alike: shape, rotary parameters, switches that this head lacks
sglang.py       LlamaForCausalLMEagle3: our own directory, SGLang, SpecForge, SafeAILab
speculators.py  Eagle3Speculator: speculators and, through it, vLLM
foreign.py      a directory in either dialect → a head under our names, checked
"""
