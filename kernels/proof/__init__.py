"""Proves that the kernels are correct on this machine, with the interpreter, the compiler, the built library and test
runs on the CPU.

Checks the kernels' sources with the tools that are installed. Returns one `Proof` per check, with its result or the
tool that is missing.
"""
