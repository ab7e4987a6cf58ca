"""Quantizes weights to int8, and activations in each run. `plain` has one scale for an activation, `outliers` takes its
largest columns out. Takes the task of a child process. Gives the quantized file.
"""
