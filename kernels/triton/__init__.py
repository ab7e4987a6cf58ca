"""Contains and launches the Triton kernels, and cross-compiles them for GPUs of other machines.

A launch takes a spec, a configuration and tensors, and runs on a GPU or in Triton's interpreter. Cross-compilation
takes a configuration and an architecture, and returns the resource usage and the instructions of the compiled code.
"""
