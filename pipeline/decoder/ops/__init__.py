"""Every operation that the model, the drafters and the round are made of, once per kind of machine.

base.py      TorchOps: each operation in plain torch, the definition
layer.py     what a layer reads: its weights, and the attention metadata of a forward
tree.py      trees, beams, what is accepted, how a row samples
draft.py     candidates of a draft, and the heads that propose them
lookup.py    what stood in the text before, as candidates, and merged with others
parallel.py  layers and lm_heads over the processes of a group, and what these send each other
draws.py     logits with noise, the largest of which is a draw
eager.py     the same operations in torch for speed, where there is no other backend
cpu/         CPUs: kernels in C++, compiled on first use
triton/      CUDA: Triton kernels; on CPU under TRITON_INTERPRET=1, for tests
"""
