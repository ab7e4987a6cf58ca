"""Proofs that the kernels are right on this machine: interpreter, compilation, library, kernels on the CPU.

In: the kernels' sources and the tools that are installed. Out: one `Proof` per check, with the result or the missing
tool.
"""
