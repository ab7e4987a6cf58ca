"""Provides the kernels as ONNX operators with function bodies that any runtime can run.

Takes an ONNX model or an exported PyTorch program. Inserts accel's operators, such as `accel::FusedGemm`, and gives
each operator a function body.
"""
