"""The Triton kernels: their source, their launch, and cross-compilation for GPUs that aren't there.

In: a spec, a configuration and tensors. Out: the result, from a GPU or from Triton's interpreter, or compiled code.
"""
