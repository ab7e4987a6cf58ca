"""Builds and calls the compiled kernels, whose C++ and CUDA sources are in `csrc` and `plugins`.

Compiles the sources to a shared library in the cache folder. Passes tensors to the library, and returns the results of
its kernels.
"""
