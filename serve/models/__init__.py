"""The models of a repository: reads folders and configs, and loads, warms up, replaces and unloads versions.

In: a folder in Triton's layout, or an address that fsspec reads. Out: a `ServedModel` for each version that serves.
"""
