"""Choosing and calling a kernel: the choice, its dispatch, the tuner and the table of its results.

In: a spec, the tensors, and the GPU that is there. Out: the result of the chosen kernel, and the reason for the choice.
"""
