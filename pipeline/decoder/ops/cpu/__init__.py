"""The operations in C++ for CPUs, compiled on first use; ops/eager.py serves where they cannot run.

ops.py      CpuOps: what `TorchOps` promises, through ctypes
structs.py  what calls read through one pointer
library.py  finds a compiler, compiles src/, keeps the library in the cache
src/        the kernels
"""
