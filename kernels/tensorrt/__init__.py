"""Provides the kernels as TensorRT quick plugins. Triton compiles these kernels to PTX ahead of time.

Takes a `FusedGemm` or `FusedConv2d` of an ONNX file. Registers a plugin with TensorRT. The TensorRT engine contains the
plugin's PTX.
"""
