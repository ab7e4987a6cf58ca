"""The models of a repository: folders and configs are read, versions loaded, warmed up, replaced and unloaded.

In: a folder in Triton's layout, or an address that fsspec reads. Out: a `ServedModel` for each version that serves.
"""
