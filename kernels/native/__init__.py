"""The compiled kernels: C++ and CUDA sources (`csrc`, `plugins`), their build, and calls into the library.

Builds a shared library in the cache from the sources, with a compiler. Passes tensors to the library, and returns the
results of its kernels.
"""
