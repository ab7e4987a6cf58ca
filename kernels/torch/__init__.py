"""Provides the kernels in PyTorch as operators and modules, and `fuse`, which replaces a module's layers by fused
modules.

An operator takes tensors and returns its result. `fuse` takes an `nn.Module` in eval mode and returns a verified fused
copy.
"""
