"""The kernels in PyTorch: operators, modules, and `fuse`, which replaces a module's layers by fused modules.

In: tensors or an `nn.Module` in eval mode. Out: the results, or a verified fused copy of the module.
"""
