"""Provides the kernels as TensorRT quick plugins. Triton compiles the kernels to PTX when a plugin is registered.

Takes a `FusedGemm` or `FusedConv2d` of an ONNX file. Registers a plugin with TensorRT. The TensorRT engine contains the
plugin's PTX.
"""
