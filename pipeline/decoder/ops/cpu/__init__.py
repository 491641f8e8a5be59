"""The operations in C++ for CPUs, compiled on first use; where it cannot run, ops/base.py serves.

ops.py      CpuOps: what `TorchOps` promises, through ctypes
library.py  finds a compiler, compiles src/, keeps the library in the cache
src/        the kernels
"""
