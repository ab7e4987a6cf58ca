"""Chooses and calls a kernel: the choice, the dispatch, the tuner and the table of tuning results.

In: a spec, the tensors, and this machine's GPU. Out: the result of the chosen kernel, and the reason for the choice.
"""
