"""The compiled kernels: C++ and CUDA sources (`csrc`, `plugins`), their build, and calls into the library.

In: the sources and a compiler, later tensors. Out: a shared library in the cache, and the results of its kernels.
"""
