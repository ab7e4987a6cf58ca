"""The Triton kernels: their source, their launch, and cross-compilation for GPUs of other machines.

A launch takes a spec, a configuration and tensors, and runs on a GPU or in Triton's interpreter. Cross-compilation
takes a configuration and an architecture, and returns the figures of the compiled code.
"""
