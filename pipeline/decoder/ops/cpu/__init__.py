"""The operations in C++ for CPUs, compiled on first use. Nothing else needs this folder: without it, ops/base.py serves.

ops.py      CpuOps: what `TorchOps` promises, through ctypes
library.py  finds a compiler, compiles src/, keeps the library in the cache
src/        the kernels
"""
