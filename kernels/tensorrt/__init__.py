"""The kernels as TensorRT quick plugins: Triton kernels, compiled ahead of time to PTX.

In: a `FusedGemm` or `FusedConv2d` of an ONNX file. Out: a plugin in TensorRT's registry, whose PTX the engine holds.
"""
