"""The kernels as TensorRT quick plugins, which are Triton kernels that are compiled to PTX ahead of time.

In: a `FusedGemm` or `FusedConv2d` of an ONNX file. Out: a plugin in TensorRT's registry, whose PTX the engine holds.
"""
