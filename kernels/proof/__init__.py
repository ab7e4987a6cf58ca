"""Proves that the kernels are correct on this machine, with the interpreter, the compiler, the library, and runs on the
CPU.

Checks the kernels' sources with the tools that are installed. Returns one `Proof` per check, with its result or the
tool that is missing.
"""
