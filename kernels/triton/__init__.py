"""The Triton kernels: their source, their launch, and cross-compilation for GPUs of other machines.

In: a spec, a configuration and tensors. Out: compiled code, or the result that a GPU or Triton's interpreter computes.
"""
