"""Chooses a kernel and calls it. Contains the choice, the dispatch, the tuner and the table of tuning results.

The input is a spec with its tensors; the kernel runs on this machine's GPU. Returns the result of the chosen kernel, or
tells the reason for the choice.
"""
