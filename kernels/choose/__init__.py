"""Chooses a kernel and calls it. Contains the choice, the dispatch, the tuner and the table of tuning results.

Takes a spec, its tensors and this machine's GPU. Returns the result of the chosen kernel, or tells the reason for the
choice.
"""
