"""Provides the kernels as ONNX operators with function bodies that any runtime can run.

Works on an ONNX model or on an exported PyTorch program. Inserts accel's operators, such as `accel::FusedGemm`, and
gives each operator a function body.
"""
