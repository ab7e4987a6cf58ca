"""The kernels in PyTorch: operators, modules, and `fuse`, which puts them in the place of a module's layers.

In: tensors or an `nn.Module` in eval mode. Out: the results, or a fused copy of the module that was verified.
"""
