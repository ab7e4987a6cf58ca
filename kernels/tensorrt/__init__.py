"""The kernels as TensorRT quick plugins, which are Triton kernels that are compiled to PTX ahead of time.

Takes a `FusedGemm` or `FusedConv2d` of an ONNX file. Registers a plugin with TensorRT. The engine holds the PTX of the
plugin.
"""
