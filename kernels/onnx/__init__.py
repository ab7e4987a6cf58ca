"""Provides the kernels as ONNX operators, with function bodies for any runtime, export from PyTorch, and fusion of
graphs.

Takes an ONNX model or an exported program. Inserts accel's operators, such as `accel::FusedGemm`, and gives each
operator a function body.
"""
