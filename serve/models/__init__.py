"""Manages the models of a repository: reads folders and configs, and loads, warms up, replaces and unloads versions.

Reads a folder in Triton's layout, or an address that fsspec opens. Makes a `ServedModel` for each served version.
"""
