"""The Triton kernels: their source, their launch, and cross-compilation for GPUs of other machines.

In: a spec, a configuration and tensors. Out: the result, from a GPU or from Triton's interpreter, or compiled code.
"""
