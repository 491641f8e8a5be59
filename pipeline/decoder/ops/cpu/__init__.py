"""The operations in C++ for CPUs, compiled on first use; ops/eager.py serves where they cannot run.

ops.py      CpuOps: what `TorchOps` promises, through ctypes
library.py  finds a compiler, compiles src/, caches the library; structures that kernels read
src/        the kernels
"""
